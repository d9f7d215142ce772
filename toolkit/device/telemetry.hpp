// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include "tessera/tensor.hpp"

namespace tessera::device {

/// Reads the clock and energy of a CUDA device through the driver's management library (NVML), if present. The library
/// is opened at run time: neither building nor running needs it.
class Telemetry {
 public:
    explicit Telemetry(const Device& device);
    ~Telemetry();
    Telemetry(const Telemetry&) = delete;
    Telemetry& operator=(const Telemetry&) = delete;

    /// Current clock of the multiprocessors in MHz; 0 if unknown.
    double clock_mhz() const;

    /// Energy used since the driver was loaded; empty if the device does not count it.
    std::optional<double> joules() const;

 private:
    struct Library;
    std::unique_ptr<Library> library_;
};

}  // namespace tessera::device
