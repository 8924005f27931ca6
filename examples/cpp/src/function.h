// What a stage computes. Write a class like Upper in upper.cc for your own model.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "packets.h"
#include "stagemesh/v1/signature.pb.h"
#include "stagemesh/v1/stage.pb.h"

namespace stage {

// A request, as a function sees it.
struct Task {
  // Has the seed, and the client's input if no edge enters the stage.
  const v1::ExecuteStepRequest& request;
  // All options of the signature, with their defaults.
  std::map<std::string, v1::TypedValue> options;
  // Returns the next packet of the edge that enters the stage, and nothing after the last one.
  std::function<std::optional<Packet>()> read;
  // Sends a packet over the edges that leave the stage, and to the client. Waits for the credit of the consumers.
  std::function<void(const Packet&)> emit;
};

class Function {
 public:
  virtual ~Function() = default;

  // What the stage accepts and emits, and its options. Equals the signature in the pipeline file.
  virtual const v1::Signature& signature() const = 0;

  // Processes one request. The same packets, options and seed must yield the same bytes, because a request may be repeated
  // elsewhere. Runs in a thread of its own for each request. `read` and `emit` throw Failure when the request is stopped.
  virtual void run(const Task& task) = 0;
};

}  // namespace stage
