// SPDX-License-Identifier: Apache-2.0
//
// Which layers of a config.json have attention, and of which kind.
#pragma once

#include "measure/config_fields.hpp"
#include "measure/model_config.hpp"

namespace tessera::measure {

/// Throws for models whose layers differ in ways that the fields read here do not describe, and for sizes in fields
/// that are not read.
void refuse_unread_layers(const Fields& fields, const ModelConfig& config);

/// Fills in the groups of layers. Throws for a kind of layer that is not known.
void read_layers(const Fields& fields, ModelConfig& config);

}  // namespace tessera::measure
