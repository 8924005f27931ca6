// Chunk policies: how the packets that a function emits are divided into the chunks of a flow.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "packets.h"
#include "stagemesh/v1/stage.pb.h"

namespace stage {

class Chunker {
 public:
  // `binding` has the policy and the names of the tensors to send. Throws UNKNOWN_KIND or INVALID_REQUEST.
  explicit Chunker(const v1::OutputBinding& binding);

  // Returns the chunks that are complete with this packet. Throws INVALID_CHUNK if packets cannot be joined.
  std::vector<Packet> add(const Packet& packet);

  // Returns the rest, after the last packet.
  std::vector<Packet> finish();

 private:
  Packet cut(uint64_t frames);
  Packet with_context(Packet chunk);
  Packet numbered(Packet chunk);
  void join(Packet packet);
  uint64_t wanted_frames() const;
  uint64_t waiting_frames() const;

  const v1::OutputBinding binding_;
  // The packets that were joined. Their first `cut_frames_` frames are in chunks already.
  Packet waiting_;
  uint64_t cut_frames_ = 0;
  // The number of chunks that were cut.
  uint64_t chunks_ = 0;
  // The last rows of the chunk before, which are repeated in the next one.
  std::vector<Tensor> context_;
  // The number of rows of each tensor that were sent, without those of the context.
  std::map<std::string, uint64_t> rows_;
};

}  // namespace stage
