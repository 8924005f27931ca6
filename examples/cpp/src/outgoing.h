// The flow of one edge that leaves a step: chunks, credit, repetition, and the items that a connection sends for it.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "chunking.h"
#include "digest.h"
#include "errors.h"
#include "flows.h"
#include "packets.h"
#include "stagemesh/v1/stage.pb.h"

namespace stage {

// For how long this stage waits for a consumer.
struct Timeouts {
  // For `Welcome`. After that, the connection is made again.
  std::chrono::milliseconds welcome{5000};
  // For an answer about a flow. After that, the flow is opened again.
  std::chrono::milliseconds silence{2000};
};

// The methods for the connection are called with the mutex locked. Those for the step lock it.
class OutgoingFlow {
 public:
  // `mutex` guards the flow, and `work` wakes the connection when the flow may have something to send.
  OutgoingFlow(v1::EdgeKey key, const v1::OutputBinding& binding, const Timeouts& timeouts, std::mutex& mutex,
               std::shared_ptr<std::condition_variable> work);

  // -- for the step

  // Sends a packet. Returns when the consumer's credit has sufficed. Throws the error of the flow.
  void send(const Packet& packet);
  // Ends the flow. Returns when all of it is delivered. Throws the error of the flow.
  void finish();
  // Ends the flow with an error. The consumer receives it after the chunks that were sent.
  void abort(const Failure& failure);
  // Returns why the flow has failed.
  std::optional<Failure> error() const;
  // The data that was sent.
  v1::EdgeUsage usage() const;

  // -- for the connection

  // Opens the flow on the present stream.
  void open();
  // Called when the stream has ended.
  void disconnect();
  // Sets the next item to send. Returns false if there is none now.
  bool next_item(v1::PutItem* item, uint64_t inline_limit_bytes);
  // Handles a reply about this flow.
  void take(const v1::PutReply& reply);
  // Opens the flow again if an answer is due and the consumer has been silent for too long.
  void check(Clock::time_point now);
  void fail(const Failure& failure);
  bool is_over() const { return phase_ == Phase::OVER; }

  const v1::EdgeKey key;
  // The incarnation of the consumer that has opened the flow. Empty before.
  std::string incarnation;

 private:
  enum class Phase { WAITING, OPENING, OPEN, OVER };
  // A chunk that the consumer has not acknowledged.
  struct Unacknowledged {
    // Nothing for the end and the abort, which are in `control`.
    std::optional<Packet> packet;
    v1::Chunk control;
    uint64_t size_bytes;
    // The payload bytes of the flow up to and including this chunk.
    uint64_t end_bytes;
  };

  uint64_t end_seq() const { return first_seq_ + chunks_.size(); }
  bool has_credit(const Unacknowledged& chunk) const;
  bool demand_credit(const Unacknowledged& chunk, v1::PutItem* item);
  void put_chunk(const Unacknowledged& chunk, bool is_inline, v1::PutItem* item);
  void put_fragment(const Unacknowledged& chunk, v1::PutItem* item);
  void push(Packet packet);
  void push_last(v1::Chunk control);
  void opened(const v1::EdgeOpened& opened);
  void acknowledge(uint64_t next_seq);
  void grant(uint64_t limit_bytes, uint64_t limit_chunks);
  void throw_error() const;

  const Timeouts timeouts_;
  std::mutex& mutex_;
  const std::shared_ptr<std::condition_variable> work_;
  std::condition_variable changed_;
  Phase phase_ = Phase::WAITING;
  std::optional<Failure> error_;

  // -- the chunks, of which the first has the number `first_seq_`

  Chunker chunker_;
  FlowDigest digest_;
  std::deque<Unacknowledged> chunks_;
  uint64_t first_seq_ = 0;
  // The next chunk to send, how many of its bytes were sent as fragments, and the number after the last chunk ever sent.
  uint64_t next_seq_ = 0, sent_bytes_ = 0, sent_seq_ = 0;
  uint64_t total_bytes_ = 0;
  bool is_ended_ = false, is_delivered_ = false;

  // -- what the consumer has granted

  uint64_t window_bytes_ = 0, limit_bytes_ = 0, limit_chunks_ = 0;
  // The chunk for which credit was demanded on the present opening.
  std::optional<uint64_t> demanded_seq_;

  // -- openings

  uint32_t openings_ = 0;
  bool is_open_due_ = false;
  int resyncs_ = 0;
  Clock::time_point answered_at_ = Clock::now();
  std::chrono::milliseconds silence_;
};

}  // namespace stage
