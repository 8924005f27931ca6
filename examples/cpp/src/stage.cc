#include "stage.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <stdexcept>
#include <utility>

#include "channels.h"

namespace stage {
namespace {

constexpr std::chrono::milliseconds WATCH_INTERVAL{50};
constexpr std::chrono::seconds DRAIN_TIMEOUT{10};
// The ends of the steps and the last replies about their flows are sent within this time.
constexpr std::chrono::milliseconds LAST_MESSAGES{500};

}  // namespace

// Translates calls. gRPC answers UNIMPLEMENTED for the methods that it does not override.
class Stage::Service final : public v1::StageService::Service {
 public:
  explicit Service(Stage& stage) : stage_(stage) {}

  grpc::Status Describe(grpc::ServerContext*, const v1::DescribeRequest* request,
                        v1::DescribeResponse* response) override {
    return answer([&] {
      if (request->has_protocol()) check_protocol("the orchestrator", request->protocol());
      *response = stage_.describe();
      return grpc::Status::OK;
    });
  }

  grpc::Status ExecuteStep(grpc::ServerContext* context, const v1::ExecuteStepRequest* request,
                           grpc::ServerWriter<v1::ExecuteStepResponse>* writer) override {
    return answer([&] { return stage_.steps_.execute(context, *request, writer); });
  }

  grpc::Status CancelStep(grpc::ServerContext*, const v1::CancelStepRequest* request,
                          v1::CancelStepResponse* response) override {
    return answer([&] {
      *response = stage_.steps_.cancel(*request);
      return grpc::Status::OK;
    });
  }

  grpc::Status PutChunk(grpc::ServerContext* context, Consumer::Stream* stream) override {
    return answer([&] { return stage_.consumer_.serve(context, stream); });
  }

 private:
  template <class Call>
  grpc::Status answer(Call&& call) {
    try {
      return call();
    } catch (const Failure& failure) {
      return to_status(failure.within("stage", stage_.identity_.stage));
    } catch (const std::exception& error) {
      return to_status(Failure(grpc::INTERNAL, "INTERNAL", error.what()).within("stage", stage_.identity_.stage));
    }
  }

  Stage& stage_;
};

Stage::Stage(const Identity& identity, Function& function, const StageOptions& options)
    : identity_(identity),
      function_(function),
      options_(options),
      consumer_(identity, function.signature(), options.credit),
      producer_(identity, options.timeouts),
      steps_({identity, function, consumer_, producer_}),
      service_(std::make_shared<Service>(*this)) {}

int Stage::start() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  configure_server(builder);
  int port = 0;
  builder.AddListeningPort(options_.listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(service_.get());
  server_ = builder.BuildAndStart();
  if (!server_ || port == 0) throw std::runtime_error("cannot listen at " + options_.listen);
  watcher_ = std::thread([this] { watch_time(); });
  const std::string endpoint = options_.listen.substr(0, options_.listen.rfind(':') + 1) + std::to_string(port);
  for (const std::string& orchestrator : options_.orchestrators) {
    registrations_.emplace_back(identity_, orchestrator, endpoint);
  }
  return port;
}

void Stage::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_draining_ = true;
  }
  server_->GetHealthCheckService()->SetServingStatus(false);
  registrations_.clear();
  steps_.drain(options_.accepting, DRAIN_TIMEOUT);
  server_->Shutdown(std::chrono::system_clock::now() + LAST_MESSAGES);
  producer_.close();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
  }
  stopped_.notify_all();
  watcher_.join();
}

v1::DescribeResponse Stage::describe() const {
  std::lock_guard<std::mutex> lock(mutex_);
  v1::DescribeResponse response;
  response.set_pipeline(identity_.pipeline);
  response.set_generation(identity_.generation);
  response.set_stage(identity_.stage);
  response.set_replica(identity_.replica);
  response.set_incarnation(identity_.incarnation);
  response.set_engine("cpp");
  response.set_state(is_draining_ ? v1::REPLICA_STATE_DRAINING : v1::REPLICA_STATE_READY);
  *response.mutable_signature() = function_.signature();
  response.add_connectors(v1::CONNECTOR_GRPC);
  *response.mutable_protocol() = own_protocol();
  return response;
}

void Stage::watch_time() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_.wait_for(lock, WATCH_INTERVAL, [this] { return is_stopped_; })) {
    lock.unlock();
    const auto now = Clock::now();
    steps_.check(now);
    consumer_.check(now);
    producer_.check(now);
    lock.lock();
  }
}

}  // namespace stage
