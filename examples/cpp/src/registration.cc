#include "registration.h"

#include <algorithm>
#include <iostream>

#include "channels.h"

namespace stage {
namespace {

constexpr std::chrono::milliseconds FIRST_PAUSE{200}, LONGEST_PAUSE{2000}, REFUSED_PAUSE{10000};
// How long the orchestrator may take to end its side of the stream.
constexpr std::chrono::seconds DEREGISTER_TIMEOUT{1};

}  // namespace

Registration::Registration(const Identity& identity, const std::string& orchestrator, const std::string& endpoint)
    : orchestrator_(orchestrator), pause_(FIRST_PAUSE) {
  *replica_.mutable_protocol() = own_protocol();
  replica_.set_pipeline(identity.pipeline);
  replica_.set_generation(identity.generation);
  replica_.set_stage(identity.stage);
  replica_.set_replica(identity.replica);
  replica_.set_incarnation(identity.incarnation);
  replica_.set_endpoint(endpoint);
  stub_ = v1::MembershipService::NewStub(open_channel(orchestrator));
  thread_ = std::thread([this] { run(); });
}

void Registration::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Registration::run() {
  for (;;) {
    const grpc::Status status = serve_stream();
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_stopping_) return;
    changed_.wait_for(lock, pause_after(status), [this] { return is_stopping_; });
    if (is_stopping_) return;
  }
}

grpc::Status Registration::serve_stream() {
  grpc::ClientContext context;
  const auto stream = stub_->Register(&context);
  v1::RegisterRequest request;
  *request.mutable_replica() = replica_;
  has_ended_ = false;
  renew_at_.reset();
  refused_.reset();
  stream->Write(request);
  std::thread reader([&] { read(*stream, context); });
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_over = [this] { return has_ended_ || is_stopping_; };
  while (!is_over()) {
    if (!renew_at_) {
      changed_.wait(lock, [&] { return is_over() || renew_at_; });
    } else if (!changed_.wait_until(lock, *renew_at_, is_over)) {
      renew_at_.reset();
      lock.unlock();
      stream->Write(v1::RegisterRequest());
      lock.lock();
    }
  }
  lock.unlock();
  stream->WritesDone();
  lock.lock();
  changed_.wait_for(lock, DEREGISTER_TIMEOUT, [this] { return has_ended_; });
  lock.unlock();
  context.TryCancel();
  reader.join();
  return stream->Finish();
}

void Registration::read(Stream& stream, grpc::ClientContext& context) {
  v1::RegisterResponse response;
  while (stream.Read(&response)) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      check_protocol(orchestrator_, response.protocol());
    } catch (const Failure& failure) {
      refused_ = failure;
      context.TryCancel();
    }
    pause_ = FIRST_PAUSE;
    renew_at_ = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(response.lease_s() * 1000 / 3));
    changed_.notify_all();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  has_ended_ = true;
  changed_.notify_all();
}

std::chrono::milliseconds Registration::pause_after(const grpc::Status& status) {
  const Failure failure = refused_ ? *refused_ : from_status(status);
  const bool is_temporary = failure.code == grpc::OK || failure.code == grpc::UNAVAILABLE ||
                            failure.code == grpc::DEADLINE_EXCEEDED || failure.reason == "LEASE_ENDED";
  if (!is_temporary) {
    std::cerr << replica_.replica() << " cannot register with " << orchestrator_ << ": " << failure.message << std::endl;
    return REFUSED_PAUSE;
  }
  const auto pause = pause_;
  pause_ = std::min(2 * pause_, LONGEST_PAUSE);
  return pause;
}

}  // namespace stage
