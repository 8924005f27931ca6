#include "producer.h"

#include <grpcpp/grpcpp.h>

#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "channels.h"

namespace stage {
namespace {

constexpr uint64_t INLINE_LIMIT_BYTES = 4096;
// Items are added to a message up to this size, which also limits the number of values in it.
constexpr uint64_t MESSAGE_BYTES = 64 << 10;
constexpr std::chrono::milliseconds RECONNECT{100};
// How long a stream may take to end after its last message.
constexpr std::chrono::seconds END_TIMEOUT{1};

const v1::EdgeKey* key_of(const v1::PutReply& reply) {
  switch (reply.reply_case()) {
    case v1::PutReply::kOpened: return &reply.opened().key();
    case v1::PutReply::kAck: return &reply.ack().key();
    case v1::PutReply::kCredit: return &reply.credit().key();
    case v1::PutReply::kCommit: return &reply.commit().key();
    case v1::PutReply::kRejected: return &reply.rejected().key();
    case v1::PutReply::kResync: return &reply.resync().key();
    default: return reply.has_key() ? &reply.key() : nullptr;
  }
}

// Returns whether a status is an answer of the consumer. Every other end of a stream is a broken connection.
bool is_refusal(const Failure& failure) {
  return failure.code == grpc::UNIMPLEMENTED || (failure.code != grpc::UNAVAILABLE && !failure.reason.empty());
}

}  // namespace

// A connection to a consumer, which is made again while there are flows. One thread reads replies, another one writes.
class ConsumerLink {
 public:
  using Stream = grpc::ClientReaderWriter<v1::PutChunkRequest, v1::PutChunkResponse>;

  ConsumerLink(const Identity& identity, const v1::OutputBinding& binding, const Timeouts& timeouts, std::mutex& mutex)
      : endpoint(binding.endpoint()), consumer_(binding.consumer()), timeouts_(timeouts), mutex_(mutex) {
    hello_.set_replica(identity.replica);
    hello_.set_incarnation(identity.incarnation);
    hello_.set_pipeline(identity.pipeline);
    hello_.set_generation(identity.generation);
    *hello_.mutable_protocol() = own_protocol();
    stub_ = v1::StageService::NewStub(open_channel(endpoint));
  }

  // The methods below are called with the mutex locked, except `join`.

  void start() { thread_ = std::thread([this] { run(); }); }
  void join() { thread_.join(); }

  void add(const v1::EdgeKey& key, std::shared_ptr<OutgoingFlow> flow) {
    if (is_ready_) flow->open();
    flows_[id_of(key)] = std::move(flow);
  }

  void check(Clock::time_point now) {
    if (is_ready_) {
      for (const auto& [id, flow] : flows_) flow->check(now);
    }
    if (context_ && cancel_at_ && now > *cancel_at_) context_->TryCancel();
  }

  void close() {
    is_closed_ = true;
    if (context_) context_->TryCancel();
    work->notify_all();
  }

  bool is_done() const { return is_done_; }

  const std::string endpoint;
  // Wakes the writer.
  const std::shared_ptr<std::condition_variable> work = std::make_shared<std::condition_variable>();

 private:
  void run();
  std::optional<Failure> serve_stream();
  void read(Stream& stream, std::thread& writer);
  void write(Stream& stream);
  v1::PutChunkRequest next_request();
  void welcomed(const v1::Welcome& welcome);
  void take(const v1::PutReply& reply);
  void fail_flows(const Failure& failure);
  void forget_flows();

  const std::string consumer_;
  const Timeouts timeouts_;
  std::mutex& mutex_;
  v1::Hello hello_;
  std::unique_ptr<v1::StageService::Stub> stub_;
  std::thread thread_;
  std::map<FlowId, std::shared_ptr<OutgoingFlow>> flows_;
  // The flow whose item was sent last. All flows take turns.
  FlowId last_sent_;
  // The present stream, and when it is cancelled.
  grpc::ClientContext* context_ = nullptr;
  std::optional<Clock::time_point> cancel_at_;
  // Whether `Welcome` has arrived, and what it said.
  bool is_ready_ = false;
  std::string incarnation_;
  uint64_t inline_limit_bytes_ = 0;
  // Since when the consumer has not answered about a flow. Nothing while it answers.
  std::optional<Clock::time_point> unreachable_since_ = Clock::now();
  bool is_closed_ = false, is_done_ = false;
};

void ConsumerLink::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_closed_ && !flows_.empty()) {
    lock.unlock();
    const std::optional<Failure> refusal = serve_stream();
    lock.lock();
    for (const auto& [id, flow] : flows_) flow->disconnect();
    const auto now = Clock::now();
    if (!unreachable_since_) unreachable_since_ = now;
    if (refusal) fail_flows(*refusal);
    else if (now - *unreachable_since_ > LOST_PEER) fail_flows(peer_lost(consumer_ + " is unreachable", consumer_));
    forget_flows();
    work->wait_for(lock, RECONNECT, [this] { return is_closed_; });
  }
  fail_flows(peer_lost("replica " + hello_.replica() + " shuts down", consumer_));
  is_done_ = true;
}

// Opens a stream and handles its replies until it ends. Returns the error if the consumer has refused it.
std::optional<Failure> ConsumerLink::serve_stream() {
  grpc::ClientContext context;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) return std::nullopt;
    context_ = &context;
    cancel_at_ = Clock::now() + timeouts_.welcome;
  }
  const auto stream = stub_->PutChunk(&context);
  v1::PutChunkRequest request;
  *request.mutable_hello() = hello_;
  std::thread writer;
  std::optional<Failure> refusal;
  try {
    if (stream->Write(request)) read(*stream, writer);
  } catch (const Failure& failure) {
    refusal = failure;
    context.TryCancel();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_ready_ = false;
    cancel_at_ = Clock::now() + END_TIMEOUT;
  }
  work->notify_all();
  if (writer.joinable()) writer.join();
  const Failure ended = from_status(stream->Finish());
  if (!refusal && is_refusal(ended)) refusal = ended;
  std::lock_guard<std::mutex> lock(mutex_);
  context_ = nullptr;
  return refusal;
}

void ConsumerLink::read(Stream& stream, std::thread& writer) {
  v1::PutChunkResponse response;
  while (stream.Read(&response)) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_ready_) {
      welcomed(response.welcome());
      writer = std::thread([this, &stream] { write(stream); });
    }
    for (const v1::PutReply& reply : response.replies()) take(reply);
    forget_flows();
    work->notify_all();
  }
}

void ConsumerLink::write(Stream& stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (is_ready_) {
    const v1::PutChunkRequest request = next_request();
    if (request.items().empty()) {
      work->wait(lock);
      continue;
    }
    lock.unlock();
    const bool is_sent = stream.Write(request);
    lock.lock();
    if (!is_sent) return;
  }
}

// Returns the next items of the flows, in turn, up to the size of a message.
v1::PutChunkRequest ConsumerLink::next_request() {
  v1::PutChunkRequest request;
  uint64_t size_bytes = 0;
  size_t silent = 0;
  auto next = flows_.upper_bound(last_sent_);
  while (silent < flows_.size() && size_bytes < MESSAGE_BYTES) {
    if (next == flows_.end()) next = flows_.begin();
    v1::PutItem item;
    if (next->second->next_item(&item, inline_limit_bytes_)) {
      last_sent_ = next->first;
      size_bytes += item.ByteSizeLong();
      request.add_items()->Swap(&item);
      silent = 0;
    } else {
      ++silent;
    }
    ++next;
  }
  return request;
}

void ConsumerLink::welcomed(const v1::Welcome& welcome) {
  check_protocol(consumer_, welcome.protocol());
  if (welcome.replica().empty() || welcome.incarnation().empty()) {
    throw invalid_chunk("the first answer of " + consumer_ + " lacks a Welcome with replica and incarnation");
  }
  incarnation_ = welcome.incarnation();
  inline_limit_bytes_ = std::min(welcome.inline_limit_bytes(), INLINE_LIMIT_BYTES);
  is_ready_ = true;
  cancel_at_.reset();
  for (const auto& [id, flow] : flows_) {
    if (flow->incarnation.empty() || flow->incarnation == incarnation_) flow->open();
    else flow->fail(peer_lost(consumer_ + " was restarted", consumer_));
  }
}

// Handles a reply. Throws what ends the stream and fails its flows.
void ConsumerLink::take(const v1::PutReply& reply) {
  const auto unknown = reply.reply_case() == v1::PutReply::REPLY_NOT_SET ? unknown_kind(consumer_, reply) : std::nullopt;
  if (unknown && reply.ignorable()) return;
  const v1::EdgeKey* key = key_of(reply);
  if (unknown && !key) throw *unknown;
  // This stage offers no connector, and sends neither leases nor tickets. Replies about them name no flow.
  const auto found = key ? flows_.find(id_of(*key)) : flows_.end();
  if (found == flows_.end()) return;
  OutgoingFlow& flow = *found->second;
  if (unknown) {
    flow.fail(*unknown);
    return;
  }
  if (reply.has_opened()) flow.incarnation = incarnation_;
  if (reply.has_opened() || reply.has_ack() || reply.has_commit()) unreachable_since_.reset();
  flow.take(reply);
}

void ConsumerLink::fail_flows(const Failure& failure) {
  for (const auto& [id, flow] : flows_) flow->fail(failure);
  flows_.clear();
}

void ConsumerLink::forget_flows() {
  for (auto flow = flows_.begin(); flow != flows_.end();) {
    flow = flow->second->is_over() ? flows_.erase(flow) : std::next(flow);
  }
}

Producer::Producer(const Identity& identity, const Timeouts& timeouts) : identity_(identity), timeouts_(timeouts) {}

Producer::~Producer() { close(); }

std::shared_ptr<OutgoingFlow> Producer::open(const v1::EdgeKey& key, const v1::OutputBinding& binding) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<ConsumerLink> link;
  for (const auto& other : links_) {
    if (other->endpoint == binding.endpoint() && !other->is_done()) link = other;
  }
  const bool is_new = !link;
  if (is_new) link = links_.emplace_back(std::make_shared<ConsumerLink>(identity_, binding, timeouts_, mutex_));
  auto flow = std::make_shared<OutgoingFlow>(key, binding, timeouts_, mutex_, link->work);
  link->add(key, flow);
  if (is_new) link->start();
  return flow;
}

void Producer::check(Clock::time_point now) {
  std::vector<std::shared_ptr<ConsumerLink>> done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto link = links_.begin(); link != links_.end();) {
      (*link)->check(now);
      if ((*link)->is_done()) done.push_back(*link);
      link = (*link)->is_done() ? links_.erase(link) : std::next(link);
    }
  }
  for (const auto& link : done) link->join();
}

void Producer::close() {
  std::list<std::shared_ptr<ConsumerLink>> links;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    links.swap(links_);
    for (const auto& link : links) link->close();
  }
  for (const auto& link : links) link->join();
}

}  // namespace stage
