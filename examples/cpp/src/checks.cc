#include "checks.h"

#include <algorithm>
#include <set>
#include <string>

#include "errors.h"
#include "packets.h"

namespace stage {
namespace {

void check_emitted(const std::string& name, const v1::Signature& signature) {
  for (const v1::EmittedTensor& emitted : signature.emits()) {
    if (emitted.spec().name() == name) return;
  }
  throw Failure(grpc::INVALID_ARGUMENT, "UNKNOWN_TENSOR", "this stage does not emit the tensor " + name);
}

// Checks what bindings of incoming and outgoing edges have in common.
template <class Bindings>
void check_bindings(const Bindings& bindings) {
  std::set<std::string> names;
  for (const auto& binding : bindings) {
    if (!names.insert(binding.edge()).second || binding.edge().empty() || binding.attempt() == 0) {
      throw Failure(grpc::INVALID_ARGUMENT, "INVALID_EDGE",
                    "edge " + binding.edge() + " is bound twice, or has no name or no attempt");
    }
    if (!binding.transform().empty()) {
      throw Failure(grpc::NOT_FOUND, "UNKNOWN_TRANSFORM",
                    "edge " + binding.edge() + " needs the unknown transform " + binding.transform());
    }
  }
}

void check_inputs(const v1::ExecuteStepRequest& request, const v1::Signature& signature) {
  if (request.inputs_size() > 1) throw unsupported("several incoming edges");
  check_bindings(request.inputs());
  for (const v1::InputBinding& binding : request.inputs()) {
    if (!binding.producer().empty()) continue;
    throw Failure(grpc::INVALID_ARGUMENT, "INVALID_EDGE", "edge " + binding.edge() + " needs a producer");
  }
  for (const v1::AcceptedTensor& accepted : signature.accepts()) {
    const auto& absent = request.absent();
    const bool is_absent = std::count(absent.begin(), absent.end(), accepted.spec().name()) > 0 || request.inputs().empty();
    if (accepted.optional() || !is_absent) continue;
    throw Failure(grpc::INVALID_ARGUMENT, "MISSING_INPUT", "this stage needs the tensor " + accepted.spec().name());
  }
}

void check_outputs(const v1::ExecuteStepRequest& request, const v1::Signature& signature) {
  check_bindings(request.outputs());
  for (const v1::OutputBinding& binding : request.outputs()) {
    if (binding.consumer().empty() || binding.endpoint().empty()) {
      throw Failure(grpc::INVALID_ARGUMENT, "INVALID_EDGE", "edge " + binding.edge() + " needs a consumer and its endpoint");
    }
    if (binding.connector() != v1::CONNECTOR_GRPC && binding.connector() != v1::CONNECTOR_AUTO) {
      throw Failure(grpc::FAILED_PRECONDITION, "CONNECTOR_UNAVAILABLE",
                    "edge " + binding.edge() + " needs another connector, and this stage has grpc alone")
          .within("edge", binding.edge());
    }
    for (const std::string& name : binding.tensors()) check_emitted(name, signature);
  }
  std::set<std::string> names;
  for (const v1::StreamedOutput& output : request.streamed()) {
    check_emitted(output.tensor(), signature);
    if (!names.insert(output.tensor()).second) throw invalid_request("output " + output.tensor() + " is streamed twice");
    if (output.has_frame_rate()) throw invalid_request("output " + output.tensor() + " has a frame rate, but is not a video");
    if (!output.media_type().empty() || !output.uri().empty()) throw unsupported("outputs as files");
  }
}

// Returns the size by which an option's bounds limit a value: a number itself, or the characters of a text.
double size_of(const v1::TypedValue& value) {
  switch (value.kind_case()) {
    case v1::TypedValue::kInteger: return static_cast<double>(value.integer());
    case v1::TypedValue::kNumber: return value.number();
    case v1::TypedValue::kText: return static_cast<double>(characters(value.text()));
    default: return 0;
  }
}

bool is_allowed(const v1::TypedValue& value, const v1::OptionSpec& option) {
  if (value.kind_case() != option.default_value().kind_case()) return false;
  const double size = size_of(value);
  const auto& texts = option.allowed_texts();
  return !(option.has_minimum() && !(size >= option.minimum())) && !(option.has_maximum() && !(size <= option.maximum())) &&
         (texts.empty() || std::count(texts.begin(), texts.end(), value.text()) > 0);
}

}  // namespace

void check_step(const v1::ExecuteStepRequest& request, const v1::Signature& signature) {
  if (request.request_id().empty() || request.step_id().empty()) {
    throw Failure(grpc::INVALID_ARGUMENT, "INVALID_ID", "a step needs a request_id and a step_id");
  }
  if (request.attempt() == 0) throw invalid_request("attempt must be at least 1");
  const v1::StageParameters& parameters = request.parameters();
  if (auto unknown = unknown_kind("the orchestrator", parameters)) throw *unknown;
  if (parameters.has_sampling()) throw unsupported("sampling parameters");
  if (parameters.has_adapter()) throw unsupported("adapters");
  if (request.has_max_engine_steps() || request.has_resume_from()) throw unsupported("pausing and resuming");
  check_inputs(request, signature);
  check_outputs(request, signature);
}

std::map<std::string, v1::TypedValue> resolve_options(const v1::StageParameters& parameters,
                                                      const v1::Signature& signature) {
  std::map<std::string, v1::TypedValue> options;
  for (const v1::OptionSpec& option : signature.options()) options[option.name()] = option.default_value();
  for (const auto& [name, given] : parameters.options()) {
    const auto& declared = signature.options();
    const auto option = std::find_if(declared.begin(), declared.end(),
                                     [&name = name](const v1::OptionSpec& each) { return each.name() == name; });
    if (option == declared.end()) {
      throw Failure(grpc::INVALID_ARGUMENT, "UNKNOWN_OPTION", "this stage has no option " + name).within("option", name);
    }
    if (auto unknown = unknown_kind("the orchestrator", given)) throw *unknown;
    v1::TypedValue value = given;
    if (given.has_integer() && option->default_value().has_number()) value.set_number(static_cast<double>(given.integer()));
    if (!is_allowed(value, *option)) {
      throw Failure(grpc::INVALID_ARGUMENT, "INVALID_OPTION", name + " cannot be " + given.ShortDebugString())
          .within("option", name);
    }
    options[name] = value;
  }
  return options;
}

}  // namespace stage
