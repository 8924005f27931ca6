// Serves ExecuteStep and CancelStep: the steps that run here, and those that have ended lately. See docs/protocol.md, "A step".
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "consumer.h"
#include "flows.h"
#include "function.h"
#include "outputs.h"
#include "producer.h"

namespace stage {

// What the steps of a stage have in common.
struct StageParts {
  Identity identity;
  Function& function;
  Consumer& consumer;
  Producer& producer;
};

// One step: a stage's part of a request.
class Step {
 public:
  using Writer = grpc::ServerWriter<v1::ExecuteStepResponse>;

  // Registers the incoming flows. Throws Failure if the step cannot run here. `mutex` guards all steps.
  Step(const v1::ExecuteStepRequest& request, const StageParts& parts, std::mutex& mutex);
  // Waits until the step has ended.
  ~Step();

  // Opens the outgoing flows, and runs the function in a thread.
  void start();
  // Sends a caller all events of the step from the first one on, and then returns the end of the step.
  grpc::Status serve(grpc::ServerContext* context, Writer* writer);

  // -- called with the mutex locked

  // Stops the step. It ends when the function notices.
  void stop(const Failure& failure);
  // Waits until the step has ended.
  void join(std::unique_lock<std::mutex>& lock);
  // Stops a step whose deadline has passed, whose callers have left, or whose consumers no longer read.
  void check(Clock::time_point now);
  bool is_over() const { return end_.has_value(); }
  bool has_caller() const { return callers_ > 0; }
  // Returns whether no caller needs the events of the step any more.
  bool is_forgotten(Clock::time_point now) const;
  uint64_t engine_steps() const { return usage_.engine_steps(); }

  const v1::ExecuteStepRequest request;

 private:
  void run();
  void run_function();
  void emit(const Packet& packet);
  void report(v1::ExecuteStepResponse event);
  v1::StepFinished finished() const;
  void set_deadline(const grpc::ServerContext& context);
  void close_flows(const Failure& failure);
  double elapsed_s() const;

  const StageParts parts_;
  std::mutex& mutex_;
  std::condition_variable changed_;
  std::thread thread_;
  const Clock::time_point accepted_at_ = Clock::now();

  // -- set before the thread runs

  Task task_;
  std::shared_ptr<IncomingFlow> incoming_;
  std::vector<std::shared_ptr<OutgoingFlow>> outgoing_;
  std::map<std::string, OutputStream> outputs_;

  // -- guarded by the mutex

  // A deque, because callers read its events while others are added.
  std::deque<v1::ExecuteStepResponse> events_;
  std::optional<grpc::Status> end_;
  std::optional<Failure> stopped_;
  v1::Usage usage_;
  std::optional<double> first_output_s_;
  int callers_ = 0;
  // When the last caller left, or when the step ended, whichever was later.
  Clock::time_point left_at_ = Clock::now();
  // The latest deadline of the calls, and whether a call had none.
  std::optional<std::chrono::system_clock::time_point> deadline_;
  bool has_no_deadline_ = false;
};

class Steps {
 public:
  explicit Steps(const StageParts& parts) : parts_(parts) {}

  grpc::Status execute(grpc::ServerContext* context, const v1::ExecuteStepRequest& request, Step::Writer* writer);
  v1::CancelStepResponse cancel(const v1::CancelStepRequest& request);

  // Stops steps that nobody follows, and forgets old ones.
  void check(Clock::time_point now);
  // Accepts steps for some more time, and waits until all have ended. Those that take too long continue elsewhere.
  void drain(std::chrono::milliseconds accepting, std::chrono::milliseconds timeout);

 private:
  std::shared_ptr<Step> step_of(const v1::ExecuteStepRequest& request);

  const StageParts parts_;
  // Guards everything below, and the steps.
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Step>> steps_;
  // The highest attempt of each request.
  RecentMap<std::string, uint32_t> attempts_{4096};
  bool is_draining_ = false;
};

}  // namespace stage
