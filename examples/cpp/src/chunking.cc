#include "chunking.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "errors.h"

namespace stage {
namespace {

// Throws INVALID_CHUNK unless all tensors of a packet have the same number of rows.
void check_frames(const Packet& packet) {
  const auto differs = [&](const Tensor& tensor) {
    return tensor.shape.empty() || tensor.rows() != packet.tensors[0].rows();
  };
  if (packet.tensors.empty() || std::any_of(packet.tensors.begin(), packet.tensors.end(), differs)) {
    throw invalid_chunk("tensors that are cut along their first axis must have equal lengths");
  }
}

void append_rows(Tensor& tensor, const Tensor& more) {
  const bool matches = tensor.name == more.name && tensor.type == more.type && tensor.shape.size() == more.shape.size() &&
                       std::equal(tensor.shape.begin() + 1, tensor.shape.end(), more.shape.begin() + 1);
  if (!matches) throw invalid_chunk("packets that are joined into one chunk must have the same tensors");
  tensor.shape[0] += more.shape[0];
  tensor.data += more.data;
}

}  // namespace

Chunker::Chunker(const v1::OutputBinding& binding) : binding_(binding) {
  const v1::ChunkPolicy& policy = binding.policy();
  if (policy.cut_case() == v1::ChunkPolicy::CUT_NOT_SET) {
    if (auto unknown = unknown_kind("the orchestrator", policy)) throw *unknown;
  }
  const auto& ramp = policy.frames().ramp();
  const bool has_empty = policy.frames().frames() < 1 || std::count(ramp.begin(), ramp.end(), 0) > 0;
  if (policy.has_frames() && has_empty) throw invalid_request("a chunk policy needs at least 1 frame in each chunk");
}

std::vector<Packet> Chunker::add(const Packet& packet) {
  Packet selected;
  selected.fields = packet.fields;
  for (const Tensor& tensor : packet.tensors) {
    const auto& names = binding_.tensors();
    if (names.empty() || std::count(names.begin(), names.end(), tensor.name) > 0) selected.tensors.push_back(tensor);
  }
  std::vector<Packet> chunks;
  if (binding_.policy().cut_case() == v1::ChunkPolicy::CUT_NOT_SET) {
    chunks.push_back(numbered(std::move(selected)));
    return chunks;
  }
  join(std::move(selected));
  while (waiting_frames() >= wanted_frames()) chunks.push_back(cut(wanted_frames()));
  return chunks;
}

std::vector<Packet> Chunker::finish() {
  std::vector<Packet> chunks;
  if (waiting_frames() > 0) chunks.push_back(cut(waiting_frames()));
  return chunks;
}

uint64_t Chunker::waiting_frames() const {
  return waiting_.tensors.empty() ? 0 : waiting_.tensors[0].rows() - cut_frames_;
}

void Chunker::join(Packet packet) {
  check_frames(packet);
  if (waiting_frames() == 0) {
    waiting_ = std::move(packet);
  } else {
    for (Tensor& tensor : waiting_.tensors) tensor = tensor.slice(cut_frames_, tensor.rows());
    if (waiting_.fields.has_token_start()) waiting_.fields.set_token_start(waiting_.fields.token_start() + cut_frames_);
    if (waiting_.tensors.size() != packet.tensors.size()) throw invalid_chunk("packets with other tensors are joined");
    for (size_t index = 0; index < packet.tensors.size(); ++index) {
      append_rows(waiting_.tensors[index], packet.tensors[index]);
    }
    // Of values with the same name, the last packet's is used. The rows keep the position of the first one.
    for (const auto& [name, value] : packet.fields.metadata()) (*waiting_.fields.mutable_metadata())[name] = value;
  }
  cut_frames_ = 0;
}

uint64_t Chunker::wanted_frames() const {
  const v1::ChunkPolicy& policy = binding_.policy();
  if (policy.has_whole()) return std::numeric_limits<uint64_t>::max();
  const auto& ramp = policy.frames().ramp();
  return chunks_ < static_cast<uint64_t>(ramp.size()) ? ramp[static_cast<int>(chunks_)] : policy.frames().frames();
}

Packet Chunker::cut(uint64_t frames) {
  Packet chunk;
  chunk.fields = waiting_.fields;
  for (const Tensor& tensor : waiting_.tensors) chunk.tensors.push_back(tensor.slice(cut_frames_, cut_frames_ + frames));
  if (chunk.fields.has_token_start()) chunk.fields.set_token_start(chunk.fields.token_start() + cut_frames_);
  cut_frames_ += frames;
  ++chunks_;
  return with_context(numbered(std::move(chunk)));
}

// Sets the number of each tensor's first row.
Packet Chunker::numbered(Packet chunk) {
  for (Tensor& tensor : chunk.tensors) {
    tensor.first_row = rows_[tensor.name];
    rows_[tensor.name] += tensor.rows();
  }
  return chunk;
}

// Repeats the last frames of the chunk before at the start of a chunk.
Packet Chunker::with_context(Packet chunk) {
  const uint64_t frames = binding_.policy().frames().left_context_frames();
  if (frames == 0) return chunk;
  chunk.fields.set_context_frames(context_.empty() ? 0 : static_cast<uint32_t>(context_[0].rows()));
  for (size_t index = 0; index < context_.size(); ++index) {
    append_rows(context_[index], chunk.tensors[index]);
    chunk.tensors[index] = std::move(context_[index]);
  }
  context_.clear();
  for (const Tensor& tensor : chunk.tensors) {
    context_.push_back(tensor.slice(tensor.rows() - std::min(frames, tensor.rows()), tensor.rows()));
  }
  return chunk;
}

}  // namespace stage
