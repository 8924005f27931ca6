// A replica of a stage: the server, and what works in the background.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "consumer.h"
#include "function.h"
#include "producer.h"
#include "registration.h"
#include "steps.h"

namespace stage {

struct StageOptions {
  // The address at which the stage listens, "host:port". Port 0 selects a free one.
  std::string listen = "127.0.0.1:0";
  // The orchestrators' addresses for operators and stages. Empty if their configuration lists the replica.
  std::vector<std::string> orchestrators;
  CreditLimits credit;
  Timeouts timeouts;
  // For how long new steps are accepted while the stage stops, because they may have been planned before.
  std::chrono::milliseconds accepting{2000};
};

// Serves the minimum profile of docs/protocol.md, with CancelStep and registration.
class Stage {
 public:
  Stage(const Identity& identity, Function& function, const StageOptions& options);

  // Begins to serve, and registers. Returns the port. Throws std::runtime_error if the address cannot be used.
  int start();

  // Lets running steps finish, and stops serving.
  void stop();

 private:
  class Service;

  v1::DescribeResponse describe() const;
  // Checks the time limits, until the stage stops.
  void watch_time();

  const Identity identity_;
  Function& function_;
  const StageOptions options_;
  Consumer consumer_;
  Producer producer_;
  Steps steps_;
  std::shared_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::list<Registration> registrations_;
  std::thread watcher_;
  mutable std::mutex mutex_;
  std::condition_variable stopped_;
  bool is_draining_ = false, is_stopped_ = false;
};

}  // namespace stage
