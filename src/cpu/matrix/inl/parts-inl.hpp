// SPDX-License-Identifier: Apache-2.0
//
// Conversion of fp32 vectors to rows of bf16 tiles, in one part or in three. Included inside the namespace and the
// target attributes of a unit's file (amx.cc, dot.cc).

/// While one exists, results under the smallest normal number are flushed to 0. A subnormal part would take a hundred
/// cycles to make, and the unit would read it as 0 anyway.
class FlushSubnormal {
 public:
    FlushSubnormal() { _mm_setcsr(before_ | 0x8040); }
    ~FlushSubnormal() { _mm_setcsr(before_); }
    FlushSubnormal(const FlushSubnormal&) = delete;
    FlushSubnormal& operator=(const FlushSubnormal&) = delete;

 private:
    unsigned before_ = _mm_getcsr();
};

/// Splits x into parts by truncation: 8 bits each, the last exactly the remainder. Unlike rounding, truncation keeps
/// NaN and infinity.
inline void cut(__m512 x, __m512 (&parts)[3]) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
    for (int part = 0; part < 2; ++part) {
        parts[part] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), upper));
        x = _mm512_sub_ps(x, parts[part]);
    }
    parts[2] = x;
}

/// Splits x into parts by rounding, ties away from 0; the last part is the exact remainder. Unlike truncation, it makes
/// products of the smaller parts smaller, and of both signs.
inline void round_off(__m512 x, __m512 (&parts)[3]) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
    for (int part = 0; part < 2; ++part) {
        const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        parts[part] = _mm512_castsi512_ps(_mm512_and_si512(up, upper));
        x = _mm512_sub_ps(x, parts[part]);
    }
    parts[2] = x;
}

inline __m512bh from_bits(__m512i x) {
    __m512bh y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline __m512i bits(__m512bh x) {
    __m512i y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

/// Pairs the upper halves of 32-bit words, those of `even` first.
inline __m512i pairs_of_upper_halves(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(even, 16), odd);
}
inline __m512i pairs_of_lower_halves(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, even, _mm512_slli_epi32(odd, 16));
}

/// A pair tile's row: per lane, bf16 of `even` and of `odd` beside each other. Rounds to nearest, ties away from 0, in
/// four operations. The conversion instruction and a shuffle take longer (0.15 ns of 2.4 for a vector of weights,
/// measured on a Xeon with AMX, 2026-11). A NaN whose bits are nearly all ones becomes 0, so the store of the sums must
/// check the row's l, LSE and delta.
inline __m512i to_bf16_pairs(__m512 even, __m512 odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    return pairs_of_upper_halves(_mm512_add_epi32(_mm512_castps_si512(even), half),
                                 _mm512_add_epi32(_mm512_castps_si512(odd), half));
}
/// to_bf16_pairs() for numbers that bf16 holds exactly.
inline __m512i exact_bf16_pairs(__m512 even, __m512 odd) {
    return pairs_of_upper_halves(_mm512_castps_si512(even), _mm512_castps_si512(odd));
}

/// A row tile's row: bf16 of `low`, then of `high`.
inline __m512i to_bf16(__m512 low, __m512 high) { return bits(_mm512_cvtne2ps_pbh(high, low)); }
/// to_bf16() for numbers that bf16 holds exactly. It uses a shuffle of one operand, which is cheaper than one of two.
inline __m512i exact_bf16(__m512 low, __m512 high) {
    alignas(64) static constexpr std::uint16_t kEvenThenOdd[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                                   22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
                                                                   13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kEvenThenOdd), exact_bf16_pairs(low, high));
}

/// Stores x and y as one row of a tile in three parts, split by kPart and joined by kJoin.
template <auto kPart, auto kJoin>
inline void store_in_parts(Bf16* to, __m512 x, __m512 y) {
    __m512 of_x[3];
    __m512 of_y[3];
    kPart(x, of_x);
    kPart(y, of_y);
    for (int part = 0; part < 3; ++part) {
        _mm512_store_si512(to + part * kTileElements, kJoin(of_x[part], of_y[part]));
    }
}
