// Outputs for the client: the parts of an emitted tensor. See docs/protocol.md, "A step".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "packets.h"
#include "stagemesh/v1/request.pb.h"
#include "stagemesh/v1/signature.pb.h"

namespace stage {

// Decodes UTF-8 that arrives in pieces.
class Utf8Decoder {
 public:
  // Returns the complete characters of these and earlier bytes, as valid UTF-8. Replaces invalid bytes by U+FFFD, one for
  // each maximal part of a character, as Unicode recommends.
  std::string decode(const std::string& bytes);

  // Returns U+FFFD if the text ended within a character, and otherwise an empty text.
  std::string finish();

 private:
  // The first bytes of a character.
  std::string incomplete_;
};

// The output of one emitted tensor.
class OutputStream {
 public:
  explicit OutputStream(const v1::EmittedTensor& emitted) : emitted_(emitted) {}

  // Returns the parts for more rows, each of about 1 MiB at most. Throws OUTPUT_TOO_LARGE if a row is larger.
  std::vector<v1::Output> add(const Tensor& tensor);

  // Returns the last parts.
  std::vector<v1::Output> finish();

 private:
  v1::Output part(uint64_t length);
  void add_text(std::vector<v1::Output>& parts, const std::string& text);

  const v1::EmittedTensor emitted_;
  uint64_t position_ = 0;
  Utf8Decoder decoder_;
};

}  // namespace stage
