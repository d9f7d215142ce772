// SPDX-License-Identifier: Apache-2.0
//
// Work that a mask hides is skipped, and nothing else changes. Compares the primitives that trim a tile with those that
// do not, and whole kernels under a mask with the same mask written as a bias, on every instruction set.
#include <cmath>
#include <limits>
#include <random>

#include "cpu/simd/primitives.hpp"
#include "kernels/support.hpp"
#include "targets.hpp"

namespace tessera::cpu::trim_test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kKeys = 70, kQueries = 80, kDim = 19;

/// Tiles of kKeys x kQueries that masks cut in different ways.
std::vector<simd::TilePosition> positions() {
    std::vector<simd::TilePosition> result;
    const auto add = [&](const Mask& mask, std::int64_t len_q, std::int64_t len_kv, std::int64_t q, std::int64_t kv) {
        result.push_back({mask.bind(len_q, len_kv), q, kv});
    };
    add({}, 300, 300, 64, 64);
    for (const Causal causal : {Causal::bottom_right, Causal::top_left}) {
        add({.causal = causal}, 300, 300, 64, 64);
        add({.causal = causal}, 300, 300, 64, 101);  // the first queries see no key
        add({.causal = causal}, 300, 290, 64, 47);
        add({.causal = causal, .window_left = 21}, 300, 310, 100, 70);  // the last queries see no key
        add({.causal = causal}, 70, 70, 0, 0);                          // lanes beyond the last query
    }
    for (const std::int64_t window : {0, 3, 15, 16, 40}) {
        add({.window_left = window, .window_right = window}, 300, 300, 64, 64);
        add({.window_left = window, .window_right = 1}, 300, 300, 90, 77);
    }
    return result;
}

/// Floats at an aligned address.
struct Tensor {
    std::vector<float> memory;
    float* data;
    std::int64_t size;

    explicit Tensor(std::int64_t n, float value = 0) : memory(static_cast<std::size_t>(n) + 16, value), size(n) {
        const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
        data = memory.data() + (64 - address % 64) % 64 / sizeof(float);
    }
    Tensor(std::int64_t n, std::mt19937& rng) : Tensor(n) {
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < n; ++i) data[i] = normal(rng);
    }
    Tensor(const Tensor& other) : Tensor(other.size) { std::copy_n(other.data, size, data); }
    Tensor& operator=(const Tensor&) = delete;
    bool same_bits(const Tensor& other) const {
        return std::equal(data, data + size, other.data, [](float a, float b) {
            return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
        });
    }
};

bool visible(const simd::TilePosition& position, std::int64_t key, std::int64_t query) {
    return position.q + query < position.band.len_q && position.band.visible(position.q + query, position.kv + key);
}

/// Does one of the kLanes queries around `query` see the key?
bool group_sees(const simd::TilePosition& position, std::int64_t key, std::int64_t query) {
    const std::int64_t first = query / simd::kLanes * simd::kLanes;
    for (std::int64_t i = first; i < first + simd::kLanes; ++i) {
        if (visible(position, key, i)) return true;
    }
    return false;
}

class Trim : public EachTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, Trim, testing::ValuesIn(usable_targets()), target_label);

TEST_P(Trim, fill_hidden_is_the_band_and_lanes_without_a_query) {
    for (const simd::TilePosition& position : positions()) {
        Tensor s(kKeys * kQueries, 1.0F);
        simd::fill_masked(position, kKeys, s.data, kQueries, -5.0F);
        for (std::int64_t at = 0; at < s.size; ++at)
            ASSERT_EQ(s.data[at], visible(position, at / kQueries, at % kQueries) ? 1.0F : -5.0F) << at;
    }
}

TEST_P(Trim, scores_of_hidden_sub_tiles_are_not_computed) {
    std::mt19937 rng(1);
    for (const simd::TilePosition& position : positions()) {
        const Tensor k(kKeys * kDim, rng), q_t(kDim * kQueries, rng);
        Tensor all(kKeys * kQueries), cut(kKeys * kQueries, 7.0F);
        simd::Product product{.m = kKeys,
                              .n = kQueries,
                              .k = kDim,
                              .a = k.data,
                              .a_row = kDim,
                              .a_k = 1,
                              .b = q_t.data,
                              .b_stride = kQueries,
                              .c = all.data,
                              .c_stride = kQueries};
        simd::matmul(product);
        product.c = cut.data;
        simd::matmul_visible_scores(product, position);
        for (std::int64_t j = 0; j < kKeys; ++j) {
            for (std::int64_t i = 0; i < kQueries; ++i) {
                const float expected = group_sees(position, j, i) ? all.data[j * kQueries + i] : 7.0F;
                ASSERT_EQ(cut.data[j * kQueries + i], expected) << j << " " << i;
            }
        }
    }
}

TEST_P(Trim, products_over_keys_read_no_hidden_sub_tile) {
    std::mt19937 rng(2);
    for (const simd::TilePosition& position : positions()) {
        for (const simd::Into into : {simd::Into::overwrite, simd::Into::add, simd::Into::scaled_add}) {
            const Tensor v(kKeys * kDim, rng), scale(kQueries, rng);
            Tensor p(kKeys * kQueries, rng), all(kDim * kQueries, rng);
            Tensor cut(all);
            simd::fill_masked(position, kKeys, p.data, kQueries, 0.0F);
            simd::Product product{.m = kDim,
                                  .n = kQueries,
                                  .k = kKeys,
                                  .a = v.data,
                                  .a_row = 1,
                                  .a_k = kDim,
                                  .b = p.data,
                                  .b_stride = kQueries,
                                  .c = all.data,
                                  .c_stride = kQueries,
                                  .into = into,
                                  .lane_scale = scale.data};
            simd::matmul(product);
            for (std::int64_t at = 0; at < p.size; ++at) {
                if (!group_sees(position, at / kQueries, at % kQueries)) p.data[at] = std::nanf("");
            }
            product.c = cut.data;
            simd::matmul_visible_keys(product, position);
            ASSERT_TRUE(cut.same_bits(all));
        }
    }
}

TEST_P(Trim, products_over_queries_read_no_query_that_sees_nothing) {
    std::mt19937 rng(3);
    constexpr std::int64_t kStride = 48;
    for (const simd::TilePosition& position : positions()) {
        for (const std::int64_t queries : {kQueries, kQueries - 11}) {
            const std::int64_t present = std::min(queries, position.band.len_q - position.q);
            Tensor p(kKeys * kQueries, rng), d_o(kQueries * kStride, rng), all(kKeys * kStride, rng);
            Tensor cut(all);
            simd::fill_masked(position, kKeys, p.data, kQueries, 0.0F);
            simd::Product product{.m = kKeys,
                                  .n = kStride,
                                  .k = present,
                                  .a = p.data,
                                  .a_row = kQueries,
                                  .a_k = 1,
                                  .b = d_o.data,
                                  .b_stride = kStride,
                                  .c = all.data,
                                  .c_stride = kStride,
                                  .into = simd::Into::add};
            simd::matmul(product);
            for (std::int64_t i = 0; i < present; ++i) {
                bool sees = false;
                for (std::int64_t j = 0; j < kKeys; ++j) sees = sees || visible(position, j, i);
                if (!sees) std::fill_n(d_o.data + i * kStride, kStride, std::nanf(""));
            }
            product.c = cut.data;
            simd::matmul_visible_queries(product, position);
            ASSERT_TRUE(cut.same_bits(all));
        }
    }
}

TEST_P(Trim, softmax_words_leave_hidden_sub_tiles_out) {
    std::mt19937 rng(4);
    for (const simd::TilePosition& position : positions()) {
        Tensor all(kKeys * kQueries, rng), m(kQueries), l(kQueries), rescale(kQueries), lse(kQueries, rng);
        simd::fill_masked(position, kKeys, all.data, kQueries, -kInf);
        Tensor cut(all), weights(all), cut_weights(all), m2(m), l2(l), rescale2(rescale);
        simd::clear_state({m.data, l.data}, kQueries);
        simd::clear_state({m2.data, l2.data}, kQueries);
        simd::online_softmax(all.data, kKeys, kQueries, kQueries, {m.data, l.data}, rescale.data);
        simd::online_softmax(cut.data, kKeys, kQueries, kQueries, {m2.data, l2.data}, rescale2.data, &position);
        EXPECT_TRUE(cut.same_bits(all) && m2.same_bits(m) && l2.same_bits(l) && rescale2.same_bits(rescale));

        simd::weights_from_lse(weights.data, lse.data, kKeys, kQueries, kQueries);
        simd::weights_from_lse(cut_weights.data, lse.data, kKeys, kQueries, kQueries, &position);
        Tensor ds(kKeys * kQueries, rng);
        Tensor cut_ds(ds);
        simd::softmax_gradient(weights.data, ds.data, lse.data, kKeys, kQueries, kQueries);
        simd::softmax_gradient(weights.data, cut_ds.data, lse.data, kKeys, kQueries, kQueries, &position);
        for (std::int64_t at = 0; at < ds.size; ++at) {
            if (!visible(position, at / kQueries, at % kQueries)) continue;
            ASSERT_EQ(cut_weights.data[at], weights.data[at]);
            ASSERT_EQ(cut_ds.data[at], ds.data[at]);
        }
    }
}

/// Masked keys add exact zeros, wherever they lie in a tile. Written as a bias of -inf, the mask leaves every tile
/// whole, and the bits are the same.
TEST_P(Trim, a_mask_has_the_bits_of_a_bias) {
    const Mask masks[] = {{.causal = Causal::bottom_right},
                          {.causal = Causal::top_left},
                          {.window_left = 21, .window_right = 9},
                          {.causal = Causal::bottom_right, .window_left = 70},
                          {.window_left = 0, .window_right = 0}};
    const std::pair<std::int64_t, std::int64_t> lengths[] = {{130, 130}, {77, 200}, {200, 77}};
    for (const DType dtype : {DType::fp32, DType::fp16}) {
        for (const auto& [len_q, len_kv] : lengths) {
            for (const Mask& mask : masks) {
                Problem masked = check::make_problem(1, len_q, len_kv, 2, 1, 24, dtype);
                Problem biased = masked;
                masked.mask = mask;
                biased.bias = true;
                check::Attention a(masked), b(biased);
                const Band band = mask.bind(len_q, len_kv);
                for (std::int64_t at = 0; at < 2 * len_q * len_kv; ++at) {
                    const std::int64_t i = at / len_kv % len_q;
                    b.bias.set(band.visible(i, at % len_kv) ? 0 : -kInf, 0, at / len_kv / len_q, i, at % len_kv);
                }
                a.prepare_backward();
                b.o = a.o, b.lse = a.lse;
                for (const KernelInfo& kernel : kernels()) {
                    if (kernel.backend != Backend::cpu) continue;
                    for (const Tile tile : {Tile{64, 64}, Tile{100, 40}, Tile{32, 128}}) {
                        const check::Run run{.tile = tile};
                        SCOPED_TRACE(kernel.name + ", " + masked.describe());
                        if (kernel.pass == Pass::forward) {
                            check::Attention c = a, d = b;
                            ASSERT_TRUE(c.forward(kernel, run) && d.forward(kernel, run));
                            ASSERT_TRUE(c.o.same_bits(d.o) && c.lse.same_bits(d.lse)) << tile.block_q;
                        } else {
                            ASSERT_TRUE(a.backward(kernel, run) && b.backward(kernel, run));
                            ASSERT_TRUE(a.dq.same_bits(b.dq) && a.dk.same_bits(b.dk) && a.dv.same_bits(b.dv))
                                << tile.block_q;
                        }
                    }
                }
            }
        }
    }
}

}  // namespace
}  // namespace tessera::cpu::trim_test
