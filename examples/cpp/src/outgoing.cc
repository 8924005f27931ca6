#include "outgoing.h"

#include <algorithm>
#include <utility>

namespace stage {
namespace {

constexpr uint64_t FRAGMENT_BYTES = 256 << 10;
constexpr int MAX_RESYNCS = 10;
constexpr std::chrono::milliseconds LONGEST_SILENCE{30000};

}  // namespace

OutgoingFlow::OutgoingFlow(v1::EdgeKey key, const v1::OutputBinding& binding, const Timeouts& timeouts,
                           std::mutex& mutex, std::shared_ptr<std::condition_variable> work)
    : key(std::move(key)),
      timeouts_(timeouts),
      mutex_(mutex),
      work_(std::move(work)),
      chunker_(binding),
      silence_(timeouts.silence) {}

// -- for the step

void OutgoingFlow::send(const Packet& packet) {
  std::vector<Packet> chunks = chunker_.add(packet);
  std::unique_lock<std::mutex> lock(mutex_);
  throw_error();
  for (Packet& chunk : chunks) push(std::move(chunk));
  changed_.wait(lock, [this] { return error_ || next_seq_ >= end_seq(); });
  throw_error();
}

void OutgoingFlow::finish() {
  std::vector<Packet> chunks = chunker_.finish();
  std::unique_lock<std::mutex> lock(mutex_);
  throw_error();
  for (Packet& chunk : chunks) push(std::move(chunk));
  v1::Chunk last;
  last.mutable_end()->set_count(digest_.count());
  last.mutable_end()->set_digest(digest_.finish());
  push_last(std::move(last));
  changed_.wait(lock, [this] { return error_ || is_delivered_; });
  throw_error();
}

void OutgoingFlow::abort(const Failure& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ == Phase::OVER || error_) return;
  error_ = failure;
  changed_.notify_all();
  if (is_ended_ && next_seq_ >= end_seq()) return;  // the end was sent
  // Chunks that were not sent get no number.
  while (end_seq() > next_seq_ && !chunks_.empty()) chunks_.pop_back();
  sent_bytes_ = 0;
  v1::Chunk last;
  *last.mutable_abort()->mutable_error() = to_wire(failure);
  push_last(std::move(last));
}

std::optional<Failure> OutgoingFlow::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

v1::EdgeUsage OutgoingFlow::usage() const {
  std::lock_guard<std::mutex> lock(mutex_);
  v1::EdgeUsage usage;
  usage.set_edge(key.edge());
  usage.set_connector(v1::CONNECTOR_GRPC);
  usage.set_chunks(digest_.count());
  usage.set_size_bytes(total_bytes_);
  return usage;
}

void OutgoingFlow::throw_error() const {
  if (error_) throw *error_;
}

void OutgoingFlow::push(Packet packet) {
  const uint64_t size_bytes = packet.size_bytes();
  total_bytes_ += size_bytes;
  digest_.add(packet);
  chunks_.push_back({std::move(packet), {}, size_bytes, total_bytes_});
  work_->notify_all();
}

void OutgoingFlow::push_last(v1::Chunk control) {
  is_ended_ = true;
  chunks_.push_back({std::nullopt, std::move(control), 0, total_bytes_});
  work_->notify_all();
}

// -- for the connection

void OutgoingFlow::open() {
  if (phase_ == Phase::OVER) return;
  phase_ = Phase::OPENING;
  ++openings_;
  is_open_due_ = true;
  answered_at_ = Clock::now();
  work_->notify_all();
}

void OutgoingFlow::disconnect() {
  if (phase_ != Phase::OVER) phase_ = Phase::WAITING;
}

bool OutgoingFlow::next_item(v1::PutItem* item, uint64_t inline_limit_bytes) {
  if (phase_ == Phase::OPENING && is_open_due_) {
    is_open_due_ = false;
    *item->mutable_open()->mutable_key() = key;
    item->mutable_open()->set_connector(v1::CONNECTOR_GRPC);
    item->mutable_open()->set_opening(openings_);
    return true;
  }
  if (phase_ != Phase::OPEN || next_seq_ >= end_seq()) return false;
  const Unacknowledged& chunk = chunks_[next_seq_ - first_seq_];
  if (!has_credit(chunk)) return demand_credit(chunk, item);
  const bool is_inline = chunk.size_bytes <= inline_limit_bytes;
  if (!is_inline && sent_bytes_ < chunk.size_bytes) {
    put_fragment(chunk, item);
    return true;
  }
  put_chunk(chunk, is_inline, item);
  ++next_seq_;
  sent_bytes_ = 0;
  sent_seq_ = std::max(sent_seq_, next_seq_);
  changed_.notify_all();
  return true;
}

bool OutgoingFlow::has_credit(const Unacknowledged& chunk) const {
  return !chunk.packet || (chunk.end_bytes <= limit_bytes_ && next_seq_ < limit_chunks_);
}

// Asks for credit for a chunk that is larger than half the window. Otherwise, credit arrives as the consumer reads.
bool OutgoingFlow::demand_credit(const Unacknowledged& chunk, v1::PutItem* item) {
  if (chunk.end_bytes <= limit_bytes_ || chunk.size_bytes <= window_bytes_ / 2 || demanded_seq_ == next_seq_) return false;
  demanded_seq_ = next_seq_;
  *item->mutable_demand()->mutable_key() = key;
  item->mutable_demand()->set_size_bytes(chunk.size_bytes);
  return true;
}

void OutgoingFlow::put_fragment(const Unacknowledged& chunk, v1::PutItem* item) {
  v1::ChunkFragment& fragment = *item->mutable_fragment();
  const uint64_t size = std::min(FRAGMENT_BYTES, chunk.size_bytes - sent_bytes_);
  *fragment.mutable_key() = key;
  fragment.set_seq(next_seq_);
  fragment.set_total_bytes(chunk.size_bytes);
  fragment.set_offset(sent_bytes_);
  fragment.set_payload(chunk.packet->bytes(sent_bytes_, size));
  sent_bytes_ += size;
}

void OutgoingFlow::put_chunk(const Unacknowledged& chunk, bool is_inline, v1::PutItem* item) {
  v1::Chunk& sent = *item->mutable_chunk();
  sent = chunk.control;
  *sent.mutable_key() = key;
  sent.set_seq(next_seq_);
  if (chunk.packet) *sent.mutable_data() = to_chunk(*chunk.packet, is_inline);
}

void OutgoingFlow::take(const v1::PutReply& reply) {
  if (phase_ == Phase::OVER) return;
  answered_at_ = Clock::now();
  silence_ = timeouts_.silence;
  switch (reply.reply_case()) {
    case v1::PutReply::kOpened:
      opened(reply.opened());
      break;
    case v1::PutReply::kAck:
      acknowledge(reply.ack().next_seq());
      grant(reply.ack().credit_limit_bytes(), reply.ack().credit_limit_chunks());
      break;
    case v1::PutReply::kCredit:
      grant(reply.credit().credit_limit_bytes(), reply.credit().credit_limit_chunks());
      break;
    case v1::PutReply::kCommit:
      if (!is_ended_ || sent_seq_ < end_seq()) {
        fail(invalid_chunk("the consumer of edge " + key.edge() + " committed the flow before its end was sent"));
        break;
      }
      acknowledge(end_seq());
      phase_ = Phase::OVER;
      break;
    case v1::PutReply::kRejected:
      fail(from_wire(reply.rejected().error()));
      break;
    case v1::PutReply::kResync:
      if (++resyncs_ > MAX_RESYNCS) fail(invalid_chunk("the consumer lacks messages: " + reply.resync().error().message()));
      else open();
      break;
    default:
      break;
  }
}

void OutgoingFlow::opened(const v1::EdgeOpened& opened) {
  if (phase_ != Phase::OPENING || opened.opening() != openings_) return;
  if (opened.next_seq() < first_seq_) {
    fail(invalid_chunk("the consumer of edge " + key.edge() + " needs a chunk that it has acknowledged"));
    return;
  }
  phase_ = Phase::OPEN;
  window_bytes_ = opened.window_bytes();
  demanded_seq_.reset();
  acknowledge(opened.next_seq());
  next_seq_ = opened.next_seq();
  sent_bytes_ = 0;
  grant(opened.credit_limit_bytes(), opened.credit_limit_chunks());
}

void OutgoingFlow::acknowledge(uint64_t next_seq) {
  if (next_seq > sent_seq_) {
    fail(invalid_chunk("the consumer of edge " + key.edge() + " acknowledged chunk " + std::to_string(next_seq) +
                       ", which was never sent"));
    return;
  }
  if (next_seq > first_seq_) resyncs_ = 0;
  while (first_seq_ < next_seq) {
    is_delivered_ = is_delivered_ || chunks_.front().control.has_end();
    if (chunks_.front().control.has_abort()) phase_ = Phase::OVER;
    chunks_.pop_front();
    ++first_seq_;
  }
  if (next_seq_ < first_seq_) {
    next_seq_ = first_seq_;
    sent_bytes_ = 0;
  }
  changed_.notify_all();
}

void OutgoingFlow::grant(uint64_t limit_bytes, uint64_t limit_chunks) {
  limit_bytes_ = std::max(limit_bytes_, limit_bytes);
  limit_chunks_ = std::max(limit_chunks_, limit_chunks);
  work_->notify_all();
}

void OutgoingFlow::check(Clock::time_point now) {
  // Once the flow has ended, the commit is due.
  const bool is_answer_due = phase_ == Phase::OPENING || is_ended_ || !chunks_.empty();
  if (!is_answer_due) answered_at_ = now;
  if (phase_ == Phase::WAITING || phase_ == Phase::OVER || now - answered_at_ < silence_) return;
  silence_ = std::min(2 * silence_, LONGEST_SILENCE);
  open();
}

void OutgoingFlow::fail(const Failure& failure) {
  if (phase_ == Phase::OVER) return;
  phase_ = Phase::OVER;
  if (!error_) error_ = failure.within("edge", key.edge());
  chunks_.clear();
  changed_.notify_all();
}

}  // namespace stage
