// Checks of a step against the signature. See docs/protocol.md, "A step".
#pragma once

#include <map>
#include <string>

#include "stagemesh/v1/signature.pb.h"
#include "stagemesh/v1/stage.pb.h"

namespace stage {

namespace v1 = stagemesh::v1;

// Throws Failure if a step is malformed, or needs something that the function or this program does not support.
void check_step(const v1::ExecuteStepRequest& request, const v1::Signature& signature);

// Returns the options of a step, with defaults. Throws UNKNOWN_OPTION or INVALID_OPTION.
std::map<std::string, v1::TypedValue> resolve_options(const v1::StageParameters& parameters,
                                                      const v1::Signature& signature);

}  // namespace stage
