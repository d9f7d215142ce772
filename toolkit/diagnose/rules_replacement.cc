// SPDX-License-Identifier: Apache-2.0
#include "diagnose/rules_tables.hpp"

namespace tessera::diagnose {
namespace {

using checks::kEnd;
constexpr Version k210{2, 10, 0};
constexpr Version k211{2, 11, 0};
constexpr const char* kFa3 = "torch/nn/attention/_fa3.py; wheels 2.11 and 2.15";
constexpr const char* kFa4 = "torch/nn/attention/_fa4.py; wheels 2.10, 2.11 and 2.15";

Fact with_dropout(const Call& c) { return dropout(c) > 0.0; }

constexpr Rule kRules[] = {
    {"fa3-release", SdpBackend::fa3, kFirstRelease, k211, [](const Call&) { return Fact(true); }, "",
     "activate_flash_attention_impl(\"FA3\") came with 2.11", kFa3},
    {"fa3-gpu", SdpBackend::fa3, k211, kEnd, checks::gpu_outside<90, 99>, "FA3 requires compute capability 9.0",
     "FA3 is compiled for Hopper", kFa3},
    {"fa3-dropout", SdpBackend::fa3, k211, kEnd, with_dropout, "dropout_p must be 0", "FA3 has no dropout", kFa3},
    {"fa4-release", SdpBackend::fa4, kFirstRelease, k210, [](const Call&) { return Fact(true); }, "",
     "activate_flash_attention_impl(\"FA4\") came with 2.10", kFa4},
    {"fa4-gpu", SdpBackend::fa4, k210, kEnd, checks::gpu_outside<90, 109>,
     "FA4 requires compute capability 9.0 or 10.0", "FA4 is offered on compute capability 9.x and 10.x", kFa4},
    {"fa4-dropout", SdpBackend::fa4, k210, kEnd, with_dropout, "dropout_p must be 0", "FA4 has no dropout", kFa4},
};

}  // namespace

std::span<const Rule> replacement_rules() { return kRules; }

}  // namespace tessera::diagnose
