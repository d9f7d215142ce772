// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd/row_products.hpp"

#include <algorithm>

#include "core/numeric.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/row_products.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

#include "cpu/simd/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using ProductD = hn::ScalableTag<float>;
using ProductV = hn::Vec<ProductD>;

HWY_INLINE ProductV load_all(const float* from) { return hn::LoadU(ProductD(), from); }
HWY_INLINE ProductV load_all(const Bf16* from) {
    const hn::RebindToUnsigned<ProductD> words;
    const hn::Rebind<std::uint16_t, ProductD> halves;
    return hn::BitCast(ProductD(), hn::ShiftLeft<16>(hn::PromoteTo(words, hn::LoadU(halves, &from->bits))));
}
/// `count` elements as fp32, and 0 in the lanes after them.
template <class T>
HWY_INLINE ProductV load_some(const T* from, std::int64_t count) {
    T padded_elements[hn::MaxLanes(ProductD())] = {};
    std::copy_n(from, count, padded_elements);
    return load_all(padded_elements);
}

/// kOutputs rows of the matrix times kRows rows of x. Every vector of either is loaded once.
template <int kOutputs, int kRows, class T>
HWY_INLINE void product_block(const T* w, std::int64_t stride, const float* x, std::int64_t inputs, float* y) {
    const ProductD d;
    const auto width = static_cast<std::int64_t>(hn::Lanes(d));
    ProductV sums[kOutputs][kRows];
    TESSERA_UNROLL for (int o = 0; o < kOutputs; ++o) {
        TESSERA_UNROLL for (int r = 0; r < kRows; ++r) sums[o][r] = hn::Zero(d);
    }
    const auto add = [&](const auto& load, std::int64_t i) HWY_ATTR {
        ProductV of_x[kRows];
        TESSERA_UNROLL for (int r = 0; r < kRows; ++r) of_x[r] = load(x + r * inputs + i);
        TESSERA_UNROLL for (int o = 0; o < kOutputs; ++o) {
            const ProductV of_w = load(w + o * stride + i);
            TESSERA_UNROLL for (int r = 0; r < kRows; ++r) sums[o][r] = hn::MulAdd(of_w, of_x[r], sums[o][r]);
        }
    };
    std::int64_t i = 0;
    for (; i + width <= inputs; i += width) add([](const auto* from) HWY_ATTR { return load_all(from); }, i);
    if (i < inputs) {
        const std::int64_t rest = inputs - i;
        add([rest](const auto* from) HWY_ATTR { return load_some(from, rest); }, i);
    }
    TESSERA_UNROLL for (int o = 0; o < kOutputs; ++o) {
        TESSERA_UNROLL for (int r = 0; r < kRows; ++r) y[o * kProductRows + r] =
            hn::GetLane(hn::SumOfLanes(d, sums[o][r]));
    }
}

template <int kOutputs, class T>
HWY_INLINE void product_rows(const T* w, std::int64_t stride, const float* x, std::int64_t rows, std::int64_t inputs,
                             float* y) {
    std::int64_t r = 0;
    for (; r + 2 <= rows; r += 2) product_block<kOutputs, 2>(w, stride, x + r * inputs, inputs, y + r);
    if (r < rows) product_block<kOutputs, 1>(w, stride, x + r * inputs, inputs, y + r);
}

template <class T>
HWY_INLINE void product_outputs(const MatrixRows& m, std::int64_t first, std::int64_t outputs, const float* x,
                                std::int64_t rows, std::int64_t inputs, float* y) {
    const T* w = static_cast<const T*>(m.data) + first * m.stride;
    std::int64_t o = 0;
    for (; o + 4 <= outputs; o += 4) product_rows<4>(w + o * m.stride, m.stride, x, rows, inputs, y + o * kProductRows);
    for (; o < outputs; ++o) product_rows<1>(w + o * m.stride, m.stride, x, rows, inputs, y + o * kProductRows);
}

void RowProducts(const MatrixRows& w, std::int64_t first, std::int64_t outputs, const float* x, std::int64_t rows,
                 std::int64_t inputs, float* y) {
    if (w.dtype == DType::bf16) product_outputs<Bf16>(w, first, outputs, x, rows, inputs, y);
    else product_outputs<float>(w, first, outputs, x, rows, inputs, y);
}

}  // namespace tessera::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::simd {

HWY_EXPORT(RowProducts);

void row_products(const MatrixRows& w, std::int64_t first, std::int64_t outputs, const float* x, std::int64_t rows,
                  std::int64_t inputs, float* y) {
    HWY_DYNAMIC_DISPATCH(RowProducts)(w, first, outputs, x, rows, inputs, y);
}

}  // namespace tessera::cpu::simd
#endif
