// The digest of a flow: SHA-256 over the names, types and shapes of its chunks. See docs/protocol.md, "The digest".
#pragma once

#include <openssl/evp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "packets.h"

namespace stage {

class FlowDigest {
 public:
  FlowDigest();

  // Adds the next data chunk.
  void add(const Packet& packet);

  // Returns the digest of the whole flow. Called once, after the last chunk.
  std::string finish();

  // The number of data chunks.
  uint64_t count() const { return count_; }

 private:
  void end_run();

  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> hash_;
  // The description of the chunks of the present run, and their number.
  std::string run_;
  uint64_t run_length_ = 0;
  uint64_t count_ = 0;
};

}  // namespace stage
