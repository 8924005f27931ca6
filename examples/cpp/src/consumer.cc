#include "consumer.h"

#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

namespace stage {
namespace {

constexpr uint64_t INLINE_LIMIT_BYTES = 4096;
constexpr std::chrono::seconds HELLO_TIMEOUT{10};
constexpr size_t REPLIES_PER_MESSAGE = 128;
// A producer that does not read its replies is read no further.
constexpr size_t MAX_UNSENT_REPLIES = 4096;
constexpr uint64_t MAX_NAME_CHARACTERS = 256;

const v1::EdgeKey* key_of(const v1::PutItem& item) {
  switch (item.item_case()) {
    case v1::PutItem::kOpen: return &item.open().key();
    case v1::PutItem::kChunk: return &item.chunk().key();
    case v1::PutItem::kFragment: return &item.fragment().key();
    case v1::PutItem::kDemand: return &item.demand().key();
    default: return item.has_key() ? &item.key() : nullptr;
  }
}

}  // namespace

// A stream of a producer. A thread sends the replies that are due at the same time in one message.
class ProducerSession : public Session {
 public:
  ProducerSession(const v1::Hello& hello, Consumer::Stream* stream) : stream_(stream) {
    producer = hello.replica();
    incarnation = hello.incarnation();
    writer_ = std::thread([this] { write(); });
  }

  ~ProducerSession() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      has_ended_ = true;
    }
    changed_.notify_all();
    writer_.join();
  }

  void reply(v1::PutReply reply) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_ended_) return;
    // An acknowledgement is cumulative, and replaces the one before.
    const bool repeats = reply.has_ack() && !replies_.empty() && replies_.back().has_ack() &&
                         id_of(replies_.back().ack().key()) == id_of(reply.ack().key());
    if (repeats) replies_.back().Swap(&reply);
    else replies_.push_back(std::move(reply));
    changed_.notify_all();
  }

  // Waits until the producer has read its replies.
  void wait_for_space() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return has_ended_ || replies_.size() < MAX_UNSENT_REPLIES; });
  }

 private:
  // Sends replies until the session ends, and then those that are left.
  void write() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return has_ended_ || !replies_.empty(); });
      if (replies_.empty()) return;
      v1::PutChunkResponse response;
      while (!replies_.empty() && response.replies_size() < static_cast<int>(REPLIES_PER_MESSAGE)) {
        response.add_replies()->Swap(&replies_.front());
        replies_.pop_front();
      }
      lock.unlock();
      const bool is_sent = stream_->Write(response);
      lock.lock();
      has_ended_ = has_ended_ || !is_sent;
      if (!is_sent) replies_.clear();
      changed_.notify_all();
    }
  }

  Consumer::Stream* const stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<v1::PutReply> replies_;
  bool has_ended_ = false;
  std::thread writer_;
};

std::shared_ptr<IncomingFlow> Consumer::expect(const v1::EdgeKey& key, const std::string& producer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const FlowId id = id_of(key);
  if (flows_.count(id)) {
    throw Failure(grpc::ALREADY_EXISTS, "STEP_EXISTS", "another step has attempt " + std::to_string(key.attempt()));
  }
  const auto on_over = [this, id, producer](std::optional<Failure> failure) {
    past_.set(id, {producer, std::move(failure)});
    flows_.erase(id);
  };
  auto flow = std::make_shared<IncomingFlow>(key, producer, signature_, limits_, mutex_, on_over);
  flows_[id] = flow;
  return flow;
}

grpc::Status Consumer::serve(grpc::ServerContext* context, Stream* stream) {
  v1::PutChunkRequest request;
  if (!read_hello(context, stream, &request)) {
    return to_status({grpc::INVALID_ARGUMENT, "NO_HELLO", "the stream ended without a Hello"});
  }
  try {
    check_hello(request.hello());
  } catch (const Failure& failure) {
    return to_status(failure.within("stage", identity_.stage));
  }
  replace_incarnation(request.hello().replica(), request.hello().incarnation());
  v1::PutChunkResponse response;
  v1::Welcome& welcome = *response.mutable_welcome();
  welcome.set_replica(identity_.replica);
  welcome.set_incarnation(identity_.incarnation);
  *welcome.mutable_protocol() = own_protocol();
  welcome.set_inline_limit_bytes(INLINE_LIMIT_BYTES);
  stream->Write(response);

  grpc::Status status;
  ProducerSession session(request.hello(), stream);
  try {
    do {
      for (v1::PutItem& item : *request.mutable_items()) take(session, item);
      session.wait_for_space();
    } while (stream->Read(&request));
  } catch (const Failure& failure) {
    status = to_status(failure.within("stage", identity_.stage));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [id, flow] : flows_) flow->detach(session);
  return status;
}

bool Consumer::read_hello(grpc::ServerContext* context, Stream* stream, v1::PutChunkRequest* request) {
  std::unique_lock<std::mutex> lock(mutex_);
  handshakes_.push_back({context, Clock::now() + HELLO_TIMEOUT});
  const auto handshake = std::prev(handshakes_.end());
  lock.unlock();
  const bool is_read = stream->Read(request);
  lock.lock();
  handshakes_.erase(handshake);
  return is_read;
}

void Consumer::check_hello(const v1::Hello& hello) const {
  if (hello.replica().empty() || hello.incarnation().empty()) {
    throw Failure(grpc::INVALID_ARGUMENT, "NO_HELLO", "the first message needs a Hello with replica and incarnation");
  }
  if (hello.pipeline() != identity_.pipeline) {
    throw Failure(grpc::FAILED_PRECONDITION, "WRONG_PIPELINE",
                  hello.replica() + " serves the pipeline " + hello.pipeline() + ", and " + identity_.replica +
                      " serves " + identity_.pipeline);
  }
  if (hello.generation() != identity_.generation) {
    throw Failure(grpc::FAILED_PRECONDITION, "WRONG_GENERATION",
                  hello.replica() + " serves the generation " + hello.generation() + ", and " + identity_.replica +
                      " serves " + identity_.generation);
  }
  check_protocol(hello.replica(), hello.protocol());
}

void Consumer::replace_incarnation(const std::string& producer, const std::string& incarnation) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [id, flow] : flows_) {
    const bool is_of_dead = flow->producer == producer && !flow->incarnation.empty() && flow->incarnation != incarnation;
    if (is_of_dead) flow->fail(flow->lost());
  }
}

void Consumer::check(Clock::time_point now) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [id, flow] : flows_) flow->check(now);
  for (const Handshake& handshake : handshakes_) {
    if (now > handshake.until) handshake.context->TryCancel();
  }
}

void Consumer::take(ProducerSession& session, v1::PutItem& item) {
  if (item.has_offer()) {
    v1::PutReply reply;
    reply.mutable_offer_answer()->set_connector(item.offer().connector());
    *reply.mutable_offer_answer()->mutable_error() =
        to_wire({grpc::FAILED_PRECONDITION, "CONNECTOR_UNAVAILABLE", identity_.replica + " reads by grpc alone"});
    session.reply(std::move(reply));
    return;
  }
  if (item.has_tickets()) return;  // answers an acceptance of tickets, which this stage never sends
  std::optional<Failure> unknown;
  if (item.item_case() == v1::PutItem::ITEM_NOT_SET) {
    unknown = unknown_kind(session.producer, item);
    if (!unknown || item.ignorable()) return;
  }
  const v1::EdgeKey* key = key_of(item);
  if (!key) throw *unknown;
  if (characters(key->request_id()) > MAX_NAME_CHARACTERS || characters(key->edge()) > MAX_NAME_CHARACTERS) {
    throw Failure(grpc::INVALID_ARGUMENT, "MALFORMED_MESSAGE", "the key of an item has more than 256 characters");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const auto flow = flow_of(session, *key);
  if (!flow) return;
  try {
    if (unknown) throw *unknown;
    take_of_flow(session, *flow, item);
  } catch (const Failure& failure) {
    flow->reject(session, failure.within("edge", flow->key.edge()).within("stage", identity_.stage));
  }
}

void Consumer::take_of_flow(ProducerSession& session, IncomingFlow& flow, v1::PutItem& item) {
  switch (item.item_case()) {
    case v1::PutItem::kOpen:
      if (item.open().connector() != v1::CONNECTOR_GRPC) {
        throw Failure(grpc::FAILED_PRECONDITION, "CONNECTOR_UNAVAILABLE", identity_.replica + " reads by grpc alone");
      }
      if (!flow.incarnation.empty() && flow.incarnation != session.incarnation) {
        throw Failure(grpc::FAILED_PRECONDITION, "STALE_INCARNATION",
                      "edge " + flow.key.edge() + " was opened by another incarnation of " + session.producer);
      }
      flow.open(session, item.open());
      break;
    case v1::PutItem::kChunk:
      flow.take_chunk(session, *item.mutable_chunk());
      break;
    case v1::PutItem::kFragment:
      flow.take_fragment(session, item.fragment());
      break;
    case v1::PutItem::kDemand:
      flow.demand(session, item.demand().size_bytes());
      break;
    default:
      break;
  }
}

std::shared_ptr<IncomingFlow> Consumer::flow_of(ProducerSession& session, const v1::EdgeKey& key) {
  const FlowId id = id_of(key);
  const auto found = flows_.find(id);
  const Outcome* past = past_.find(id);
  v1::PutReply reply;
  std::optional<Failure> failure;
  if (found != flows_.end() && found->second->producer == session.producer) {
    if (!found->second->error) return found->second;
    failure = found->second->error;
  } else if (found == flows_.end() && past && past->producer == session.producer) {
    failure = past->failure;
  } else {
    failure = unknown_flow(key);
  }
  if (failure) {
    *reply.mutable_rejected()->mutable_key() = key;
    *reply.mutable_rejected()->mutable_error() = to_wire(*failure);
  } else {
    *reply.mutable_commit()->mutable_key() = key;
  }
  session.reply(std::move(reply));
  return nullptr;
}

Failure Consumer::unknown_flow(const v1::EdgeKey& key) const {
  Failure failure(grpc::NOT_FOUND, "UNKNOWN_FLOW",
                  identity_.replica + " does not expect attempt " + std::to_string(key.attempt()) + " of edge " + key.edge());
  // The flow with the highest attempt of this request and edge.
  const auto after = flows_.upper_bound({key.request_id(), key.edge(), ~uint32_t{0}});
  if (after != flows_.begin()) {
    const v1::EdgeKey& other = std::prev(after)->second->key;
    if (other.request_id() == key.request_id() && other.edge() == key.edge() && other.attempt() > key.attempt()) {
      failure = {grpc::FAILED_PRECONDITION, "STALE_ATTEMPT",
                 "edge " + key.edge() + " is in attempt " + std::to_string(other.attempt())};
    }
  }
  return failure.within("edge", key.edge()).within("stage", identity_.stage);
}

}  // namespace stage
