// Checks the digest against the test vectors of the protocol: vectors_test PROTOS/vectors/digest.json
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>

#include "digest.h"
#include "outputs.h"

namespace {

std::string hex(const std::string& bytes) {
  std::string text;
  for (const unsigned char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

std::string digest_of(const google::protobuf::Struct& vector) {
  stage::FlowDigest digest;
  for (const auto& chunk : vector.fields().at("chunks").list_value().values()) {
    stage::Packet packet;
    for (const auto& described : chunk.struct_value().fields().at("tensors").list_value().values()) {
      const auto& fields = described.struct_value().fields();
      stage::Tensor tensor;
      tensor.name = fields.at("name").string_value();
      stagemesh::v1::DataType_Parse("DATA_TYPE_" + fields.at("data_type").string_value(), &tensor.type);
      for (const auto& length : fields.at("shape").list_value().values()) {
        tensor.shape.push_back(static_cast<int64_t>(length.number_value()));
      }
      packet.tensors.push_back(tensor);
    }
    digest.add(packet);
  }
  return hex(digest.finish());
}

// Returns the text of bytes that arrive one by one.
std::string decoded(const std::string& bytes) {
  stage::Utf8Decoder decoder;
  std::string text;
  for (const char byte : bytes) text += decoder.decode(std::string(1, byte));
  return text + decoder.finish();
}

}  // namespace

int main(int count, char** arguments) {
  std::ifstream file(count > 1 ? arguments[1] : "");
  std::stringstream content;
  content << file.rdbuf();
  google::protobuf::ListValue vectors;
  if (!google::protobuf::util::JsonStringToMessage(content.str(), &vectors).ok() || vectors.values().empty()) return 2;
  int failures = 0;
  for (const auto& vector : vectors.values()) {
    const auto& fields = vector.struct_value().fields();
    if (digest_of(vector.struct_value()) == fields.at("sha256").string_value()) continue;
    std::cerr << "another digest: " << fields.at("name").string_value() << std::endl;
    ++failures;
  }
  // Examples of the Unicode Standard, section 3.9: one replacement for each maximal part of a character.
  const std::string bad = "\xEF\xBF\xBD";
  const std::pair<std::string, std::string> texts[] = {
      {"na\xC3\xAFve \xF0\x9F\x98\x80", "na\xC3\xAFve \xF0\x9F\x98\x80"},
      {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", bad + bad + bad + bad + bad + bad + bad + bad + "A"},
      {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", bad + bad + bad + bad + bad + bad + bad + bad + "A"},
      {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", bad + bad + bad + bad + bad + "A" + bad + bad + "B"},
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", bad + bad + bad + bad + "A"},
      {"a\xF0\x9F\x98", "a" + bad},
  };
  for (const auto& [bytes, text] : texts) {
    if (decoded(bytes) == text) continue;
    std::cerr << "another text: " << hex(bytes) << std::endl;
    ++failures;
  }
  return failures == 0 ? 0 : 1;
}
