// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include "tessera/tensor.hpp"

namespace tessera::measure {

/// What a device tells about itself while it works, as far as it does.
class Gauge {
 public:
    virtual ~Gauge() = default;

    /// At this moment, in MHz; 0 when nothing tells.
    virtual double clock_mhz() const = 0;

    /// Energy used since some time in the past; nothing when it can't be read.
    virtual std::optional<double> joules() const = 0;
};

/// The host's clock is that of its fastest core (cpufreq, /proc/cpuinfo), its energy that of all packages (RAPL, which
/// usually root alone may read). A GPU's come from NVML.
std::unique_ptr<Gauge> gauge_of(const Device& device);

}  // namespace tessera::measure
