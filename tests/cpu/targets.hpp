// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cpu {

/// Instruction sets that were compiled in and that this processor has, best first; up to TESSERA_MAX_ISA.
inline std::vector<std::int64_t> usable_targets() {
    std::vector<std::int64_t> targets;
    hwy::SetSupportedTargetsForTest(0);
    for (std::int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1)
        targets.push_back(rest & -rest);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());  // the reset drops the limit
    return targets;
}

/// While it lives, the tile primitives run on one instruction set only.
class OnlyTarget {
 public:
    explicit OnlyTarget(std::int64_t target) {
        hwy::SetSupportedTargetsForTest(target);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }
    ~OnlyTarget() {
        hwy::SetSupportedTargetsForTest(0);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }
    OnlyTarget(const OnlyTarget&) = delete;
    OnlyTarget& operator=(const OnlyTarget&) = delete;
};

/// A test that runs once per instruction set.
class EachTarget : public testing::TestWithParam<std::int64_t> {
 protected:
    OnlyTarget only_{GetParam()};
};

inline std::string target_label(const testing::TestParamInfo<std::int64_t>& info) {
    return hwy::TargetName(info.param);
}

}  // namespace tessera::cpu
