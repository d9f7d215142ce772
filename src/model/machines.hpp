// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

#include "model/machine.hpp"

namespace tessera::model {

std::vector<Machine> gpu_machines();

/// Appends GPUs that share their chip or generation with one of the list.
void add_cards(std::vector<Machine>& list);

std::vector<Machine> cpu_machines();

/// The name of the machine in cpu_machines() that this host is, or null. `host` is the text of measure::text_of(Host):
/// processor, instruction set, matrix unit, cores and last-level cache, all of which must agree.
const char* name_of_host(std::string_view host);

}  // namespace tessera::model
