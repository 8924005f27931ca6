#include "digest.h"

namespace stage {
namespace {

void append(std::string& bytes, uint64_t value, int size) {
  for (int index = 0; index < size; ++index) bytes.push_back(static_cast<char>(value >> (8 * index)));
}

std::string describe(const Packet& packet) {
  std::string bytes;
  append(bytes, packet.tensors.size(), 4);
  for (const Tensor& tensor : packet.tensors) {
    append(bytes, tensor.name.size(), 4);
    bytes += tensor.name;
    append(bytes, tensor.type, 4);
    append(bytes, tensor.shape.size(), 4);
    for (const int64_t length : tensor.shape) append(bytes, static_cast<uint64_t>(length), 8);
  }
  return bytes;
}

}  // namespace

FlowDigest::FlowDigest() : hash_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  EVP_DigestInit_ex(hash_.get(), EVP_sha256(), nullptr);
}

void FlowDigest::add(const Packet& packet) {
  std::string described = describe(packet);
  if (described != run_) end_run();
  run_ = std::move(described);
  ++run_length_;
  ++count_;
}

std::string FlowDigest::finish() {
  end_run();
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_DigestFinal_ex(hash_.get(), digest, &size);
  return {reinterpret_cast<const char*>(digest), size};
}

void FlowDigest::end_run() {
  if (run_length_ == 0) return;
  std::string length;
  append(length, run_length_, 8);
  EVP_DigestUpdate(hash_.get(), length.data(), length.size());
  EVP_DigestUpdate(hash_.get(), run_.data(), run_.size());
  run_length_ = 0;
}

}  // namespace stage
