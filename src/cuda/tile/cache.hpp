// SPDX-License-Identifier: Apache-2.0
//
// The arguments that find the keys of sequences in a cache. Host and device code share them.
#pragma once

#include <cstdint>

#include "cuda/host/divider.hpp"

namespace tessera::cuda {

/// Device addresses, and strides in elements.
struct Cache {
    const std::int32_t* lengths = nullptr;  ///< null: no cache
    const std::int32_t* pages = nullptr;    ///< null: slots
    const std::int32_t* slots = nullptr;    ///< null: sequence b has slot b
    const std::int32_t* padding = nullptr;  ///< null: none
    std::int64_t lengths_step = 0;
    std::int64_t pages_batch = 0;
    std::int64_t pages_step = 0;
    std::int64_t slots_step = 0;
    std::int64_t padding_step = 0;
    std::int64_t count = 0;  ///< slots or pages of the cache
    Divider page_size;
};

}  // namespace tessera::cuda
