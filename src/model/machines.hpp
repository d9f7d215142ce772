// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "model/machine.hpp"

namespace tessera::model {

std::vector<Machine> gpu_machines();
std::vector<Machine> cpu_machines();

}  // namespace tessera::model
