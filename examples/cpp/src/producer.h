// Sends the flows of the edges that leave this stage: one connection to each consumer. See docs/protocol.md, "The producer".
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "flows.h"
#include "outgoing.h"
#include "stagemesh/v1/stage.grpc.pb.h"

namespace stage {

class ConsumerLink;

class Producer {
 public:
  Producer(const Identity& identity, const Timeouts& timeouts);
  ~Producer();

  // Creates a flow to the consumer of a binding, and opens it as soon as the consumer can be reached.
  std::shared_ptr<OutgoingFlow> open(const v1::EdgeKey& key, const v1::OutputBinding& binding);

  // Opens silent flows again, ends connections that were made in vain, and forgets those without flows.
  void check(Clock::time_point now);

  // Ends all connections, and fails the flows that are left.
  void close();

 private:
  const Identity identity_;
  const Timeouts timeouts_;
  // Guards everything below, the links and the flows.
  std::mutex mutex_;
  std::list<std::shared_ptr<ConsumerLink>> links_;
};

}  // namespace stage
