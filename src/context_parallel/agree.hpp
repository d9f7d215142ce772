// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/device_rows.hpp"
#include "tessera/context_parallel.hpp"

namespace tessera::ranks {

/// The arguments of a rank: names, and values as text. The name "error" has the text of an error that this rank found,
/// or nothing.
using Fields = std::vector<std::pair<std::string, std::string>>;

/// Returns when all ranks have the same fields. Throws Error(invalid_argument) on every rank that names the field and
/// the ranks, or the rank that refused the call. All ranks have the same names.
void agree(const Fields& fields, Communicator& communicator, DeviceRows& device);

}  // namespace tessera::ranks
