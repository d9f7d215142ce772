// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/dtype.hpp"

namespace tessera {

/// The order of the work. All compute the same function.
enum class Schedule : std::uint8_t {
    standard,  ///< S and P are materialised in memory
    fa1,       ///< K/V blocks outer, Q blocks inner; O, m, l rescaled and written back each outer step
    fa2,       ///< Q blocks outer, K/V blocks inner; O stays in fast memory until it is done
    fa3,       ///< fa2 with producer/consumer warps, ping-pong and asynchronous products (sm_90a)
};

enum class Pass : std::uint8_t { forward, backward };

enum class Backend : std::uint8_t { cpu, cuda, reference };

constexpr const char* name_of(Schedule schedule) {
    switch (schedule) {
        case Schedule::standard: return "standard";
        case Schedule::fa1: return "fa1";
        case Schedule::fa2: return "fa2";
        case Schedule::fa3: return "fa3";
    }
    return "?";
}
constexpr const char* name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }
constexpr const char* name_of(Backend backend) {
    switch (backend) {
        case Backend::cpu: return "cpu";
        case Backend::cuda: return "cuda";
        case Backend::reference: return "reference";
    }
    return "?";
}

/// Extent of one tile: block_q queries x block_kv keys.
struct Tile {
    std::int64_t block_q = 0;
    std::int64_t block_kv = 0;
    friend bool operator==(const Tile&, const Tile&) = default;
};

/// What a kernel is. The kernels that are compiled in are the kernels that can be chosen: kernels() lists them all,
/// in order of preference; the last ones are the reference, which takes every legal Problem.
struct KernelInfo {
    std::string name;  ///< unique and stable: "cpu.fa2.forward"
    Backend backend = Backend::reference;
    Schedule schedule = Schedule::standard;
    Pass pass = Pass::forward;
    std::vector<DType> dtypes;
    std::string summary;  ///< one line: what it does and where its memory goes
    std::string limits;   ///< one line: what it refuses; "none" when it takes every legal Problem of its dtypes
};

/// Every kernel of this build, in order of preference.
std::span<const KernelInfo> kernels();

}  // namespace tessera
