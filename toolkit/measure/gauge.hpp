// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include "tessera/tensor.hpp"

namespace tessera::measure {

/// Reads the clock and the energy of a device while it works, if the device reports them.
class Gauge {
 public:
    virtual ~Gauge() = default;

    /// Current clock in MHz; 0 if unknown.
    virtual double clock_mhz() const = 0;

    /// Energy used since some time in the past; empty if it cannot be read.
    virtual std::optional<double> joules() const = 0;
};

/// Returns the gauge of a device. The host's clock is that of its fastest core (cpufreq, /proc/cpuinfo). Its energy is
/// that of all packages (RAPL, usually readable by root only). A GPU's values come from NVML.
std::unique_ptr<Gauge> gauge_of(const Device& device);

}  // namespace tessera::measure
