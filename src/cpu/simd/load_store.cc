// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/numeric.hpp"
#include "cpu/simd/primitives.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/load_store.cc"
#include <hwy/foreach_target.h>  // first: it compiles this file once for each target

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using D16 = hn::Rebind<std::uint16_t, D>;
using D32 = hn::RebindToUnsigned<D>;

constexpr std::int64_t kWidth = static_cast<std::int64_t>(hn::MaxLanes(D()));
// x86 with AVX2 and later converts fp16 in hardware, rounding to nearest even; elsewhere core/numeric.hpp does.
// (Highway numbers its targets from the best down.)
constexpr bool kHardwareFp16 = HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2;

HWY_INLINE V widen(const Bf16* from) {
    const auto bits = hn::PromoteTo(D32(), hn::LoadU(D16(), &from->bits));
    return hn::BitCast(D(), hn::ShiftLeft<16>(bits));
}

HWY_INLINE V widen(const Fp16* from) {
    const D d;
    if constexpr (kHardwareFp16) {
        const hn::Rebind<hwy::float16_t, D> half;
        return hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(from)));
    } else {
        HWY_ALIGN float values[kLanes];
        for (std::int64_t i = 0; i < kWidth; ++i) values[i] = to_float(from[i]);
        return hn::Load(d, values);
    }
}

HWY_INLINE void narrow(V value, float* to) { hn::StoreU(value, D(), to); }

HWY_INLINE void narrow(V value, Bf16* to) {
    const D32 d32;
    const auto bits = hn::BitCast(d32, value);
    // Round to nearest, ties to even: add just under half, and the lowest kept bit.
    const auto lowest = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(d32, 0x7FFF)), lowest));
    const auto quiet_nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40));
    const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
    const auto result = hn::BitCast(hn::RebindToSigned<D>(), hn::IfThenElse(is_nan, quiet_nan, rounded));
    hn::StoreU(hn::DemoteTo(D16(), result), D16(), &to->bits);
}

HWY_INLINE void narrow(V value, Fp16* to) {
    const D d;
    if constexpr (kHardwareFp16) {
        const hn::Rebind<hwy::float16_t, D> half;
        hn::StoreU(hn::DemoteTo(half, value), half, reinterpret_cast<hwy::float16_t*>(to));
    } else {
        HWY_ALIGN float values[kLanes];
        hn::Store(value, d, values);
        for (std::int64_t i = 0; i < kWidth; ++i) to[i] = from_double<Fp16>(values[i]);
    }
}

/// One row of `dim` elements to fp32; vectors take packed ones.
template <class T>
HWY_INLINE void widen_row(const T* from, std::int64_t column_stride, std::int64_t dim, float* to) {
    std::int64_t c = 0;
    if constexpr (std::is_same_v<T, float>) {
        if (column_stride == 1) {
            std::memcpy(to, from, static_cast<std::size_t>(dim) * sizeof(float));
            return;
        }
    } else if constexpr (!std::is_same_v<T, double>) {
        const std::int64_t packed = column_stride == 1 ? dim : 0;
        for (; c + kWidth <= packed; c += kWidth) hn::StoreU(widen(from + c), D(), to + c);
    }
    for (; c < dim; ++c) to[c] = static_cast<float>(to_double(from[c * column_stride]));
}

/// Stores one row times `scale`; the + 0 turns -0 into +0.
template <class T>
HWY_INLINE void narrow_row(const float* from, std::int64_t dim, float scale, T* to, std::int64_t column_stride) {
    const D d;
    std::int64_t c = 0;
    if constexpr (!std::is_same_v<T, double>) {
        const std::int64_t packed = column_stride == 1 ? dim : 0;
        for (; c + kWidth <= packed; c += kWidth)
            narrow(hn::Add(hn::Mul(hn::LoadU(d, from + c), hn::Set(d, scale)), hn::Zero(d)), to + c);
    }
    for (; c < dim; ++c) to[c * column_stride] = from_double<T>(scale * from[c] + 0.0F);
}

void WidenRows(const HeadRows& from, std::int64_t first, std::int64_t rows, std::int64_t dim, float* to,
               std::int64_t stride) {
    visit_floating(from.dtype, [&](auto zero) HWY_ATTR {
        for (std::int64_t r = 0; r < rows; ++r) {
            widen_row(static_cast<const decltype(zero)*>(from.at(first + r, 0)), from.column_stride, dim,
                      to + r * stride);
        }
    });
}

void NarrowRows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim, float scale,
                const HeadRows& to, std::int64_t first) {
    visit_floating(to.dtype, [&](auto zero) HWY_ATTR {
        for (std::int64_t r = 0; r < rows; ++r) {
            narrow_row(from + r * stride, dim, scale, static_cast<decltype(zero)*>(to.at(first + r, 0)),
                       to.column_stride);
        }
    });
}

bool AllFinite(const float* matrix, std::int64_t stride, std::int64_t rows, std::int64_t dim) {
    const D d;
    // x * 0 is 0 for finite x and NaN otherwise, and NaN survives the sum. Four sums hide the latency.
    V sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    const auto add = [&](V& sum, const float* at) HWY_ATTR { sum = hn::MulAdd(hn::LoadU(d, at), hn::Zero(d), sum); };
    float rest = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
        const float* row = matrix + r * stride;
        std::int64_t c = 0;
        for (; c + 4 * kWidth <= dim; c += 4 * kWidth) {
            add(sum0, row + c);
            add(sum1, row + c + kWidth);
            add(sum2, row + c + 2 * kWidth);
            add(sum3, row + c + 3 * kWidth);
        }
        for (; c + kWidth <= dim; c += kWidth) add(sum0, row + c);
        for (; c < dim; ++c) rest += row[c] * 0.0F;
    }
    const V sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
    return rest == 0 && hn::AllTrue(d, hn::Eq(sum, hn::Zero(d)));
}

/// Loads four numbers from every fourth row, one 128-bit block for each.
template <class DW>
HWY_INLINE hn::Vec<DW> load_every_fourth_row(DW dw, const float* at, std::int64_t stride) {
    if constexpr (hn::MaxLanes(DW()) == 4) {
        return hn::LoadU(dw, at);
    } else {
        const hn::Half<DW> half;
        constexpr auto kRows = static_cast<std::int64_t>(hn::MaxLanes(half));
        return hn::Combine(dw, load_every_fourth_row(half, at + kRows * stride, stride),
                           load_every_fourth_row(half, at, stride));
    }
}

/// Transpose() for as many rows as a vector has lanes, and columns a multiple of 4: in each block 4 x 4 numbers.
template <class DW>
HWY_INLINE void transpose_rows(DW dw, const float* from, std::int64_t from_stride, std::int64_t columns,
                               const float* scale, float* to, std::int64_t to_stride) {
    const hn::Repartition<std::uint64_t, DW> pairs;
    const auto zero = hn::Zero(dw);
    for (std::int64_t c = 0; c < columns; c += 4) {
        const auto row0 = load_every_fourth_row(dw, from + c, from_stride);
        const auto row1 = load_every_fourth_row(dw, from + c + from_stride, from_stride);
        const auto row2 = load_every_fourth_row(dw, from + c + 2 * from_stride, from_stride);
        const auto row3 = load_every_fourth_row(dw, from + c + 3 * from_stride, from_stride);
        const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(dw, row0, row1));   // 00 10 01 11
        const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(dw, row2, row3));   // 20 30 21 31
        const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(dw, row0, row1));  // 02 12 03 13
        const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(dw, row2, row3));
        const auto put = [&](std::int64_t column, hn::Vec<decltype(pairs)> x) HWY_ATTR {
            hn::StoreU(hn::Add(hn::Mul(hn::BitCast(dw, x), hn::Set(dw, scale[column])), zero), dw,
                       to + column * to_stride);
        };
        put(c, hn::InterleaveLower(pairs, low01, low23));
        put(c + 1, hn::InterleaveUpper(pairs, low01, low23));
        put(c + 2, hn::InterleaveLower(pairs, high01, high23));
        put(c + 3, hn::InterleaveUpper(pairs, high01, high23));
    }
}

/// to[c, r] = from[r, c] * scale[c] + 0, for [rows, columns]. The + 0 turns -0 into +0.
void Transpose(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, const float* scale,
               float* to, std::int64_t to_stride) {
    const std::int64_t whole_columns = columns / 4 * 4;
    std::int64_t r = 0;
    for (; r + kWidth <= rows; r += kWidth)
        transpose_rows(D(), from + r * from_stride, from_stride, whole_columns, scale, to + r, to_stride);
    for (; r + 4 <= rows; r += 4) {
        transpose_rows(hn::FixedTag<float, 4>(), from + r * from_stride, from_stride, whole_columns, scale, to + r,
                       to_stride);
    }
    const std::int64_t whole_rows = r;
    for (r = 0; r < rows; ++r) {
        for (std::int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
            to[c * to_stride + r] = from[r * from_stride + c] * scale[c] + 0.0F;
        }
    }
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace tessera::cpu::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu::simd {

HWY_EXPORT(WidenRows);
HWY_EXPORT(NarrowRows);
HWY_EXPORT(AllFinite);
HWY_EXPORT(Transpose);
HWY_EXPORT(TargetName);

namespace {

constexpr std::int64_t kMaxDim = 256;   // head_dim and head_dim_v
constexpr std::int64_t kRowGroup = 16;  // rows transposed together: one cache line of a tile row

}  // namespace

std::string target_name() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

bool all_finite(const float* matrix, std::int64_t stride, std::int64_t rows, std::int64_t dim) {
    return HWY_DYNAMIC_DISPATCH(AllFinite)(matrix, stride, rows, dim);
}

void load_rows(const HeadRows& from, std::int64_t first, std::int64_t rows, std::int64_t dim, float* to,
               std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(WidenRows)(from, first, rows, dim, to, stride);
    for (std::int64_t r = 0; r < rows; ++r) std::fill(to + r * stride + dim, to + (r + 1) * stride, 0.0F);
}

void load_transposed(const HeadRows& from, std::int64_t first, std::int64_t rows, std::int64_t dim, float scale,
                     float* to, std::int64_t stride) {
    alignas(64) float group[kRowGroup][kMaxDim];
    alignas(64) float scales[kMaxDim];
    std::fill_n(scales, std::min(kMaxDim, dim), scale);
    for (std::int64_t column = 0; column < dim; column += kMaxDim) {
        const std::int64_t columns = std::min(kMaxDim, dim - column);
        HeadRows part = from;
        part.data = static_cast<char*>(from.at(0, column));
        for (std::int64_t row = 0; row < stride; row += kRowGroup) {
            const std::int64_t present = std::clamp<std::int64_t>(rows - row, 0, kRowGroup);
            HWY_DYNAMIC_DISPATCH(WidenRows)(part, first + row, present, columns, group[0], kMaxDim);
            for (std::int64_t r = present; r < kRowGroup; ++r) std::fill_n(group[r], columns, 0.0F);
            HWY_DYNAMIC_DISPATCH(Transpose)
            (group[0], kMaxDim, kRowGroup, columns, scales, to + column * stride + row, stride);
        }
    }
}

void store_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim, float scale,
                const HeadRows& to, std::int64_t first) {
    HWY_DYNAMIC_DISPATCH(NarrowRows)(from, stride, rows, dim, scale, to, first);
}

void store_transposed(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                      const float* lane_scale, const HeadRows& to, std::int64_t first) {
    alignas(64) float group[kRowGroup][kMaxDim];
    for (std::int64_t row = 0; row < rows; row += kRowGroup) {
        HWY_DYNAMIC_DISPATCH(Transpose)(from + row, stride, dim, kRowGroup, lane_scale + row, group[0], kMaxDim);
        HWY_DYNAMIC_DISPATCH(NarrowRows)
        (group[0], kMaxDim, std::min(kRowGroup, rows - row), dim, 1.0F, to, first + row);
    }
}

}  // namespace tessera::cpu::simd
#endif
