#include "steps.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <utility>

#include "checks.h"

namespace stage {
namespace {

// gRPC's synchronous API does not report that a caller has left. It is asked in this interval.
constexpr std::chrono::milliseconds POLL{20};
constexpr std::chrono::seconds WITHOUT_CALLER{5};
constexpr std::chrono::seconds RETAINED{30};
constexpr std::chrono::seconds CANCEL_TIMEOUT{5};

// Returns whether two requests are calls of the same step.
bool have_same_content(v1::ExecuteStepRequest one, v1::ExecuteStepRequest other) {
  for (v1::ExecuteStepRequest* request : {&one, &other}) {
    request->clear_attach_only();
    request->clear_lowest_attempt();
    request->clear_traceparent();
  }
  // Maps have no order, so that messages are compared, and not their bytes.
  return google::protobuf::util::MessageDifferencer::Equals(one, other);
}

v1::EdgeKey key_of(const std::string& request_id, const std::string& edge, uint32_t attempt) {
  v1::EdgeKey key;
  key.set_request_id(request_id);
  key.set_edge(edge);
  key.set_attempt(attempt);
  return key;
}

}  // namespace

Step::Step(const v1::ExecuteStepRequest& given, const StageParts& parts, std::mutex& mutex)
    : request(given), parts_(parts), mutex_(mutex), task_{request, {}, {}, {}} {
  const v1::Signature& signature = parts.function.signature();
  check_step(request, signature);
  task_.options = resolve_options(request.parameters(), signature);
  task_.read = [this] { return incoming_ ? incoming_->read() : std::nullopt; };
  task_.emit = [this](const Packet& packet) { emit(packet); };
  for (const v1::OutputBinding& binding : request.outputs()) Chunker{binding};  // throws if the policy is unknown
  for (const v1::EmittedTensor& emitted : signature.emits()) {
    for (const v1::StreamedOutput& output : request.streamed()) {
      if (output.tensor() == emitted.spec().name()) outputs_.emplace(output.tensor(), emitted);
    }
  }
  for (const v1::InputBinding& binding : request.inputs()) {
    incoming_ = parts.consumer.expect(key_of(request.request_id(), binding.edge(), binding.attempt()), binding.producer());
  }
}

Step::~Step() {
  if (thread_.joinable()) thread_.join();
}

void Step::start() {
  for (const v1::OutputBinding& binding : request.outputs()) {
    outgoing_.push_back(
        parts_.producer.open(key_of(request.request_id(), binding.edge(), binding.attempt()), binding));
  }
  v1::ExecuteStepResponse accepted;
  accepted.mutable_accepted();
  events_.push_back(std::move(accepted));
  thread_ = std::thread([this] { run(); });
}

void Step::run() {
  std::optional<Failure> failure;
  try {
    run_function();
  } catch (const Failure& caught) {
    failure = caught;
  } catch (const std::exception& caught) {
    failure = Failure(grpc::INTERNAL, "INTERNAL", caught.what());
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (failure && stopped_) failure = stopped_;
  if (failure) failure = failure->within("stage", parts_.identity.stage);
  v1::ExecuteStepResponse event;
  if (failure) *event.mutable_usage() = usage_;
  else *event.mutable_finished() = finished();
  events_.push_back(std::move(event));
  end_ = failure ? to_status(*failure) : grpc::Status::OK;
  left_at_ = Clock::now();
  changed_.notify_all();
  if (failure) close_flows(*failure);
}

void Step::run_function() {
  parts_.function.run(task_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) throw *stopped_;
  }
  for (auto& [name, output] : outputs_) {
    for (v1::Output& part : output.finish()) {
      v1::ExecuteStepResponse event;
      event.mutable_output()->Swap(&part);
      report(std::move(event));
    }
  }
  for (const auto& flow : outgoing_) flow->finish();
  // If the function ended before its input, a rejection of the rest would fail the producer and the request.
  while (task_.read()) {
  }
}

void Step::emit(const Packet& packet) {
  for (const Tensor& tensor : packet.tensors) {
    const auto output = outputs_.find(tensor.name);
    if (output == outputs_.end()) continue;
    for (v1::Output& part : output->second.add(tensor)) {
      v1::ExecuteStepResponse event;
      event.mutable_output()->Swap(&part);
      report(std::move(event));
    }
  }
  v1::ExecuteStepResponse event;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) throw *stopped_;
    if (!first_output_s_) first_output_s_ = elapsed_s();
    usage_.set_engine_steps(usage_.engine_steps() + 1);
    event.mutable_progress()->set_engine_steps(usage_.engine_steps());
  }
  report(std::move(event));
  for (const auto& flow : outgoing_) flow->send(packet);
}

void Step::report(v1::ExecuteStepResponse event) {
  std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(std::move(event));
  changed_.notify_all();
}

v1::StepFinished Step::finished() const {
  v1::StepFinished finished;
  *finished.mutable_usage() = usage_;
  finished.mutable_timings()->set_started_s(0);
  if (first_output_s_) finished.mutable_timings()->set_first_output_s(*first_output_s_);
  finished.mutable_timings()->set_finished_s(elapsed_s());
  for (const auto& flow : outgoing_) *finished.add_edges() = flow->usage();
  finished.mutable_finish()->set_reason(v1::FINISH_REASON_END);
  return finished;
}

grpc::Status Step::serve(grpc::ServerContext* context, Writer* writer) {
  std::unique_lock<std::mutex> lock(mutex_);
  set_deadline(*context);
  ++callers_;
  size_t sent = 0;
  bool is_connected = true;
  while (is_connected && !(end_ && sent == events_.size())) {
    if (sent < events_.size()) {
      const v1::ExecuteStepResponse& event = events_[sent++];
      lock.unlock();
      is_connected = writer->Write(event);
      lock.lock();
    } else {
      changed_.wait_for(lock, POLL);
      is_connected = !context->IsCancelled();
    }
  }
  --callers_;
  left_at_ = Clock::now();
  return is_connected ? *end_ : grpc::Status::CANCELLED;
}

void Step::set_deadline(const grpc::ServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) has_no_deadline_ = true;
  deadline_ = std::max(deadline_.value_or(deadline), deadline);
}

void Step::stop(const Failure& failure) {
  if (stopped_ || end_) return;
  stopped_ = failure;
  close_flows(failure);
}

void Step::join(std::unique_lock<std::mutex>& lock) {
  changed_.wait_for(lock, CANCEL_TIMEOUT, [this] { return is_over(); });
}

void Step::check(Clock::time_point now) {
  if (!has_no_deadline_ && deadline_ && std::chrono::system_clock::now() > *deadline_) {
    stop({grpc::DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline of the step has passed"});
  } else if (callers_ == 0 && now - left_at_ > WITHOUT_CALLER) {
    stop({grpc::CANCELLED, "CALLER_DISCONNECTED", "every caller of the step has left"});
  }
  // The function may wait for packets, and would notice this only when it emits one.
  for (const auto& flow : outgoing_) {
    if (const auto error = flow->error(); error && !is_over()) stop(*error);
  }
}

bool Step::is_forgotten(Clock::time_point now) const { return is_over() && callers_ == 0 && now - left_at_ > RETAINED; }

void Step::close_flows(const Failure& failure) {
  if (incoming_) incoming_->close(failure);
  for (const auto& flow : outgoing_) flow->abort(failure);
}

double Step::elapsed_s() const { return std::chrono::duration<double>(Clock::now() - accepted_at_).count(); }

// -- all steps

grpc::Status Steps::execute(grpc::ServerContext* context, const v1::ExecuteStepRequest& request, Step::Writer* writer) {
  return step_of(request)->serve(context, writer);
}

// Returns the step of a request, which is started unless it is known.
std::shared_ptr<Step> Steps::step_of(const v1::ExecuteStepRequest& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t* known_attempt = attempts_.find(request.request_id());
  const uint32_t highest = known_attempt ? *known_attempt : 0;
  if (request.attempt() < highest) {
    throw Failure(grpc::FAILED_PRECONDITION, "STALE_ATTEMPT", "attempt " + std::to_string(request.attempt()) + " of " +
                                                                  request.request_id() + " was replaced")
        .with_attempt(highest);
  }
  const auto known = steps_.find(request.step_id());
  if (known != steps_.end()) {
    if (have_same_content(known->second->request, request)) return known->second;
    throw Failure(grpc::ALREADY_EXISTS, "STEP_EXISTS", "step " + request.step_id() + " exists with other content")
        .with_attempt(highest);
  }
  if (request.attach_only()) {
    throw Failure(grpc::NOT_FOUND, "UNKNOWN_STEP",
                  "step " + request.step_id() + " was not started here, or has ended long ago");
  }
  if (is_draining_) {
    throw Failure(grpc::FAILED_PRECONDITION, "NOT_READY", "replica " + parts_.identity.replica + " stops");
  }
  const auto step = std::make_shared<Step>(request, parts_, mutex_);
  attempts_.set(request.request_id(), request.attempt());
  for (const auto& [id, other] : steps_) {
    if (other->request.request_id() != request.request_id() || other->request.attempt() >= request.attempt()) continue;
    const std::string message = "attempt " + std::to_string(request.attempt()) + " replaces this one";
    other->stop(Failure(grpc::FAILED_PRECONDITION, "STALE_ATTEMPT", message).with_attempt(request.attempt()));
  }
  steps_[request.step_id()] = step;
  step->start();
  return step;
}

v1::CancelStepResponse Steps::cancel(const v1::CancelStepRequest& request) {
  // The calls that the caller has ended are noticed within this time.
  if (request.when_left()) std::this_thread::sleep_for(2 * POLL);
  std::unique_lock<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Step>> cancelled;
  for (const auto& [id, step] : steps_) {
    const bool is_meant = step->request.request_id() == request.request_id() && !step->is_over() &&
                          (!request.has_attempt() || step->request.attempt() <= request.attempt()) &&
                          !(request.when_left() && step->has_caller());
    if (is_meant) cancelled.push_back(step);
  }
  const std::string reason = request.reason().empty() ? "the request was cancelled" : request.reason();
  for (const auto& step : cancelled) step->stop({grpc::CANCELLED, "CANCELLED", reason});
  v1::CancelStepResponse response;
  uint64_t engine_steps = 0;
  for (const auto& step : cancelled) {
    step->join(lock);
    engine_steps += step->engine_steps();
  }
  response.set_stopped(static_cast<uint32_t>(cancelled.size()));
  response.mutable_usage()->set_engine_steps(engine_steps);
  return response;
}

void Steps::check(Clock::time_point now) {
  std::vector<std::shared_ptr<Step>> forgotten;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto step = steps_.begin(); step != steps_.end();) {
    step->second->check(now);
    const bool is_forgotten = step->second->is_forgotten(now);
    if (is_forgotten) forgotten.push_back(step->second);
    step = is_forgotten ? steps_.erase(step) : std::next(step);
  }
}

void Steps::drain(std::chrono::milliseconds accepting, std::chrono::milliseconds timeout) {
  const auto start = Clock::now();
  const auto is_over = [](const auto& entry) { return entry.second->is_over(); };
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    const auto elapsed = Clock::now() - start;
    is_draining_ = elapsed >= accepting;
    if (elapsed >= timeout || (is_draining_ && std::all_of(steps_.begin(), steps_.end(), is_over))) break;
    lock.unlock();
    std::this_thread::sleep_for(POLL);
    lock.lock();
  }
  is_draining_ = true;
  std::vector<std::shared_ptr<Step>> left;
  for (const auto& [id, step] : steps_) left.push_back(step);
  for (const auto& step : left) {
    step->stop({grpc::UNAVAILABLE, "DRAINED", "replica " + parts_.identity.replica + " was stopped"});
  }
  for (const auto& step : left) step->join(lock);
}

}  // namespace stage
