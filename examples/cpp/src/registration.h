// Keeps this replica registered with an orchestrator. See docs/protocol.md, "Registration".
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "errors.h"
#include "flows.h"
#include "stagemesh/v1/membership.grpc.pb.h"

namespace stage {

class Registration {
 public:
  // `orchestrator` is its address for operators and stages, and `endpoint` is the address of this replica.
  Registration(const Identity& identity, const std::string& orchestrator, const std::string& endpoint);
  ~Registration() { stop(); }

  // Deregisters the replica.
  void stop();

 private:
  using Stream = grpc::ClientReaderWriter<v1::RegisterRequest, v1::RegisterResponse>;

  void run();
  // Registers and renews the lease until the stream ends. Returns its status.
  grpc::Status serve_stream();
  // Reads the answers, which say when the lease is to be renewed.
  void read(Stream& stream, grpc::ClientContext& context);
  // Returns the time until the next registration.
  std::chrono::milliseconds pause_after(const grpc::Status& status);

  const std::string orchestrator_;
  v1::ReplicaIdentity replica_;
  std::unique_ptr<v1::MembershipService::Stub> stub_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_stopping_ = false, has_ended_ = false;
  std::optional<Clock::time_point> renew_at_;
  std::optional<Failure> refused_;
  std::chrono::milliseconds pause_;
  std::thread thread_;
};

}  // namespace stage
