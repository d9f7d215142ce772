// SPDX-License-Identifier: Apache-2.0
#include "diagnose/slowed_clock.hpp"

#include <algorithm>
#include <cmath>

#include "diagnose/advice.hpp"
#include "diagnose/device.hpp"

namespace tessera::diagnose {

std::optional<SlowedClock> slowed_clock(const Diagnosis& diagnosis, const Call& stated) {
    // Short kernels are mostly start and end; kernels bound by memory do not follow the clock, and have few queries.
    constexpr double kLeastMs = 0.05;
    constexpr std::int64_t kLeastQueries = 128;
    constexpr double kSame = 1.3;  // factors of one clock are within this of each other
    constexpr int kEnough = 2, kMostTried = 16;
    SlowedClock found;
    Gpu gpu;
    for (const AttentionKind& all : diagnosis.kinds) {
        AttentionKind kind = all;
        for (const ShapeSum& shape : all.shapes) {
            kind.shapes = {shape};
            const auto advice = advise(diagnosis, kind, stated);
            if (!advice || advice->by_hand || advice->ran == SdpBackend::math) break;
            const Baseline& baseline = advice->ways.baseline;
            const std::optional<Sizes>& q = advice->shape.call.q.shape;
            if (baseline.source != "measured" || baseline.predicted_ms < kLeastMs) continue;
            if (!baseline.not_modelled.empty()) continue;
            if (!q || q->size() != 4 || (*q)[2] < kLeastQueries) continue;
            const double factor = baseline.ms / baseline.predicted_ms;
            if (factor < 1 + baseline.predicted_error) return std::nullopt;
            found.least = found.kinds == 0 ? factor : std::min(found.least, factor);
            found.most = std::max(found.most, factor);
            gpu = advice->shape.call.gpu;
            if (++found.kinds == kMostTried) break;  // the longest ones
        }
    }
    if (found.kinds < kEnough || found.most > kSame * found.least) return std::nullopt;
    const Device device = device_of(gpu);
    if (!device.machine || !device.caveat.empty()) return std::nullopt;
    found.machine = device.machine->name;
    found.usual_ghz = device.machine->loaded_clock_ghz;
    found.ghz = found.usual_ghz / std::sqrt(found.least * found.most);
    return found;
}

}  // namespace tessera::diagnose
