// SPDX-License-Identifier: Apache-2.0
#include "model/live_keys.hpp"

#include <gtest/gtest.h>

#include "model/predict.hpp"

namespace tessera::model::live_keys_test {
namespace {

Problem cache(std::int64_t batch, std::int64_t capacity) {
    Problem p{.dtype = DType::bf16, .batch = batch, .len_q = 1, .len_kv = capacity, .heads_q = 8, .heads_kv = 2};
    p.kv_lengths = true;
    p.page_size = 16;
    return p;
}

TEST(LiveKeys, are_those_of_the_sequences) {
    EXPECT_EQ(on_live_keys(cache(2, 64), {}).len_kv, 64);
    EXPECT_EQ(on_live_keys(cache(2, 64), {{1, 40}, {1, 11}}).len_kv, 26);  // the mean, rounded up
    EXPECT_FALSE(on_live_keys(cache(2, 64), {}).kv_lengths);
    Problem ragged = cache(2, 64);
    ragged.ragged = true;
    ragged.total_q = 5;
    EXPECT_EQ(on_live_keys(ragged, {{2, 40}, {3, 11}}).total_kv, 51);
    EXPECT_EQ(on_live_keys(ragged, {}).total_kv, 128);
    const Problem dense = Problem::dense(2, 64, 8, 64);
    EXPECT_EQ(on_live_keys(dense, {}), dense);
}

TEST(LiveKeys, alone_determine_the_traffic_of_a_prediction) {
    const Machine& machine = *find_machine("xeon-16");
    const auto on = [&](const Problem& p, const PredictOptions& how) {
        return predict(p, Schedule::fa2, Pass::forward, machine, how);
    };
    const PredictOptions lengths{.sequences = {{1, 4000}, {1, 2000}}};
    const auto small = on(cache(2, 4000), lengths);
    const auto large = on(cache(2, 160'000), lengths);
    EXPECT_EQ(small.ms, large.ms);
    EXPECT_EQ(small.cost.work.bytes.dram, large.cost.work.bytes.dram);
    EXPECT_EQ(large.memory.tensors - small.memory.tensors, 2 * 156'000 * 2 * 128 * 2);
    EXPECT_GT(on(cache(2, 160'000), {}).ms, large.ms);
    EXPECT_TRUE(refusal(cache(2, 64), Schedule::fa2, Pass::backward, machine, {}));
}

}  // namespace
}  // namespace tessera::model::live_keys_test
