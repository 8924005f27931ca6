// The flow of one edge that enters a step: order, credit, fragments, and the packets for the function.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "digest.h"
#include "errors.h"
#include "flows.h"
#include "packets.h"
#include "stagemesh/v1/signature.pb.h"
#include "stagemesh/v1/stage.pb.h"

namespace stage {

// What a producer may send ahead of the function.
struct CreditLimits {
  uint64_t window_bytes = 8 << 20;
  uint64_t window_chunks = 1024;
  uint64_t max_chunk_bytes = 256 << 20;
};

// A PutChunk stream of a producer, as a flow sees it.
class Session {
 public:
  virtual ~Session() = default;
  virtual void reply(v1::PutReply reply) = 0;

  std::string producer;
  std::string incarnation;
};

// All methods except `read` and `close` are called with the mutex locked.
class IncomingFlow {
 public:
  // Called once with the outcome of the flow: nothing if it was committed.
  using OnOver = std::function<void(std::optional<Failure> outcome)>;

  // `signature` says which tensors the function accepts. All others are ignored.
  IncomingFlow(v1::EdgeKey key, std::string producer, const v1::Signature& signature, const CreditLimits& limits,
               std::mutex& mutex, OnOver on_over);

  // -- the producer's items

  void open(Session& session, const v1::OpenEdge& open);
  void take_chunk(Session& session, v1::Chunk& chunk);
  void take_fragment(Session& session, const v1::ChunkFragment& fragment);
  void demand(Session& session, uint64_t size_bytes);

  // Ends the flow because of an error in the producer's items, which both ends receive.
  void reject(Session& session, const Failure& failure);
  // Ends the flow. The function receives the error after the packets that have arrived.
  void fail(const Failure& failure);
  // Called when a stream has ended. The producer may return on another one.
  void detach(const Session& session);
  // Fails the flow if its producer has been away for too long.
  void check(Clock::time_point now);

  Failure lost() const;

  // -- the function

  // Returns the next packet, or nothing after the last one, when the flow is committed. Throws Failure.
  std::optional<Packet> read();
  // Ends the flow, unless it was read to its end. `failure` is why the step ends.
  void close(const Failure& failure);

  const v1::EdgeKey key;
  const std::string producer;
  // The incarnation of the producer that has opened the flow. Empty before.
  std::string incarnation;
  std::optional<Failure> error;

 private:
  enum class Phase { WAITING, OPEN, RESYNCING, ENDED, OVER };
  // The fragments of the next chunk.
  struct Fragments {
    uint64_t total_bytes;
    std::string bytes;
  };
  struct Unread {
    Packet packet;
    uint64_t size_bytes;
    uint64_t overhead_bytes;
  };

  bool is_open_on(Session& session);
  void resync(Session& session, const std::string& reason, const std::string& message);
  void check_credit(uint64_t size_bytes) const;
  bool take_data(Session& session, v1::ChunkData& data);
  void take_end(const v1::ChunkEnd& end);
  void count_rows(const Packet& packet);
  void keep_accepted(Packet& packet) const;
  void consume(uint64_t size_bytes, uint64_t chunks);
  void over(std::optional<Failure> outcome);

  const v1::Signature signature_;
  const CreditLimits limits_;
  std::mutex& mutex_;
  const OnOver on_over_;
  std::condition_variable changed_;
  // The stream on which the flow was opened last.
  Session* session_ = nullptr;
  Phase phase_ = Phase::WAITING;
  // When the flow fails unless its producer opens it.
  std::optional<Clock::time_point> lost_at_;
  std::optional<Failure> closed_;
  uint64_t next_seq_ = 0;
  int resyncs_ = 0;
  std::optional<Fragments> fragments_;
  FlowDigest digest_;
  // The rows of each tensor that have arrived.
  std::map<std::string, uint64_t> rows_;
  std::deque<Unread> unread_;
  uint64_t unread_overhead_bytes_ = 0;
  // Totals of the flow.
  uint64_t limit_bytes_, limit_chunks_;
  uint64_t received_bytes_ = 0, received_chunks_ = 0;
  uint64_t read_bytes_ = 0, read_chunks_ = 0;
  uint64_t demanded_bytes_ = 0;
};

}  // namespace stage
