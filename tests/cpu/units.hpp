// SPDX-License-Identifier: Apache-2.0
//
// Helpers for tests of the matrix path: each unit of this processor, and aligned memory.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/matrix/primitives.hpp"
#include "printed.hpp"

namespace tessera::cpu::matrix {

class MatrixPrimitives : public testing::TestWithParam<Unit> {
 protected:
    void SetUp() override {
        if (!has_unit(GetParam())) GTEST_SKIP() << "this processor has no such unit";
        set_unit_for_test(GetParam(), true);
        session_ = std::make_unique<Session>(*primitives_of_unit());
    }
    void TearDown() override {
        session_.reset();
        set_unit_for_test(before_, before_fp32_);
    }
    const Primitives& primitives() const { return *primitives_of_unit(); }

 private:
    Unit before_ = unit();
    bool before_fp32_ = packing_pays(DType::fp32);
    std::unique_ptr<Session> session_;
};

inline std::string unit_label(const testing::TestParamInfo<Unit>& info) {
    return info.param == Unit::amx ? "amx" : "dot";
}

/// Elements at an aligned address.
template <class T>
class Array {
 public:
    explicit Array(std::int64_t n, T value = T{}) : memory_(static_cast<std::size_t>(n) + 64, value) {
        const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
        begin_ = memory_.data() + (64 - address % 64) % 64 / sizeof(T);
    }
    operator T*() { return begin_; }

 private:
    std::vector<T> memory_;
    T* begin_;
};

/// While it lives, unit() is this one.
class OnlyUnit {
 public:
    explicit OnlyUnit(Unit chosen) { set_unit_for_test(chosen, true); }
    ~OnlyUnit() { set_unit_for_test(before_, before_fp32_); }
    OnlyUnit(const OnlyUnit&) = delete;
    OnlyUnit& operator=(const OnlyUnit&) = delete;

 private:
    Unit before_ = unit();
    bool before_fp32_ = packing_pays(DType::fp32);
};

}  // namespace tessera::cpu::matrix
