// SPDX-License-Identifier: Apache-2.0
#include "diagnose/ways.hpp"

#include <algorithm>
#include <cmath>

namespace tessera::diagnose {

int Way::effort() const {
    int effort = 0;
    for (const Change& change : cure.changes) effort += change.effort;
    return effort;
}

const Way* Ways::first() const { return !all.empty() && all.front().gain.faster ? &all.front() : nullptr; }

const Way* Ways::further() const {
    const Way* best = first();
    if (best == nullptr) return nullptr;
    for (const Way& way : all) {
        if (!way.gain.faster || way.gain.kernel_ms <= 0) continue;
        const double errors = std::hypot(way.gain.error, best->gain.error);
        if (best->gain.kernel_ms / way.gain.kernel_ms > 1 + errors) return &way;
    }
    return nullptr;
}

Ways ways_of(const Call& call, std::optional<SdpBackend> ran, Pass pass, const Measured& measured,
             const std::vector<Change>& before) {
    Ways ways;
    if (ran) ways.baseline = baseline_of(call, *ran, pass, measured);
    else ways.baseline.source = "nothing runs";
    using enum SdpBackend;
    for (const SdpBackend backend : {cudnn, flash, efficient, fa3, fa4}) {
        if (backend == ran && before.empty()) continue;
        Way way{.cure = cure_for(call, backend)};
        if (way.cure.found) {
            way.cure.changes.insert(way.cure.changes.begin(), before.begin(), before.end());
            way.gain = gain(way.cure.after, backend, pass, ways.baseline, measured);
            const bool drops = std::any_of(way.cure.changes.begin(), way.cure.changes.end(),
                                           [](const Change& change) { return change.name == "drop-mask"; });
            if (drops && way.gain.missing.empty())
                way.gain.caveats.emplace_back(
                    "predicted for a mask that hides nothing: is_causal=True halves the work");
        }
        way.gain.backend = backend;
        ways.all.push_back(std::move(way));
    }
    const auto rank = [](const Way& way) { return way.gain.faster ? 0 : way.cure.found ? 1 : 2; };
    std::stable_sort(ways.all.begin(), ways.all.end(), [&](const Way& a, const Way& b) {
        if (rank(a) != rank(b)) return rank(a) < rank(b);
        if (rank(a) != 0) return false;
        return a.effort() != b.effort() ? a.effort() < b.effort() : a.gain.kernel_ms < b.gain.kernel_ms;
    });
    return ways;
}

}  // namespace tessera::diagnose
