// Tensors and packets: what a function receives and emits, and what a chunk carries.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stagemesh/v1/chunk.pb.h"
#include "stagemesh/v1/tensor.pb.h"

namespace stage {

namespace v1 = stagemesh::v1;

// A dense array, little-endian and C-contiguous.
struct Tensor {
  std::string name;
  v1::DataType type = v1::DATA_TYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  std::string data;
  // The number of rows that precede it on its edge. A function need not set it.
  uint64_t first_row = 0;

  // The number of rows along the first axis. A tensor without axes is one row.
  uint64_t rows() const { return shape.empty() ? 1 : static_cast<uint64_t>(shape[0]); }

  // Returns the rows from `start` to before `end`.
  Tensor slice(uint64_t start, uint64_t end) const;
};

// Tensors that belong together.
struct Packet {
  std::vector<Tensor> tensors;
  // The metadata of the packet, and its typed fields such as token_start. The fields that describe the chunk's bytes
  // (tensors, lease_id, size_bytes, checksum) are not set.
  v1::ChunkData fields;

  // The number of bytes of all tensors.
  uint64_t size_bytes() const;

  // Returns `size` bytes from `offset` on of the tensors' bytes, one tensor after the other.
  std::string bytes(uint64_t offset, uint64_t size) const;
};

// Returns the number of bytes of a tensor. Throws INVALID_CHUNK for an unknown type or an impossible shape.
uint64_t size_of(const std::string& name, int type, const std::vector<int64_t>& shape);

// Returns the packet of a chunk, and takes its inline bytes. `fragments` are the bytes that were sent before the chunk.
// Throws INVALID_CHUNK, CHECKSUM_MISMATCH, TICKET_REFUSED or UNKNOWN_KIND.
Packet to_packet(v1::ChunkData& data, std::string& fragments, const std::string& producer);

// Returns the chunk of a packet. Its bytes are inline, unless they were sent as fragments before.
v1::ChunkData to_chunk(const Packet& packet, bool is_inline);

// Returns the number of Unicode characters of a text.
uint64_t characters(const std::string& text);

}  // namespace stage
