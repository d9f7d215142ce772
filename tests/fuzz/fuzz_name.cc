// SPDX-License-Identifier: Apache-2.0
// clang++ -fsanitize=fuzzer,address,undefined; run with the folder corpus/name.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "exercise_trace.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    tessera::diagnose::fuzz::exercise_name({reinterpret_cast<const char*>(data), size});
    return 0;
}
