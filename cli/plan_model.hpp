// SPDX-License-Identifier: Apache-2.0
//
// Shows the kernels of a whole model's attention (`tessera plan --model`).
#pragma once

#include <string>

#include "options.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Prints which kernel of tessera runs the attention of each group of layers on a machine, in a prefill, a training
/// step and a decode step. `shape` has --batch, --len and --dtype.
void show_plan_of_model(const std::string& file, const model::Machine& machine, const ShapeOptions& shape,
                        bool dtype_given, const Session& session);

}  // namespace tessera::cli
