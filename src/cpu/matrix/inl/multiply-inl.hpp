// SPDX-License-Identifier: Apache-2.0
//
// The loops around a unit's block of 2 x 2 tiles. Included inside the namespace and the target attributes of a unit's
// file. The file must have defined block<kParts, kRows, kLanes>, which computes kRows x kLanes tiles of C from tile (i,
// j) on. block() calls its `between` argument once per MMA of parts and step of k.

inline void take_maximum(const TileProduct& p, std::int64_t i, std::int64_t rows, std::int64_t j, std::int64_t lanes) {
    for (std::int64_t lane = j * 16; lane < (j + lanes) * 16; lane += 16) {
        __m512 max[4];
        for (__m512& x : max) x = _mm512_loadu_ps(p.maximum + lane);
        for (std::int64_t row = i * 16; row < (i + rows) * 16; row += 4) {
            for (int r = 0; r < 4; ++r) {
                max[r] = _mm512_max_ps(max[r], _mm512_loadu_ps(p.c + (row + r) * p.c_stride + lane));
            }
        }
        const __m512 all = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
        _mm512_storeu_ps(p.maximum + lane, all);
    }
}

template <int kParts, int kRows, class Between>
inline void row_of_blocks(const TileProduct& p, std::int64_t i, Between& between) {
    std::int64_t j = 0;
    for (; j + 2 <= p.n; j += 2) {
        block<kParts, kRows, 2>(p, i, j, between);
        if (p.maximum != nullptr) take_maximum(p, i, kRows, j, 2);
    }
    if (j < p.n) {
        block<kParts, kRows, 1>(p, i, j, between);
        if (p.maximum != nullptr) take_maximum(p, i, kRows, j, 1);
    }
}

template <int kParts, class Between>
inline void product_in_parts(const TileProduct& p, Between& between) {
    std::int64_t i = 0;
    for (; i + 2 <= p.m; i += 2) row_of_blocks<kParts, 2>(p, i, between);
    if (i < p.m) row_of_blocks<kParts, 1>(p, i, between);
}

template <class Between>
inline void product(const TileProduct& p, Between& between) {
    if (p.parts == 1) product_in_parts<1>(p, between);
    else product_in_parts<3>(p, between);
}

struct Nothing {
    void operator()() const {}
};

inline void multiply(const TileProduct& p) {
    Nothing nothing;
    product(p, nothing);
}

/// Spreads the steps of the weights evenly over the steps of the GEMMs.
struct SomeWeights {
    WeightsInSteps& weights;
    std::int64_t per_step;
    void operator()() { weights.run(per_step); }
};

inline void multiply_beside_weights(std::span<const TileProduct> products, const WeightsJob& job) {
    std::int64_t steps = 0;
    for (const TileProduct& p : products) {
        steps += (p.m + 1) / 2 * ((p.n + 1) / 2) * p.k * (p.parts == 1 ? std::size(kPairs<1>) : std::size(kPairs<3>));
    }
    WeightsInSteps in_steps(job);
    SomeWeights some{in_steps, steps == 0 ? 0 : (in_steps.left() + steps - 1) / steps};
    for (const TileProduct& p : products) product(p, some);
    in_steps.run(in_steps.left());
}
