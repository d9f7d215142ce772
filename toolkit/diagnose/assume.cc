// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "diagnose/rules.hpp"

namespace tessera::diagnose {
namespace {

/// The versions that PyPI's Linux wheel of a release is built for and requires, by its metadata
/// ("nvidia-cudnn-cu13==9.19.0.56").
struct Wheel {
    Version from;
    int cuda;
    int cudnn;
};
constexpr Wheel kWheels[] = {
    {{2, 4, 0}, 12010, 90100},  {{2, 5, 0}, 12040, 90100},  {{2, 7, 0}, 12060, 90501},  {{2, 8, 0}, 12080, 91002},
    {{2, 11, 0}, 13000, 91900}, {{2, 12, 0}, 13000, 92000}, {{2, 14, 0}, 13000, 92400}, {{2, 15, 0}, 13020, 92600},
};

const Wheel* wheel_of(const Version& version) {
    const Wheel* found = nullptr;
    for (const Wheel& wheel : kWheels) {
        if (version >= wheel.from) found = &wheel;
    }
    return found;
}

/// Sets a field that is unset, and adds `words`, which describe the value, to `assumed` unless they are empty.
template <class T>
void set(std::optional<T>& field, const T& value, const std::string& words, std::vector<std::string>& assumed) {
    if (field) return;
    field = value;
    if (!words.empty()) assumed.push_back(words);
}

void assume_layout(Operand& tensor, bool& any) {
    if (tensor.shape && !tensor.strides) {
        tensor.strides = packed_strides(*tensor.shape);
        any = true;
    }
    if (!tensor.storage_offset) tensor.storage_offset = 0;
}

}  // namespace

Call assume_defaults(Call call, std::vector<std::string>& assumed) {
    const bool rocm = call.gpu.rocm == true;
    if (rocm) set(call.prefers_ck, false, "flash is AOTriton's (preferred_rocm_fa_library is not \"ck\")", assumed);
    if (const Wheel* wheel = call.torch && !rocm ? wheel_of(*call.torch) : nullptr) {
        const std::string of =
            fmt::format("the version of PyPI's wheel of {}.{}", call.torch->major, call.torch->minor);
        set(call.cudnn, wheel->cudnn,
            fmt::format("cuDNN {}.{}.{}, {}", wheel->cudnn / 10000, wheel->cudnn / 100 % 100, wheel->cudnn % 100, of),
            assumed);
        set(call.cuda, wheel->cuda, fmt::format("CUDA {}.{}, {}", wheel->cuda / 1000, wheel->cuda / 10 % 100, of),
            assumed);
    }
    set(call.enabled, Enabled{}, "every backend is switched on", assumed);
    set(call.deterministic, false, "deterministic algorithms are off", assumed);
    set(call.dropout, 0.0, "no dropout", assumed);
    set(call.enable_gqa, false, "enable_gqa is off", assumed);
    set(call.nested, false, "", assumed);
    set(call.flash_implementation, FlashImplementation::own,
        rocm ? "" : "flash is PyTorch's own (neither FA3 nor FA4 is active)", assumed);
    bool any = false;
    for (Operand* tensor : {&call.q, &call.k, &call.v, &call.mask}) assume_layout(*tensor, any);
    if (any) assumed.emplace_back("tensors are contiguous");
    return call;
}

}  // namespace tessera::diagnose
