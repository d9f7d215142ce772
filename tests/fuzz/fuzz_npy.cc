// SPDX-License-Identifier: Apache-2.0
// clang++ -fsanitize=fuzzer,address,undefined; run with the folder corpus/npy.
#include <cstddef>
#include <cstdint>
#include <span>

#include "exercise.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    tessera::io::fuzz::exercise_npy(std::as_bytes(std::span(data, size)));
    return 0;
}
