// SPDX-License-Identifier: Apache-2.0
//
// The model's machine for the GPU of a trace: a card that the model lists, or the nearest one, scaled by the properties
// that the trace gives.
#pragma once

#include <optional>
#include <string>

#include "diagnose/call.hpp"
#include "model/machine.hpp"

namespace tessera::diagnose {

struct Device {
    std::optional<model::Machine> machine{};  ///< none: nothing can be predicted, and `missing` says why
    double more_error = 0;                    ///< what the distance from a listed card adds to an error bar
    std::string caveat{};                     ///< how the GPU differs from a listed card; empty: it is one
    std::string missing{};
};

Device device_of(const Gpu& gpu);

/// "NVIDIA H200 (sm90, 132 multiprocessors, 139.8 GiB)", as far as it is known; empty: nothing is.
std::string text_of(const Gpu& gpu);

}  // namespace tessera::diagnose
