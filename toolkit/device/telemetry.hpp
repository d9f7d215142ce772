// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include "tessera/tensor.hpp"

namespace tessera::device {

/// Clock and energy of a CUDA device, read through the driver's management library (NVML) when it is there. The library
/// is opened at run time: neither building nor running needs it.
class Telemetry {
 public:
    explicit Telemetry(const Device& device);
    ~Telemetry();
    Telemetry(const Telemetry&) = delete;
    Telemetry& operator=(const Telemetry&) = delete;

    /// The clock of the multiprocessors at this moment, in MHz; 0 when it is not known.
    double clock_mhz() const;

    /// Used since the driver was loaded; nothing when the device does not count it.
    std::optional<double> joules() const;

 private:
    struct Library;
    std::unique_ptr<Library> library_;
};

}  // namespace tessera::device
