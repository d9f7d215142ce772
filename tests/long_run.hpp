// SPDX-License-Identifier: Apache-2.0
//
// Runs with `scripts/test.sh --long`: more random cases, and other ones each day.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace tessera {

/// True under `scripts/test.sh --long`, which has time for ten times the random cases.
inline bool long_run() { return std::getenv("TESSERA_LONG") != nullptr; }

/// Returns what a run adds to the seeds of its random cases: the number in `given` (TESSERA_SEED), else the UTC date
/// as yyyymmdd in a long run, else 0.
inline std::uint64_t seed_of_run(const char* given, bool in_long_run, std::time_t now) {
    if (given != nullptr) return std::strtoull(given, nullptr, 10);
    if (!in_long_run) return 0;
    std::tm date{};
    gmtime_r(&now, &date);
    return static_cast<std::uint64_t>((date.tm_year + 1900) * 10000 + (date.tm_mon + 1) * 100 + date.tm_mday);
}

/// Returns the seed of a test's random cases: `fixed` in most runs, so that they check the same cases. Other seeds are
/// printed once, as the TESSERA_SEED that gives them again.
inline std::uint64_t random_seed(std::uint64_t fixed) {
    static const std::uint64_t of_run = [] {
        const std::uint64_t seed = seed_of_run(std::getenv("TESSERA_SEED"), long_run(), std::time(nullptr));
        if (seed != 0) std::printf("random cases of TESSERA_SEED=%" PRIu64 "\n", seed);
        return seed;
    }();
    return fixed + of_run;
}

}  // namespace tessera
