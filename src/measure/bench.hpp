// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <span>

#include "measure/cold_cache.hpp"
#include "measure/statistics.hpp"
#include "tessera/tensor.hpp"

namespace tessera::measure {

/// Times `call` `repeat` times, after one call that is not counted (first use of memory, threads and code). Before
/// each, `make_cold` is called. In milliseconds.
Summary time_call(const std::function<void()>& call, const std::function<void()>& make_cold, int repeat);

/// The same; before each call `operands` leave the caches of the host.
Summary time_call(const std::function<void()>& call, std::span<const TensorView> operands, ColdCache& cache,
                  int repeat);

}  // namespace tessera::measure
