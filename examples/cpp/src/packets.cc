#include "packets.h"

#include <zlib.h>

#include <algorithm>
#include <set>
#include <utility>

#include "errors.h"

namespace stage {
namespace {

constexpr int MAX_TENSORS = 1024;
constexpr size_t MAX_DIMENSIONS = 16;
constexpr size_t MAX_METADATA = 64;
constexpr uint64_t MAX_NAME_CHARACTERS = 256;
constexpr uint64_t MAX_TEXT_CHARACTERS = 1024;
constexpr uint64_t MAX_BYTES = uint64_t{1} << 40;

uint64_t element_bytes(int type) {
  switch (type) {
    case v1::DATA_TYPE_BOOL:
    case v1::DATA_TYPE_UINT8:
    case v1::DATA_TYPE_INT8:
    case v1::DATA_TYPE_FLOAT8_E4M3:
    case v1::DATA_TYPE_FLOAT8_E5M2:
      return 1;
    case v1::DATA_TYPE_INT16:
    case v1::DATA_TYPE_UINT16:
    case v1::DATA_TYPE_FLOAT16:
    case v1::DATA_TYPE_BFLOAT16:
      return 2;
    case v1::DATA_TYPE_INT32:
    case v1::DATA_TYPE_UINT32:
    case v1::DATA_TYPE_FLOAT32:
      return 4;
    case v1::DATA_TYPE_INT64:
    case v1::DATA_TYPE_UINT64:
    case v1::DATA_TYPE_FLOAT64:
    case v1::DATA_TYPE_COMPLEX64:
      return 8;
    case v1::DATA_TYPE_COMPLEX128:
      return 16;
    default:
      return 0;
  }
}

void check_name(const std::string& name) {
  if (characters(name) > MAX_NAME_CHARACTERS) throw invalid_chunk("a name has more than 256 characters");
}

void check_metadata(const v1::ChunkData& data, const std::string& producer) {
  static const std::set<std::string> RESERVED = {"context_frames", "token_start", "prompt_tokens", "preview",
                                                 "engine_steps"};
  if (data.metadata().size() > MAX_METADATA) throw invalid_chunk("a chunk has more than 64 metadata values");
  for (const auto& [name, value] : data.metadata()) {
    check_name(name);
    if (RESERVED.count(name)) throw invalid_chunk("the metadata name " + name + " is a field of the chunk");
    if (value.kind_case() == v1::TypedValue::kText && characters(value.text()) > MAX_TEXT_CHARACTERS) {
      throw invalid_chunk("the metadata value " + name + " has more than 1,024 characters");
    }
    if (value.kind_case() == v1::TypedValue::KIND_NOT_SET) {
      if (auto unknown = unknown_kind(producer, value)) throw *unknown;
      throw invalid_chunk("the metadata value " + name + " has no kind");
    }
  }
}

void check_checksum(const v1::Checksum& checksum, const Packet& packet) {
  if (checksum.algorithm() != v1::CHECKSUM_ALGORITHM_CRC32) return;
  uLong value = crc32_z(0, nullptr, 0);
  for (const Tensor& tensor : packet.tensors) {
    value = crc32_z(value, reinterpret_cast<const Bytef*>(tensor.data.data()), tensor.data.size());
  }
  if (value == checksum.value()) return;
  throw Failure(grpc::INVALID_ARGUMENT, "CHECKSUM_MISMATCH", "the bytes of a chunk were damaged on the way");
}

}  // namespace

Tensor Tensor::slice(uint64_t start, uint64_t end) const {
  const uint64_t row_bytes = data.size() / std::max<uint64_t>(1, rows());
  Tensor result{name, type, shape, data.substr(start * row_bytes, (end - start) * row_bytes), first_row + start};
  result.shape[0] = static_cast<int64_t>(end - start);
  return result;
}

uint64_t Packet::size_bytes() const {
  uint64_t size = 0;
  for (const Tensor& tensor : tensors) size += tensor.data.size();
  return size;
}

std::string Packet::bytes(uint64_t offset, uint64_t size) const {
  std::string result;
  result.reserve(size);
  for (const Tensor& tensor : tensors) {
    if (offset < tensor.data.size()) {
      result.append(tensor.data, offset, size - result.size());
      offset = 0;
    } else {
      offset -= tensor.data.size();
    }
    if (result.size() == size) break;
  }
  return result;
}

uint64_t size_of(const std::string& name, int type, const std::vector<int64_t>& shape) {
  uint64_t size = element_bytes(type);
  bool is_valid = size > 0 && shape.size() <= MAX_DIMENSIONS;
  bool is_empty = false;
  for (const int64_t length : shape) {
    is_valid = is_valid && length >= 0 && static_cast<uint64_t>(length) <= MAX_BYTES;
    is_empty = is_empty || length == 0;
    if (is_valid && length > 0) size *= static_cast<uint64_t>(length);
    is_valid = is_valid && size <= MAX_BYTES;
  }
  if (!is_valid) throw invalid_chunk("tensor " + name + " has an unknown type or an impossible shape");
  return is_empty ? 0 : size;
}

Packet to_packet(v1::ChunkData& data, std::string& fragments, const std::string& producer) {
  if (data.tensors_size() > MAX_TENSORS) throw invalid_chunk("a chunk has more than 1,024 tensors");
  check_metadata(data, producer);
  Packet packet;
  std::set<std::string> names;
  uint64_t streamed = 0;
  for (v1::Tensor& sent : *data.mutable_tensors()) {
    check_name(sent.name());
    if (!names.insert(sent.name()).second) throw invalid_chunk("two tensors have the name " + sent.name());
    if (sent.has_handover()) {
      throw Failure(grpc::UNIMPLEMENTED, "TICKET_REFUSED", "this stage accepts no tickets, such as " + sent.name());
    }
    if (sent.has_shm() || sent.has_device()) {
      // Sent only to a consumer that has accepted an offer, or that has the feature.
      throw Failure(grpc::UNIMPLEMENTED, "UNKNOWN_KIND", "this stage cannot read the memory of tensor " + sent.name());
    }
    Tensor tensor{sent.name(), sent.dtype(), {sent.shape().begin(), sent.shape().end()}, {}, sent.first_row()};
    const uint64_t size = size_of(tensor.name, sent.dtype(), tensor.shape);
    if (sent.has_inline_()) {
      tensor.data = std::move(*sent.mutable_inline_());
    } else if (sent.has_streamed()) {
      if (sent.streamed().offset() != streamed || sent.streamed().size_bytes() != size) {
        throw invalid_chunk("the region of tensor " + tensor.name + " does not follow that of the tensor before");
      }
      // A single tensor takes the bytes without a copy.
      if (size == fragments.size()) tensor.data = std::move(fragments);
      else if (streamed <= fragments.size()) tensor.data = fragments.substr(streamed, size);
      streamed += size;
    } else if (size > 0) {
      if (auto unknown = unknown_kind(producer, sent)) throw *unknown;
    }
    if (tensor.data.size() != size) throw invalid_chunk("the bytes of tensor " + tensor.name + " do not fit its shape");
    if (data.context_frames() > tensor.rows()) throw invalid_chunk("context_frames exceeds tensor " + tensor.name);
    packet.tensors.push_back(std::move(tensor));
  }
  if (packet.size_bytes() != data.size_bytes()) throw invalid_chunk("size_bytes is not the size of the tensors");
  if (data.has_checksum()) check_checksum(data.checksum(), packet);
  packet.fields.Swap(&data);
  packet.fields.clear_tensors();
  packet.fields.clear_lease_id();
  packet.fields.clear_size_bytes();
  packet.fields.clear_checksum();
  return packet;
}

v1::ChunkData to_chunk(const Packet& packet, bool is_inline) {
  v1::ChunkData data = packet.fields;
  data.set_size_bytes(packet.size_bytes());
  uint64_t offset = 0;
  for (const Tensor& tensor : packet.tensors) {
    v1::Tensor& sent = *data.add_tensors();
    sent.set_name(tensor.name);
    sent.set_dtype(tensor.type);
    sent.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    sent.set_first_row(tensor.first_row);
    if (tensor.data.empty()) continue;
    if (is_inline) {
      sent.set_inline_(tensor.data);
    } else {
      sent.mutable_streamed()->set_offset(offset);
      sent.mutable_streamed()->set_size_bytes(tensor.data.size());
      offset += tensor.data.size();
    }
  }
  return data;
}

uint64_t characters(const std::string& text) {
  // Every byte but the later ones of a character begins with other bits than 10.
  return std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xC0) != 0x80; });
}

}  // namespace stage
