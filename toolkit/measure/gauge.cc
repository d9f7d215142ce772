// SPDX-License-Identifier: Apache-2.0
#include "measure/gauge.hpp"

#include <fmt/format.h>

#include <fstream>

#include "device/telemetry.hpp"
#include "measure/host.hpp"

namespace tessera::measure {
namespace {

class HostGauge : public Gauge {
 public:
    double clock_mhz() const override { return measure::clock_mhz(); }

    std::optional<double> joules() const override {
        constexpr int kMostPackages = 16;
        std::optional<double> sum;
        for (int package = 0; package < kMostPackages; ++package) {
            std::ifstream file(fmt::format("/sys/class/powercap/intel-rapl:{}/energy_uj", package));
            double microjoules = 0;
            if (!(file >> microjoules)) break;
            sum = sum.value_or(0) + microjoules * 1e-6;
        }
        return sum;
    }
};

class GpuGauge : public Gauge {
 public:
    explicit GpuGauge(const Device& device) : telemetry_(device) {}
    double clock_mhz() const override { return telemetry_.clock_mhz(); }
    std::optional<double> joules() const override { return telemetry_.joules(); }

 private:
    device::Telemetry telemetry_;
};

}  // namespace

std::unique_ptr<Gauge> gauge_of(const Device& device) {
    if (device.type == DeviceType::cpu) return std::make_unique<HostGauge>();
    return std::make_unique<GpuGauge>(device);
}

}  // namespace tessera::measure
