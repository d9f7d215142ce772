// SPDX-License-Identifier: Apache-2.0
#include "llama/linear.hpp"

#include "llama/bf16.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "llama/linear.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace llama::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

HWY_INLINE V load(const float* at) { return hn::LoadU(D(), at); }

HWY_INLINE V load(const std::uint16_t* at) {
    const hn::Rebind<std::uint32_t, D> d32;
    const hn::Rebind<std::uint16_t, D> d16;
    return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, at))));
}

HWY_INLINE float value(const float* at) { return *at; }
HWY_INLINE float value(const std::uint16_t* at) { return from_bf16(*at); }

/// kOutputs rows of the matrix times kRows rows of x. A vector of the matrix is loaded once for all rows of x, a vector
/// of x once for all rows of the matrix.
template <int kOutputs, int kRows, class T>
void block(const T* HWY_RESTRICT w, const float* HWY_RESTRICT x, std::int64_t inputs, float* HWY_RESTRICT y,
           std::int64_t outputs) {
    const D d;
    const auto width = static_cast<std::int64_t>(hn::Lanes(d));
    V sums[kOutputs][kRows];
    for (auto& of_output : sums) {
        for (V& sum : of_output) sum = hn::Zero(d);
    }
    std::int64_t i = 0;
    for (; i + width <= inputs; i += width) {
        V xs[kRows];
        for (int r = 0; r < kRows; ++r) xs[r] = hn::LoadU(d, x + r * inputs + i);
        for (int o = 0; o < kOutputs; ++o) {
            const V ws = load(w + o * inputs + i);
            for (int r = 0; r < kRows; ++r) sums[o][r] = hn::MulAdd(ws, xs[r], sums[o][r]);
        }
    }
    for (int o = 0; o < kOutputs; ++o) {
        for (int r = 0; r < kRows; ++r) {
            float sum = hn::GetLane(hn::SumOfLanes(d, sums[o][r]));
            for (std::int64_t rest = i; rest < inputs; ++rest) {
                sum += value(w + o * inputs + rest) * x[r * inputs + rest];
            }
            y[r * outputs + o] = sum;
        }
    }
}

template <int kOutputs, class T>
void all_rows(const T* w, const float* x, std::int64_t rows, std::int64_t inputs, float* y, std::int64_t outputs) {
    std::int64_t r = 0;
    for (; r + 3 <= rows; r += 3) block<kOutputs, 3>(w, x + r * inputs, inputs, y + r * outputs, outputs);
    for (; r < rows; ++r) block<kOutputs, 1>(w, x + r * inputs, inputs, y + r * outputs, outputs);
}

template <class T>
void some_outputs(const Matrix& m, const float* x, std::int64_t rows, float* y, std::int64_t begin, std::int64_t end) {
    const T* const w = static_cast<const T*>(m.data);
    std::int64_t o = begin;
    for (; o + 4 <= end; o += 4) all_rows<4>(w + o * m.inputs, x, rows, m.inputs, y + o, m.outputs);
    for (; o < end; ++o) all_rows<1>(w + o * m.inputs, x, rows, m.inputs, y + o, m.outputs);
}

void outputs(const Matrix& m, const float* x, std::int64_t rows, float* y, std::int64_t begin, std::int64_t end) {
    if (rows == 0) return;  // x and y may be null
    if (m.dtype == tessera::DType::bf16) {
        some_outputs<std::uint16_t>(m, x, rows, y, begin, end);
    } else {
        some_outputs<float>(m, x, rows, y, begin, end);
    }
}

}  // namespace llama::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace llama {

HWY_EXPORT(outputs);

void linear(const Matrix& matrix, const float* x, std::int64_t rows, float* y, Threads& threads) {
    constexpr std::int64_t kOutputsOfATask = 64;
    const std::int64_t tasks = (matrix.outputs + kOutputsOfATask - 1) / kOutputsOfATask;
    threads.run(tasks, threads.count(), [&](std::int64_t task, int) {
        const std::int64_t begin = task * kOutputsOfATask;
        HWY_DYNAMIC_DISPATCH(outputs)(matrix, x, rows, y, begin, std::min(begin + kOutputsOfATask, matrix.outputs));
    });
}

}  // namespace llama
#endif  // HWY_ONCE
