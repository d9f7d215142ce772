// SPDX-License-Identifier: Apache-2.0
//
// Accesses to rows of the caller's tensors that are never packed: storing results, and row sums of products. Included
// inside the namespace and the target attributes of a unit's file, after pack-inl.hpp.

/// The even and the odd elements of a vector of bf16, as fp32.
inline __m512 even_of(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline __m512 odd_of(__m512i x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))));
}

inline void row_dots(const HeadRows& a, const HeadRows& b, std::int64_t first, std::int64_t rows, std::int64_t dim,
                     float* sums) {
    // Loads 32 elements as fp32, in one order for both operands.
    const auto load = [&](const HeadRows& x, std::int64_t row, std::int64_t c, __m512(&to)[2]) {
        if (x.dtype == DType::fp32) {
            for (int i = 0; i < 2; ++i) {
                const auto* at = static_cast<const float*>(x.at(first + row, c + 16 * i));
                to[i] = _mm512_castsi512_ps(load_words(at, x.column_stride, dim - c - 16 * i));
            }
        } else {
            const __m512i words = load_words(static_cast<const Bf16*>(x.at(first + row, c)), x.column_stride, dim - c);
            to[0] = even_of(words);
            to[1] = odd_of(words);
        }
    };
    for (std::int64_t row = 0; row < rows; ++row) {
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (std::int64_t c = 0; c < dim; c += 32) {
            __m512 x[2];
            __m512 y[2];
            load(a, row, c, x);
            load(b, row, c, y);
            for (int i = 0; i < 2; ++i) sum[i] = _mm512_fmadd_ps(x[i], y[i], sum[i]);
        }
        sums[row] = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
    }
}

/// Loads 16 columns of O^T from `column` on for 16 rows, as 16 vectors of one row each.
inline void scaled_rows(const float* from, std::int64_t stride, std::int64_t column, __m512 scale, __m512i (&x)[16]) {
    for (int c = 0; c < 16; ++c) {
        const __m512 values = _mm512_mul_ps(_mm512_loadu_ps(from + (column + c) * stride), scale);
        x[c] = _mm512_castps_si512(_mm512_add_ps(values, _mm512_setzero_ps()));  // + 0: -0 becomes 0
    }
    transpose(x);
}

/// Rounds x to bf16, to nearest, ties to even. The conversion instruction would flush subnormal results to 0, which
/// other writers of these tensors do not.
inline __m256i narrow_to_bf16(__m512 x) {
    const __m512i all = _mm512_castps_si512(x);
    const __m512i upper = _mm512_srli_epi32(all, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, quiet));
}

/// Stores the first elements of x, those in `inside`, in bf16 or fp32.
inline void store_row(const HeadRows& to, std::int64_t row, std::int64_t column, __m512 x, __mmask16 inside) {
    void* at = to.at(row, column);
    if (to.dtype == DType::fp32 && to.column_stride == 1) return _mm512_mask_storeu_ps(at, inside, x);
    if (to.dtype == DType::fp32) {
        alignas(64) float values[16];
        _mm512_store_ps(values, x);
        for (int c = 0; c < 16 && (inside >> c & 1) != 0; ++c)
            static_cast<float*>(at)[c * to.column_stride] = values[c];
        return;
    }
    const __m256i bits16 = narrow_to_bf16(x);
    if (to.column_stride == 1) return _mm256_mask_storeu_epi16(at, inside, bits16);
    alignas(32) std::uint16_t values[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), bits16);
    for (int c = 0; c < 16 && (inside >> c & 1) != 0; ++c) {
        static_cast<std::uint16_t*>(at)[c * to.column_stride] = values[c];
    }
}

inline bool store_columns(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                          const float* lane_scale, const HeadRows& to, std::int64_t first) {
    const __m512i exponent = _mm512_set1_epi32(0x7F800000);
    __mmask16 special = 0;
    for (std::int64_t row = 0; row < rows; row += 16) {
        const __m512 scale = _mm512_loadu_ps(lane_scale + row);
        const std::int64_t present = rows - row < 16 ? rows - row : 16;
        for (std::int64_t column = 0; column < dim; column += 16) {
            __m512i x[16];
            scaled_rows(from + row, stride, column, scale, x);
            const auto inside = static_cast<__mmask16>(first_elements(dim - column));
            for (std::int64_t r = 0; r < present; ++r) {
                special |= _mm512_mask_cmpeq_epi32_mask(inside, _mm512_and_si512(x[r], exponent), exponent);
                store_row(to, first + row + r, column, _mm512_castsi512_ps(x[r]), inside);
            }
        }
    }
    return special == 0;
}
