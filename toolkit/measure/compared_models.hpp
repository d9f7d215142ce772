// SPDX-License-Identifier: Apache-2.0
//
// Model types whose number of parameters was compared with transformers.
#pragma once

#include <string_view>

namespace tessera::measure {

/// True if the parameters that ModelConfig counts for the default config.json of this model_type are within 5 % of
/// those of the model that transformers 5.24 makes of it: tools/compare_models.py writes the list.
bool parameters_were_compared(std::string_view model_type);

}  // namespace tessera::measure
