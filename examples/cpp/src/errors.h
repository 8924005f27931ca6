// Errors: a code of gRPC, a reason of the catalogue (docs/errors.md), and facts. See docs/protocol.md, "Errors".
#pragma once

#include <grpcpp/support/status.h>

#include <exception>
#include <map>
#include <optional>
#include <string>

#include "stagemesh/v1/chunk.pb.h"
#include "stagemesh/v1/protocol.pb.h"

namespace stage {

namespace v1 = stagemesh::v1;

// An error of Stagemesh. Programs decide by its code and reason. The message is for people.
class Failure : public std::exception {
 public:
  Failure(grpc::StatusCode code, std::string reason, std::string message);

  // Returns this error with more metadata. An entry that is set already has precedence, because it names the first cause.
  Failure within(const std::string& name, const std::string& value) const;

  // Returns this error with the highest attempt of its request that the stage has seen.
  Failure with_attempt(uint32_t attempt) const;

  // Returns whether a flow that failed with this error may continue with another replica at its other end.
  bool allows_successor() const;

  const char* what() const noexcept override { return message.c_str(); }

  grpc::StatusCode code;
  // Empty if Stagemesh did not raise the error: the connection or something on the way failed.
  std::string reason;
  std::string message;
  std::map<std::string, std::string> metadata;
  std::optional<double> retry_after_s;
  v1::ErrorFacts facts;
};

// Create errors of common causes.
Failure invalid_chunk(const std::string& message);
Failure invalid_request(const std::string& message);
Failure unsupported(const std::string& what);
Failure peer_lost(const std::string& message, const std::string& replica);

// Convert errors from and into an error within a stream. What is too long for the trailers of a call is omitted.
v1::Error to_wire(const Failure& whole);
Failure from_wire(const v1::Error& error);

// Convert errors from and into the status of a call, whose details have an ErrorInfo.
grpc::Status to_status(const Failure& whole);
Failure from_status(const grpc::Status& status);

// What this program speaks.
v1::Protocol own_protocol();

// Throws NO_COMMON_VERSION unless a peer speaks a version that this program speaks, too. A peer that sends no protocol
// passes an empty one.
void check_protocol(const std::string& peer, const v1::Protocol& theirs);

// Returns UNKNOWN_KIND if a message without a known kind has an unknown field, because later software has added its kind.
std::optional<Failure> unknown_kind(const std::string& sender, const google::protobuf::Message& message);

}  // namespace stage
