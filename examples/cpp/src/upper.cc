// A stage that converts text to upper case, for ASCII letters:
//
//     upper --pipeline demo --generation 3f1c... --stage upper --replica upper-0 --listen 127.0.0.1:50051
//
// With `--register HOST:PORT`, it registers at an orchestrator's port for operators and stages.
#include <signal.h>

#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>

#include "function.h"
#include "stage.h"

namespace {

namespace v1 = stagemesh::v1;

// Converts each packet of text to upper case, and emits it `times` times.
class Upper : public stage::Function {
 public:
  Upper() {
    v1::TensorSpec text;
    text.set_name("text");
    text.set_dtype(v1::DATA_TYPE_UINT8);
    text.add_shape("bytes");
    *signature_.add_accepts()->mutable_spec() = text;
    *signature_.add_emits()->mutable_spec() = text;
    signature_.mutable_emits(0)->set_kind(v1::TENSOR_KIND_TEXT);
    v1::OptionSpec& times = *signature_.add_options();
    times.set_name("times");
    times.mutable_default_value()->set_integer(1);
    times.set_minimum(1);
    times.set_maximum(1000);
  }

  const v1::Signature& signature() const override { return signature_; }

  void run(const stage::Task& task) override {
    const int64_t times = task.options.at("times").integer();
    while (std::optional<stage::Packet> packet = task.read()) {
      stage::Packet upper;
      // The rows are repeated, so that other fields, such as the positions of tokens, do not apply to them.
      *upper.fields.mutable_metadata() = packet->fields.metadata();
      for (stage::Tensor& tensor : packet->tensors) {
        for (char& byte : tensor.data) {
          if (byte >= 'a' && byte <= 'z') byte = static_cast<char>(byte - 'a' + 'A');
        }
        upper.tensors.push_back(std::move(tensor));
      }
      for (int64_t time = 0; time < times; ++time) task.emit(upper);
    }
  }

 private:
  v1::Signature signature_;
};

std::string random_name() {
  std::random_device random;
  std::ostringstream name;
  for (int part = 0; part < 4; ++part) name << std::hex << random();
  return name.str();
}

struct Command {
  stage::Identity identity{"", "", "upper", "upper-0", random_name()};
  stage::StageOptions options;
};

// Throws std::runtime_error or std::logic_error if an argument is unknown or has no valid value.
Command parse(int count, char** arguments) {
  Command command;
  const auto milliseconds = [](const std::string& text) { return std::chrono::milliseconds(std::stol(text)); };
  const std::map<std::string, std::function<void(const std::string&)>> known = {
      {"--pipeline", [&](const std::string& value) { command.identity.pipeline = value; }},
      {"--generation", [&](const std::string& value) { command.identity.generation = value; }},
      {"--stage", [&](const std::string& value) { command.identity.stage = value; }},
      {"--replica", [&](const std::string& value) { command.identity.replica = value; }},
      {"--listen", [&](const std::string& value) { command.options.listen = value; }},
      {"--register", [&](const std::string& value) { command.options.orchestrators.push_back(value); }},
      {"--window-bytes", [&](const std::string& value) { command.options.credit.window_bytes = std::stoull(value); }},
      {"--welcome-ms", [&](const std::string& value) { command.options.timeouts.welcome = milliseconds(value); }},
      {"--silence-ms", [&](const std::string& value) { command.options.timeouts.silence = milliseconds(value); }},
      {"--accepting-ms", [&](const std::string& value) { command.options.accepting = milliseconds(value); }},
  };
  for (int index = 1; index < count; index += 2) {
    const auto option = known.find(arguments[index]);
    if (option == known.end() || index + 1 == count) {
      throw std::runtime_error(std::string("unknown or incomplete argument ") + arguments[index]);
    }
    option->second(arguments[index + 1]);
  }
  return command;
}

}  // namespace

int main(int count, char** arguments) {
  // The signals are received below, and by no other thread.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  try {
    const Command command = parse(count, arguments);
    Upper upper;
    stage::Stage stage(command.identity, upper, command.options);
    std::cout << "serving on port " << stage.start() << std::endl;
    int received = 0;
    sigwait(&signals, &received);
    stage.stop();
  } catch (const std::exception& error) {
    std::cerr << "upper: " << error.what() << std::endl;
    return 1;
  }
  return 0;
}
