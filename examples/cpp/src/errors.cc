#include "errors.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace stage {
namespace {

constexpr char DOMAIN_NAME[] = "stagemesh";
constexpr uint32_t VERSION = 1;
// gRPC limits the trailers of a call, which contain the message twice.
constexpr size_t MAX_MESSAGE_BYTES = 1024, MAX_METADATA_BYTES = 3072;

// Returns an error without the end of a long message, and without the longest metadata.
Failure shortened(const Failure& failure) {
  Failure result = failure;
  size_t end = std::min(failure.message.size(), MAX_MESSAGE_BYTES);
  if (end < failure.message.size()) {
    while (end > 0 && (failure.message[end] & 0xC0) == 0x80) --end;  // the start of a character
  }
  result.message.resize(end);
  std::multimap<size_t, std::pair<std::string, std::string>> by_size;
  for (const auto& entry : failure.metadata) by_size.emplace(entry.first.size() + entry.second.size(), entry);
  result.metadata.clear();
  size_t kept_bytes = 0;
  for (const auto& [size, entry] : by_size) {
    kept_bytes += size;
    if (kept_bytes > MAX_METADATA_BYTES) break;
    result.metadata.insert(entry);
  }
  return result;
}

}  // namespace

Failure::Failure(grpc::StatusCode code, std::string reason, std::string message)
    : code(code), reason(std::move(reason)), message(std::move(message)) {}

Failure Failure::within(const std::string& name, const std::string& value) const {
  Failure result = *this;
  result.metadata.emplace(name, value);
  return result;
}

Failure Failure::with_attempt(uint32_t attempt) const {
  Failure result = *this;
  result.facts.set_attempt(attempt);
  return result;
}

bool Failure::allows_successor() const {
  if (reason == "UNKNOWN_FLOW" || reason == "STALE_ATTEMPT" || reason == "STALE_INCARNATION") return true;
  return code == grpc::UNAVAILABLE || (code == grpc::CANCELLED && reason != "NOT_READ");
}

Failure invalid_chunk(const std::string& message) { return {grpc::INVALID_ARGUMENT, "INVALID_CHUNK", message}; }

Failure invalid_request(const std::string& message) { return {grpc::INVALID_ARGUMENT, "INVALID_REQUEST", message}; }

Failure unsupported(const std::string& what) {
  return {grpc::UNIMPLEMENTED, "UNSUPPORTED", "this stage does not support " + what};
}

Failure peer_lost(const std::string& message, const std::string& replica) {
  return Failure(grpc::UNAVAILABLE, "PEER_LOST", message).within("replica", replica);
}

v1::Error to_wire(const Failure& whole) {
  const Failure failure = shortened(whole);
  v1::Error error;
  error.set_code(failure.code);
  error.set_reason(failure.reason);
  error.set_message(failure.message);
  error.mutable_metadata()->insert(failure.metadata.begin(), failure.metadata.end());
  if (failure.retry_after_s) error.set_retry_after_s(*failure.retry_after_s);
  if (failure.facts.ByteSizeLong() > 0) *error.mutable_facts() = failure.facts;
  return error;
}

Failure from_wire(const v1::Error& error) {
  Failure failure(static_cast<grpc::StatusCode>(error.code()), error.reason(), error.message());
  failure.metadata.insert(error.metadata().begin(), error.metadata().end());
  if (error.has_retry_after_s()) failure.retry_after_s = error.retry_after_s();
  failure.facts = error.facts();
  return failure;
}

grpc::Status to_status(const Failure& whole) {
  const Failure failure = shortened(whole);
  google::rpc::Status content;
  content.set_code(failure.code);
  content.set_message(failure.message);
  google::rpc::ErrorInfo info;
  info.set_domain(DOMAIN_NAME);
  info.set_reason(failure.reason);
  info.mutable_metadata()->insert(failure.metadata.begin(), failure.metadata.end());
  content.add_details()->PackFrom(info);
  if (failure.facts.ByteSizeLong() > 0) content.add_details()->PackFrom(failure.facts);
  if (failure.retry_after_s) {
    google::rpc::RetryInfo retry;
    const double seconds = std::floor(*failure.retry_after_s);
    retry.mutable_retry_delay()->set_seconds(static_cast<int64_t>(seconds));
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>((*failure.retry_after_s - seconds) * 1e9));
    content.add_details()->PackFrom(retry);
  }
  return {failure.code, failure.message, content.SerializeAsString()};
}

Failure from_status(const grpc::Status& status) {
  Failure failure(status.error_code(), "", status.error_message());
  google::rpc::Status content;
  if (!content.ParseFromString(status.error_details())) return failure;
  for (const auto& detail : content.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (detail.UnpackTo(&info) && info.domain() == DOMAIN_NAME) {
      failure.reason = info.reason();
      failure.metadata.insert(info.metadata().begin(), info.metadata().end());
    } else if (detail.UnpackTo(&retry)) {
      failure.retry_after_s = retry.retry_delay().seconds() + retry.retry_delay().nanos() / 1e9;
    } else {
      detail.UnpackTo(&failure.facts);
    }
  }
  return failure;
}

v1::Protocol own_protocol() {
  v1::Protocol protocol;
  protocol.set_lowest_version(VERSION);
  protocol.set_highest_version(VERSION);
  protocol.set_software("stagemesh example in C++");
  return protocol;
}

void check_protocol(const std::string& peer, const v1::Protocol& theirs) {
  const uint32_t low = theirs.lowest_version(), high = theirs.highest_version();
  if (low >= 1 && low <= VERSION && high >= VERSION) return;
  const std::string spoken =
      low == 0 ? "no version" : "versions " + std::to_string(low) + " to " + std::to_string(high);
  throw Failure(grpc::FAILED_PRECONDITION, "NO_COMMON_VERSION",
                peer + " speaks " + spoken + " of the protocol, and this program speaks versions 1 to 1: upgrade " +
                    (low > VERSION ? "this program" : peer));
}

std::optional<Failure> unknown_kind(const std::string& sender, const google::protobuf::Message& message) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (unknown.empty()) return std::nullopt;
  const std::string name = message.GetDescriptor()->name(), field = std::to_string(unknown.field(0).number());
  return Failure(grpc::UNIMPLEMENTED, "UNKNOWN_KIND",
                 sender + " sent a " + name + " of an unknown kind (field " + field + "): upgrade this program")
      .within("message", name)
      .within("field", field);
}

}  // namespace stage
