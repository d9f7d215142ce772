// SPDX-License-Identifier: Apache-2.0
#include "measure/bench.hpp"

#include <vector>

#include "measure/timer.hpp"

namespace tessera::measure {
namespace {

constexpr double kLeastMs = 50;  // energy counters step every few milliseconds

/// Energy and clocks around counted calls.
class Readings {
 public:
    explicit Readings(const Gauge* gauge) : gauge_(gauge) {}

    void before() {
        if (gauge_ != nullptr) begin_ = gauge_->joules();
    }
    void after(double milliseconds) {
        if (gauge_ == nullptr) return;
        clocks_.push_back(gauge_->clock_mhz());
        const auto end = gauge_->joules();
        if (!begin_ || !end || *end < *begin_) known_ = false;  // a counter that wrapped is useless
        else joules_ += *end - *begin_;
        milliseconds_ += milliseconds;
    }
    double clock_mhz() const { return clocks_.empty() ? 0 : summarize(clocks_).median; }
    std::optional<double> watts() const {
        if (gauge_ == nullptr || !known_ || milliseconds_ < kLeastMs) return {};
        return joules_ / (milliseconds_ * 1e-3);
    }

 private:
    const Gauge* gauge_;
    std::optional<double> begin_;
    std::vector<double> clocks_;
    double joules_ = 0;
    double milliseconds_ = 0;
    bool known_ = true;
};

Measurement one_round(const std::function<void()>& call, const std::function<void()>& make_cold, const Method& method,
                      const Gauge* gauge) {
    std::vector<double> milliseconds;
    Readings readings(gauge);
    for (int i = 0; i < method.repeat; ++i) {
        make_cold();
        readings.before();
        const Timer timer;
        const ThreadTimer own;
        call();
        milliseconds.push_back(method.own_time ? own.milliseconds() : timer.milliseconds());
        readings.after(milliseconds.back());
    }
    return {summarize(std::move(milliseconds)), readings.clock_mhz(), readings.watts()};
}

}  // namespace

Measurement time_call(const std::function<void()>& call, const std::function<void()>& make_cold, const Method& method,
                      const Gauge* gauge) {
    const Timer warm_up;
    do call();
    while (warm_up.milliseconds() < method.warm_up_ms);
    Measurement best = one_round(call, make_cold, method, gauge);
    for (int round = 1; round < method.rounds && is_noisy(best.ms.median, best.ms.spread); ++round) {
        Measurement next = one_round(call, make_cold, method, gauge);
        if (next.ms.spread * best.ms.median < best.ms.spread * next.ms.median) best = std::move(next);
    }
    return best;
}

Measurement time_call(const std::function<void()>& call, std::span<const TensorView> operands, ColdCache& cache,
                      const Method& method, const Gauge* gauge) {
    return time_call(
        call, [&] { cache.evict(operands); }, method, gauge);
}

}  // namespace tessera::measure
