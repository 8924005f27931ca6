#include "outputs.h"

#include <algorithm>

#include "errors.h"

namespace stage {
namespace {

constexpr uint64_t PART_BYTES = 1 << 20;
constexpr char REPLACEMENT[] = "\xEF\xBF\xBD";

// Returns the number of bytes of the character that this byte begins, or 0 if no character begins so.
size_t length_of(unsigned char first) {
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return 2;
  if (first >= 0xE0 && first <= 0xEF) return 3;
  return first >= 0xF0 && first <= 0xF4 ? 4 : 0;
}

// Returns whether a byte may follow the first `index` bytes of a character. The second byte excludes forms that are too
// long, surrogates and values above U+10FFFF.
bool may_follow(unsigned char first, size_t index, unsigned char byte) {
  unsigned char low = 0x80, high = 0xBF;
  if (index == 1) {
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  }
  return byte >= low && byte <= high;
}

}  // namespace

std::string Utf8Decoder::decode(const std::string& bytes) {
  std::string text;
  text.reserve(bytes.size() + incomplete_.size());
  for (const char byte : bytes) {
    if (!incomplete_.empty() &&
        !may_follow(static_cast<unsigned char>(incomplete_[0]), incomplete_.size(), static_cast<unsigned char>(byte))) {
      text += REPLACEMENT;
      incomplete_.clear();
    }
    incomplete_.push_back(byte);
    const size_t length = length_of(static_cast<unsigned char>(incomplete_[0]));
    if (length == 0) text += REPLACEMENT;
    else if (incomplete_.size() == length) text += incomplete_;
    else continue;
    incomplete_.clear();
  }
  return text;
}

std::string Utf8Decoder::finish() {
  if (incomplete_.empty()) return "";
  incomplete_.clear();
  return REPLACEMENT;
}

std::vector<v1::Output> OutputStream::add(const Tensor& tensor) {
  std::vector<v1::Output> parts;
  if (emitted_.kind() == v1::TENSOR_KIND_TEXT) {
    add_text(parts, decoder_.decode(tensor.data));
    return parts;
  }
  const uint64_t rows = tensor.rows(), row_bytes = tensor.data.size() / std::max<uint64_t>(1, rows);
  if (row_bytes > 4 * PART_BYTES) {
    throw Failure(grpc::INVALID_ARGUMENT, "OUTPUT_TOO_LARGE", "a row of " + tensor.name + " is too large for a message");
  }
  const uint64_t part_rows = std::max<uint64_t>(1, PART_BYTES / std::max<uint64_t>(1, row_bytes));
  for (uint64_t start = 0; start < rows; start += part_rows) {
    const uint64_t end = std::min(rows, start + part_rows);
    Packet packet;
    packet.tensors.push_back(tensor.shape.empty() ? tensor : tensor.slice(start, end));
    packet.tensors[0].first_row = 0;
    v1::Tensor content = to_chunk(packet, true).tensors(0);
    v1::Output output = part(end - start);
    if (emitted_.kind() == v1::TENSOR_KIND_AUDIO) {
      *output.mutable_audio()->mutable_samples() = std::move(content);
      output.mutable_audio()->set_sample_rate_hz(emitted_.sample_rate_hz());
    } else {
      *output.mutable_tensor() = std::move(content);
    }
    parts.push_back(std::move(output));
  }
  return parts;
}

std::vector<v1::Output> OutputStream::finish() {
  std::vector<v1::Output> parts;
  add_text(parts, decoder_.finish());
  if (parts.empty()) parts.push_back(part(0));
  parts.back().mutable_finish()->set_reason(v1::FINISH_REASON_END);
  return parts;
}

// Cuts a text between characters. Its bytes count for the position.
void OutputStream::add_text(std::vector<v1::Output>& parts, const std::string& text) {
  for (size_t start = 0, end = 0; start < text.size(); start = end) {
    end = std::min<size_t>(text.size(), start + PART_BYTES);
    while (end < text.size() && (text[end] & 0xC0) == 0x80) --end;
    v1::Output output = part(end - start);
    output.set_text(text.substr(start, end - start));
    parts.push_back(std::move(output));
  }
}

// Returns a part that advances the position by this length.
v1::Output OutputStream::part(uint64_t length) {
  v1::Output output;
  output.set_name(emitted_.spec().name());
  output.set_position(position_);
  position_ += length;
  return output;
}

}  // namespace stage
