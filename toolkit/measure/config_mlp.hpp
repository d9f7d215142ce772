// SPDX-License-Identifier: Apache-2.0
//
// The MLP of a model, from its config.json.
#pragma once

#include "measure/config_fields.hpp"
#include "measure/model_config.hpp"

namespace tessera::measure {

/// Reads the widths of the MLPs, their number of matrices, and the experts. Throws Error(bad_data) naming the field.
void read_mlp(const Fields& fields, ModelConfig& config);

}  // namespace tessera::measure
