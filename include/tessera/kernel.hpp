// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/dtype.hpp"

#pragma GCC visibility push(default)
namespace tessera {

// clang-format off
/// The list of all schedules: row(name) for each. Every other list is made from this one, or loops over kSchedules.
#define TESSERA_SCHEDULES(row)                                                                       \
    row(standard) /* S and P are materialised in memory */                                           \
    row(fa1)      /* K/V blocks outer, Q blocks inner; O, m, l rescaled and written back each step */ \
    row(fa2)      /* Q blocks outer, K/V blocks inner; O stays in fast memory until it is done */    \
    row(fa3)      /* fa2 with producer and consumer warps and asynchronous GEMMs (sm_90a) */
// clang-format on

/// A schedule is the order of the work. All schedules compute the same function.
enum class Schedule : std::uint8_t {
#define TESSERA_ENUMERATOR(name) name,
    TESSERA_SCHEDULES(TESSERA_ENUMERATOR)
#undef TESSERA_ENUMERATOR
};

inline constexpr Schedule kSchedules[] = {
#define TESSERA_VALUE(name) Schedule::name,
    TESSERA_SCHEDULES(TESSERA_VALUE)
#undef TESSERA_VALUE
};

enum class Pass : std::uint8_t { forward, backward };

enum class Backend : std::uint8_t { cpu, cuda, reference };

constexpr const char* name_of(Schedule schedule) {
    constexpr const char* kNames[] = {
#define TESSERA_NAME(name) #name,
        TESSERA_SCHEDULES(TESSERA_NAME)
#undef TESSERA_NAME
    };
    const auto index = static_cast<std::size_t>(schedule);
    return index < std::size(kNames) ? kNames[index] : "?";
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

/// A kernel that plan() can choose. kernels() lists every kernel that is compiled in, in order of preference. The last
/// ones are the reference, which takes every legal Problem.
struct KernelInfo {
    std::string name;  ///< unique and stable: "cpu.fa2.forward"
    Backend backend = Backend::reference;
    Schedule schedule = Schedule::standard;
    Pass pass = Pass::forward;
    std::vector<DType> dtypes;
    std::string summary;  ///< one line: what it does, and its use of memory
    std::string limits;   ///< one line: what it refuses; "none" when it takes every legal Problem of its dtypes
};

/// Every kernel of this build, in order of preference.
std::span<const KernelInfo> kernels();

}  // namespace tessera
#pragma GCC visibility pop
