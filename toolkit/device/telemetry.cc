// SPDX-License-Identifier: Apache-2.0
#include "device/telemetry.hpp"

#include <dlfcn.h>

#if defined(TESSERA_HAS_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace tessera::device {
namespace {

// Declares the used names of NVML's stable C interface, as its manual gives them.
using NvmlDevice = void*;
constexpr int kNvmlSuccess = 0;
constexpr int kNvmlClockSm = 1;

}  // namespace

struct Telemetry::Library {
    void* handle = nullptr;
    NvmlDevice device = nullptr;
    int (*shutdown)() = nullptr;
    int (*clock)(NvmlDevice, int, unsigned int*) = nullptr;
    int (*energy)(NvmlDevice, unsigned long long*) = nullptr;

    ~Library() {
        if (shutdown != nullptr) shutdown();
        if (handle != nullptr) ::dlclose(handle);
    }

    template <class F>
    bool find(F*& function, const char* name) const {
        function = reinterpret_cast<F*>(::dlsym(handle, name));
        return function != nullptr;
    }

    /// Returns false if something is missing; then nothing may be read.
    bool open(const char* bus_id) {
        handle = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) return false;
        int (*init)() = nullptr;
        int (*by_bus)(const char*, NvmlDevice*) = nullptr;
        int (*end)() = nullptr;
        if (!find(init, "nvmlInit_v2") || !find(end, "nvmlShutdown") ||
            !find(by_bus, "nvmlDeviceGetHandleByPciBusId_v2") || init() != kNvmlSuccess) {
            return false;
        }
        shutdown = end;
        find(clock, "nvmlDeviceGetClockInfo");
        find(energy, "nvmlDeviceGetTotalEnergyConsumption");
        return by_bus(bus_id, &device) == kNvmlSuccess;
    }
};

Telemetry::Telemetry([[maybe_unused]] const Device& of) {
#if defined(TESSERA_HAS_CUDA)
    char bus_id[32] = {};
    if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, of.index) != cudaSuccess) {
        cudaGetLastError();
        return;
    }
    library_ = std::make_unique<Library>();
    if (!library_->open(bus_id)) library_.reset();
#endif
}

Telemetry::~Telemetry() = default;

double Telemetry::clock_mhz() const {
    unsigned int mhz = 0;
    if (library_ == nullptr || library_->clock == nullptr) return 0;
    return library_->clock(library_->device, kNvmlClockSm, &mhz) == kNvmlSuccess ? mhz : 0;
}

std::optional<double> Telemetry::joules() const {
    unsigned long long millijoules = 0;
    if (library_ == nullptr || library_->energy == nullptr) return {};
    if (library_->energy(library_->device, &millijoules) != kNvmlSuccess) return {};
    return static_cast<double>(millijoules) * 1e-3;
}

}  // namespace tessera::device
