#include "incoming.h"

#include <algorithm>
#include <utility>

namespace stage {
namespace {

constexpr int MAX_RESYNCS = 3;
constexpr uint64_t MAX_FRAGMENT_BYTES = 1 << 20;
// What the unread chunks of a flow may take in addition to their bytes, and what is counted for each chunk and tensor.
constexpr uint64_t MAX_OVERHEAD_BYTES = 32 << 20;
constexpr uint64_t OBJECT_BYTES = 256;

// Throws INVALID_CHUNK unless a tensor has the type and the dimensions that the function accepts.
void check_type(const Tensor& tensor, const v1::TensorSpec& spec) {
  bool fits = tensor.type == spec.dtype() && tensor.shape.size() == static_cast<size_t>(spec.shape_size());
  for (int axis = 0; fits && axis < spec.shape_size(); ++axis) {
    // A dimension is a number, or the name of one that may be any.
    const std::string& length = spec.shape(axis);
    const bool is_number = length.find_first_not_of("0123456789") == std::string::npos;
    fits = !is_number || length == std::to_string(tensor.shape[static_cast<size_t>(axis)]);
  }
  if (!fits) throw invalid_chunk("tensor " + tensor.name + " has another type or shape than this stage accepts");
}

}  // namespace

IncomingFlow::IncomingFlow(v1::EdgeKey key, std::string producer, const v1::Signature& signature,
                           const CreditLimits& limits, std::mutex& mutex, OnOver on_over)
    : key(std::move(key)),
      producer(std::move(producer)),
      signature_(signature),
      limits_(limits),
      mutex_(mutex),
      on_over_(std::move(on_over)),
      limit_bytes_(limits.window_bytes),
      limit_chunks_(limits.window_chunks) {}

void IncomingFlow::open(Session& session, const v1::OpenEdge& open) {
  if (phase_ == Phase::WAITING || phase_ == Phase::RESYNCING) phase_ = Phase::OPEN;
  session_ = &session;
  incarnation = session.incarnation;
  fragments_.reset();
  lost_at_.reset();
  v1::PutReply reply;
  v1::EdgeOpened& opened = *reply.mutable_opened();
  *opened.mutable_key() = key;
  opened.set_next_seq(next_seq_);
  opened.set_connector(open.connector());
  opened.set_opening(open.opening());
  opened.set_window_bytes(limits_.window_bytes);
  opened.set_credit_limit_bytes(limit_bytes_);
  opened.set_credit_limit_chunks(limit_chunks_);
  session.reply(std::move(reply));
}

void IncomingFlow::take_chunk(Session& session, v1::Chunk& chunk) {
  if (!is_open_on(session) || chunk.seq() < next_seq_) return;
  if (chunk.seq() > next_seq_ || phase_ == Phase::ENDED) {
    resync(session, "SEQUENCE_GAP",
           "chunk " + std::to_string(chunk.seq()) + " arrived when " + std::to_string(next_seq_) + " was due");
    return;
  }
  switch (chunk.content_case()) {
    case v1::Chunk::kData:
      if (!take_data(session, *chunk.mutable_data())) return;
      break;
    case v1::Chunk::kEnd:
      take_end(chunk.end());
      break;
    case v1::Chunk::kAbort:
      fail(from_wire(chunk.abort().error()).within("edge", key.edge()).within("replica", producer));
      break;
    case v1::Chunk::CONTENT_NOT_SET:
      if (auto unknown = unknown_kind(producer, chunk)) throw *unknown;
      throw invalid_chunk("a chunk has no content");
  }
  fragments_.reset();
  ++next_seq_;
  resyncs_ = 0;
  v1::PutReply reply;
  *reply.mutable_ack()->mutable_key() = key;
  reply.mutable_ack()->set_next_seq(next_seq_);
  session.reply(std::move(reply));
  changed_.notify_all();
}

// Returns whether the chunk was complete.
bool IncomingFlow::take_data(Session& session, v1::ChunkData& data) {
  check_credit(data.size_bytes());
  bool is_streamed = false;
  uint64_t streamed_bytes = 0;
  for (const v1::Tensor& tensor : data.tensors()) {
    is_streamed = is_streamed || tensor.has_streamed();
    streamed_bytes += tensor.streamed().size_bytes();
  }
  if (is_streamed && (!fragments_ || fragments_->bytes.size() < fragments_->total_bytes)) {
    resync(session, "FRAGMENT_GAP", "chunk " + std::to_string(next_seq_) + " arrived before its fragments");
    return false;
  }
  if (fragments_ && fragments_->total_bytes != streamed_bytes) {
    throw invalid_chunk("the fragments of a chunk have another size than its streamed tensors");
  }
  std::string none;
  Packet packet = to_packet(data, fragments_ ? fragments_->bytes : none, producer);
  const uint64_t size_bytes = packet.size_bytes();
  received_bytes_ += size_bytes;
  received_chunks_ += 1;
  digest_.add(packet);
  keep_accepted(packet);
  count_rows(packet);
  Unread unread{std::move(packet), size_bytes, 0};
  const size_t objects = 1 + unread.packet.tensors.size() + unread.packet.fields.metadata().size();
  unread.overhead_bytes = unread.packet.fields.ByteSizeLong() + objects * OBJECT_BYTES;
  unread_overhead_bytes_ += unread.overhead_bytes;
  if (unread_overhead_bytes_ > MAX_OVERHEAD_BYTES) {
    throw Failure(grpc::INVALID_ARGUMENT, "CREDIT_EXCEEDED", "the unread chunks have too many tensors and values");
  }
  unread_.push_back(std::move(unread));
  return true;
}

// Drops the tensors that the function does not accept. Throws INVALID_CHUNK if one that it needs is missing.
void IncomingFlow::keep_accepted(Packet& packet) const {
  std::vector<Tensor> kept;
  for (const v1::AcceptedTensor& accepted : signature_.accepts()) {
    const auto found = std::find_if(packet.tensors.begin(), packet.tensors.end(), [&](const Tensor& tensor) {
      return tensor.name == accepted.spec().name();
    });
    if (found != packet.tensors.end()) {
      check_type(*found, accepted.spec());
      kept.push_back(std::move(*found));
    } else if (!accepted.optional()) {
      throw invalid_chunk("a chunk lacks the tensor " + accepted.spec().name());
    }
  }
  packet.tensors = std::move(kept);
}

// Counts the rows of a packet. Throws INVALID_CHUNK if they do not follow the rows before them. Each attempt of this step
// has a flow of its own, which begins with rows that no flow before it has sent.
void IncomingFlow::count_rows(const Packet& packet) {
  for (const Tensor& tensor : packet.tensors) {
    const uint64_t begin = tensor.first_row + packet.fields.context_frames(), end = tensor.first_row + tensor.rows();
    // The rows begin where the first chunk says: its producer may have resumed from a checkpoint.
    uint64_t& next = rows_.emplace(tensor.name, begin).first->second;
    if (begin != next || end < begin) {
      throw invalid_chunk("a chunk has the rows " + std::to_string(begin) + " to " + std::to_string(end) + " of tensor " +
                          tensor.name + ", but row " + std::to_string(next) + " is next");
    }
    next = end;
  }
}

void IncomingFlow::take_end(const v1::ChunkEnd& end) {
  if (end.count() != digest_.count() || end.digest() != digest_.finish()) {
    throw Failure(grpc::INVALID_ARGUMENT, "DIGEST_MISMATCH",
                  "the flow ended after " + std::to_string(end.count()) + " chunks, but " +
                      std::to_string(digest_.count()) + " arrived, or they differ");
  }
  phase_ = Phase::ENDED;
}

void IncomingFlow::take_fragment(Session& session, const v1::ChunkFragment& fragment) {
  if (!is_open_on(session) || fragment.seq() < next_seq_) return;
  if (fragment.seq() > next_seq_ || phase_ == Phase::ENDED) {
    resync(session, "SEQUENCE_GAP", "a fragment of chunk " + std::to_string(fragment.seq()) + " arrived when chunk " +
                                        std::to_string(next_seq_) + " was due");
    return;
  }
  const std::string& payload = fragment.payload();
  if (payload.size() > MAX_FRAGMENT_BYTES) throw invalid_chunk("a fragment has more than 1 MiB");
  if (!fragments_) {
    check_credit(fragment.total_bytes());
    fragments_ = Fragments{fragment.total_bytes(), ""};
  }
  if (fragment.total_bytes() != fragments_->total_bytes) throw invalid_chunk("fragments state different sizes");
  std::string& bytes = fragments_->bytes;
  if (fragment.offset() < bytes.size()) return;  // a repeated fragment
  if (fragment.offset() > bytes.size() || payload.size() > fragments_->total_bytes - bytes.size()) {
    resync(session, "FRAGMENT_GAP", "the fragment at " + std::to_string(fragment.offset()) + " arrived when " +
                                        std::to_string(bytes.size()) + " of " +
                                        std::to_string(fragments_->total_bytes) + " bytes had arrived");
    return;
  }
  if (bytes.empty()) bytes.reserve(fragments_->total_bytes);
  bytes += payload;
}

void IncomingFlow::demand(Session& session, uint64_t size_bytes) {
  if (!is_open_on(session)) return;
  if (size_bytes > limits_.max_chunk_bytes) {
    throw Failure(grpc::INVALID_ARGUMENT, "CHUNK_TOO_LARGE",
                  "a chunk of " + std::to_string(size_bytes) + " bytes exceeds the limit of " +
                      std::to_string(limits_.max_chunk_bytes));
  }
  demanded_bytes_ = size_bytes;
  consume(0, 0);
}

void IncomingFlow::reject(Session& session, const Failure& failure) {
  v1::PutReply reply;
  *reply.mutable_rejected()->mutable_key() = key;
  *reply.mutable_rejected()->mutable_error() = to_wire(failure);
  session.reply(std::move(reply));
  fail(failure);
}

void IncomingFlow::fail(const Failure& failure) {
  if (error || phase_ == Phase::ENDED || phase_ == Phase::OVER) return;
  error = failure;
  lost_at_.reset();
  changed_.notify_all();
}

void IncomingFlow::detach(const Session& session) {
  if (session_ != &session) return;
  session_ = nullptr;
  if (phase_ == Phase::OPEN) phase_ = Phase::WAITING;
  if (phase_ == Phase::WAITING || phase_ == Phase::RESYNCING) lost_at_ = Clock::now() + LOST_PEER;
}

void IncomingFlow::check(Clock::time_point now) {
  if (lost_at_ && now > *lost_at_) fail(lost());
}

Failure IncomingFlow::lost() const {
  return peer_lost("replica " + producer + " was lost before chunk " + std::to_string(next_seq_) + " of edge " +
                       key.edge(), producer)
      .within("edge", key.edge());
}

std::optional<Packet> IncomingFlow::read() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return closed_ || error || !unread_.empty() || phase_ >= Phase::ENDED; });
  if (closed_) throw *closed_;
  if (!unread_.empty()) {
    Unread unread = std::move(unread_.front());
    unread_.pop_front();
    unread_overhead_bytes_ -= unread.overhead_bytes;
    consume(unread.size_bytes, 1);
    return std::move(unread.packet);
  }
  if (error) throw *error;
  if (phase_ == Phase::ENDED) {
    v1::PutReply reply;
    *reply.mutable_commit()->mutable_key() = key;
    if (session_) session_->reply(std::move(reply));
    over(std::nullopt);
  }
  return std::nullopt;
}

void IncomingFlow::close(const Failure& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ == Phase::OVER) return;
  closed_ = failure;
  changed_.notify_all();
  unread_.clear();
  const std::string consumer = "the consumer of edge " + key.edge();
  Failure outcome = failure.allows_successor()
                        ? Failure(grpc::UNAVAILABLE, "PEER_LOST", consumer + " has ended")
                        : Failure(grpc::CANCELLED, "NOT_READ", consumer + " stopped reading");
  outcome = error ? *error : outcome.within("edge", key.edge());
  if (!error && session_) {
    v1::PutReply reply;
    *reply.mutable_rejected()->mutable_key() = key;
    *reply.mutable_rejected()->mutable_error() = to_wire(outcome);
    session_->reply(std::move(reply));
  }
  over(outcome);
}

void IncomingFlow::over(std::optional<Failure> outcome) {
  phase_ = Phase::OVER;
  lost_at_.reset();
  session_ = nullptr;
  on_over_(std::move(outcome));
}

// Returns whether the flow's items on a stream count. If the flow is open on no stream, the producer must open it again;
// if it is open on another one, they are late.
bool IncomingFlow::is_open_on(Session& session) {
  if (phase_ == Phase::RESYNCING) return false;
  if (session_ == &session) return true;
  if (!session_) resync(session, "NOT_OPENED", "the flow is not open on this stream");
  return false;
}

void IncomingFlow::resync(Session& session, const std::string& reason, const std::string& message) {
  const Failure failure = Failure(grpc::INVALID_ARGUMENT, reason, message).within("edge", key.edge());
  if (++resyncs_ > MAX_RESYNCS) throw failure;
  if (phase_ != Phase::ENDED) {
    phase_ = Phase::RESYNCING;
    lost_at_ = Clock::now() + LOST_PEER;
  }
  v1::PutReply reply;
  *reply.mutable_resync()->mutable_key() = key;
  *reply.mutable_resync()->mutable_error() = to_wire(failure);
  session.reply(std::move(reply));
}

void IncomingFlow::check_credit(uint64_t size_bytes) const {
  const bool fits = size_bytes <= limit_bytes_ && received_bytes_ + size_bytes <= limit_bytes_;
  if (fits && received_chunks_ < limit_chunks_) return;
  throw Failure(grpc::INVALID_ARGUMENT, "CREDIT_EXCEEDED",
                "chunk " + std::to_string(next_seq_) + " of " + std::to_string(size_bytes) + " bytes exceeds the credit of " +
                    std::to_string(limit_bytes_) + " bytes and " + std::to_string(limit_chunks_) + " chunks in total");
}

// Counts what the function has read, and raises the credit limits if that is worth a message.
void IncomingFlow::consume(uint64_t size_bytes, uint64_t chunks) {
  read_bytes_ += size_bytes;
  read_chunks_ += chunks;
  uint64_t bytes = std::max(limit_bytes_, read_bytes_ + limits_.window_bytes);
  const uint64_t more_chunks = read_chunks_ + limits_.window_chunks;
  bool is_due = bytes - limit_bytes_ >= std::max<uint64_t>(1, limits_.window_bytes / 4) ||
                more_chunks - limit_chunks_ >= std::max<uint64_t>(1, limits_.window_chunks / 4);
  if (demanded_bytes_ > 0 && read_bytes_ == received_bytes_) {
    bytes = std::max(bytes, received_bytes_ + demanded_bytes_);
    is_due = is_due || bytes > limit_bytes_;
    demanded_bytes_ = 0;
  }
  if (!is_due) return;
  limit_bytes_ = bytes;
  limit_chunks_ = more_chunks;
  // Otherwise, the answer to the next OpenEdge contains the limits.
  if (phase_ != Phase::OPEN) return;
  v1::PutReply reply;
  v1::CreditGrant& credit = *reply.mutable_credit();
  *credit.mutable_key() = key;
  credit.set_credit_limit_bytes(limit_bytes_);
  credit.set_credit_limit_chunks(limit_chunks_);
  session_->reply(std::move(reply));
}

}  // namespace stage
