// SPDX-License-Identifier: Apache-2.0
#include "tessera/predict_context_parallel.hpp"

#include <gtest/gtest.h>

#include <tuple>

#include "model/context_parallel.hpp"
#include "model/documents_on_ranks.hpp"
#include "tessera/error.hpp"

namespace tessera::model::test::context_parallel_test {
namespace {

const Machine& h200() { return *find_machine("h200"); }

Problem sequence(std::int64_t len, std::int64_t heads_q = 32, std::int64_t heads_kv = 8) {
    Problem p = Problem::dense(1, len, heads_q, 128, DType::bf16);
    p.heads_kv = heads_kv;
    p.mask.causal = Causal::bottom_right;
    return p;
}

PredictContextParallelOptions on(int ranks, const char* link = "nvlink") {
    return {.ranks = ranks, .link = *find_link(link)};
}

ContextParallelPrediction predicted(const Problem& p, Pass pass, const PredictContextParallelOptions& options) {
    return predict_context_parallel(p, Schedule::fa3, pass, h200(), options);
}

/// A sequence of packed documents.
Problem documents(const std::vector<std::int64_t>& lengths) {
    Problem p = sequence(0);
    p.ragged = true;
    p.batch = static_cast<std::int64_t>(lengths.size());
    for (const std::int64_t length : lengths) {
        p.len_q = p.len_kv = std::max(p.len_q, length);
        p.total_q += length, p.total_kv += length;
    }
    return p;
}

ContextParallelPrediction predicted(const std::vector<std::int64_t>& lengths, Pass pass,
                                    PredictContextParallelOptions options) {
    for (const std::int64_t length : lengths) options.kernels.sequences.emplace_back(length, length);
    return predicted(documents(lengths), pass, options);
}

constexpr Pass kPasses[] = {Pass::forward, Pass::backward};

TEST(ContextParallel, one_gpu_is_predict) {
    for (const Pass pass : kPasses) {
        const Problem p = sequence(8192);
        const ContextParallelPrediction one = predicted(p, pass, on(1));
        const Prediction alone = predict(p, Schedule::fa3, pass, h200(), {.by = "tessera"});
        EXPECT_EQ(one.ms, alone.ms);
        EXPECT_EQ(one.share, 1);
        EXPECT_EQ(one.bytes_received, 0);
        EXPECT_EQ(one.ring_ms, 0);
    }
}

TEST(ContextParallel, parts_add_up) {
    for (const Pass pass : kPasses) {
        for (const int ranks : {2, 4, 8, 64}) {
            for (const std::int64_t len : {16384, 131072}) {
                const ContextParallelPrediction found = predicted(sequence(len), pass, on(ranks));
                double sum = 0;
                for (const Part& part : found.parts) sum += part.ms;
                EXPECT_NEAR(sum, found.ms, 1e-9 * found.ms) << ranks << " " << len;
                EXPECT_GE(found.ms, found.kernel_ms);
                EXPECT_GE(found.hidden_ms, 0);
                EXPECT_LE(found.hidden_ms, found.exchange_ms);
                EXPECT_NEAR(found.share, found.one_gpu_ms / ranks / found.ms, 1e-12);
                EXPECT_LT(found.share, 1.02) << "no more than perfect, beside the rounding of waves";
            }
        }
    }
}

/// The figures of docs/context-parallel.md ("Memory") and of tessera.torch.context_parallel_plan() for a million rows.
TEST(ContextParallel, bytes_and_memory_are_those_of_the_page) {
    PredictContextParallelOptions nccl = on(8);
    nccl.copies = false;
    const std::int64_t total = 1 << 20, keys = total * 8 * 256 * 2;
    const ContextParallelPrediction forward = predicted(sequence(total), Pass::forward, nccl);
    const ContextParallelPrediction backward = predicted(sequence(total), Pass::backward, nccl);
    EXPECT_EQ(forward.steps, 8);
    EXPECT_EQ(backward.steps, 8);
    EXPECT_EQ(forward.order, "zigzag");
    EXPECT_EQ(forward.bytes_received, keys / 8 * 7);
    EXPECT_EQ(backward.bytes_received, 2 * (keys / 8 * 7));
    // (1 + 2 f) g and (2 + 4 f) g, with g an eighth of K and V and f = 1 + 1 / 16.
    EXPECT_EQ(forward.memory, keys / 8 + 2 * (keys / 8 * 17 / 16));
    EXPECT_EQ(backward.memory, 2 * (keys / 8) + 4 * (keys / 8 * 17 / 16));
    // Copies on 2 GPUs: f = 1.25 times K and V for the calls, and a rank's own, half of them, twice.
    const std::int64_t of_all = 2 * std::int64_t{16384} * 8 * 128 * 2;
    EXPECT_EQ(predicted(sequence(16384), Pass::forward, on(2)).memory, of_all / 4 * 9);
    // One step of the backward: dK and dV of the calls twice, and the rows that arrive, the GPU's own among them.
    EXPECT_EQ(predicted(sequence(16384), Pass::backward, on(2)).memory, of_all / 4 * 23);
    EXPECT_EQ(predicted(sequence(131072), Pass::backward, on(4)).memory, 2'617'245'696);
}

/// Groups of key heads by the MiB of a GPU's K and V, as the library makes them.
TEST(ContextParallel, steps_follow_the_bytes) {
    const auto steps = [](std::int64_t rows, Pass pass, bool copies) {
        PredictContextParallelOptions options = on(2);
        options.copies = copies;
        return predicted(sequence(2 * rows), pass, options).steps;
    };
    for (const auto& [rows, forward, by_copies, backward] : {std::tuple{2048, 1, 1, 1},
                                                             {4096, 2, 2, 1},
                                                             {8192, 2, 3, 1},
                                                             {16384, 4, 3, 1},
                                                             {65536, 8, 8, 4},
                                                             {131072, 8, 8, 8}}) {
        EXPECT_EQ(steps(rows, Pass::forward, false), forward) << rows;
        EXPECT_EQ(steps(rows, Pass::forward, true), by_copies) << rows;
        EXPECT_EQ(steps(rows, Pass::backward, false), backward) << rows;
        EXPECT_EQ(steps(rows, Pass::backward, true), backward) << rows;
    }
}

/// Between hosts NCCL gathers, which brings the same bytes to all GPUs of a host, and sends, which does not.
TEST(ContextParallel, hosts_share_their_adapters_in_a_gather) {
    PredictContextParallelOptions slow = on(64);
    slow.link.between_gbs = {10};
    const Problem p = sequence(1 << 20);
    const double one_host = predicted(p, Pass::forward, on(8)).exchange_ms;
    EXPECT_GT(predicted(p, Pass::forward, slow).exchange_ms, 2 * predicted(p, Pass::forward, on(64)).exchange_ms);
    EXPECT_GT(predicted(p, Pass::backward, on(64)).exchange_ms,
              predicted(p, Pass::forward, on(64)).exchange_ms + one_host);
}

TEST(ContextParallel, order_follows_the_mask) {
    Problem p = sequence(16384);
    EXPECT_EQ(predicted(p, Pass::forward, on(4)).order, "zigzag");
    p.mask.window_left = 1023;
    const ContextParallelPrediction window = predicted(p, Pass::forward, on(4));
    EXPECT_EQ(window.order, "contiguous");
    EXPECT_EQ(window.ring_ms, 0);
    p.mask = {};
    const ContextParallelPrediction open = predicted(p, Pass::forward, on(4));
    EXPECT_EQ(open.order, "contiguous");
    EXPECT_GT(open.ring_ms, 0);
}

TEST(ContextParallel, a_slower_link_is_never_faster) {
    for (const Pass pass : kPasses) {
        double before = 0;
        for (const double gbs : {1000.0, 300.0, 100.0, 30.0, 10.0, 3.0}) {
            PredictContextParallelOptions options = on(4, "ib");
            options.link.copy_gbs = options.link.gather_gbs = options.link.send_gbs = {gbs};
            const double ms = predicted(sequence(65536), pass, options).ms;
            EXPECT_GE(ms, before) << gbs;
            before = ms;
        }
    }
}

TEST(ContextParallel, exchanges_hide_behind_long_rows) {
    for (const Pass pass : kPasses) {
        EXPECT_GT(predicted(sequence(262144), pass, on(4)).share, 0.9);
        EXPECT_LT(predicted(sequence(8192), pass, on(4)).share, predicted(sequence(65536), pass, on(4)).share);
    }
}

/// With one step nothing can be hidden: the exchange comes before the kernels.
TEST(ContextParallel, one_step_hides_nothing) {
    PredictContextParallelOptions options = on(4);
    options.steps = 1;
    const ContextParallelPrediction found = predicted(sequence(65536), Pass::forward, options);
    EXPECT_EQ(found.steps, 1);
    EXPECT_NEAR(found.hidden_ms, 0, 0.2);
    options.steps = 4;
    EXPECT_GT(predicted(sequence(65536), Pass::forward, options).hidden_ms, 0.2);
}

/// The product does the same: GPUs of a host copy from each other unless NCCL is asked for.
TEST(ContextParallel, copies_are_the_default) {
    PredictContextParallelOptions nccl = on(4), slow = on(4);
    nccl.copies = false;
    slow.link.gather_gbs = slow.link.send_gbs = {1};
    for (const Pass pass : kPasses) {
        const Problem p = sequence(65536);
        const double by_copies = predicted(p, pass, on(4)).ms, by_nccl = predicted(p, pass, nccl).ms;
        EXPECT_LT(by_copies, by_nccl);
        EXPECT_EQ(predicted(p, pass, slow).ms, by_copies) << "copies do not go by NCCL";
        slow.copies = false;
        EXPECT_GT(predicted(p, pass, slow).ms, by_nccl);
        slow.copies = true;
    }
}

/// The order, the calls and the rows of each GPU, against a count by row.
TEST(ContextParallel, documents_on_ranks) {
    const std::vector<std::int64_t> lengths = {100, 7, 1, 900, 16, 512};  // 1,536 rows
    for (const int ranks : {1, 2, 3, 4, 8}) {
        for (const bool causal : {true, false}) {
            const DocumentsOnRanks found = spread_documents(lengths, ranks, causal);
            std::int64_t pairs = 0, all = 0;
            for (const std::int64_t n : lengths) all += causal ? n * (n + 1) / 2 : n * n;
            for (const RankWork& rank : found.ranks) {
                std::int64_t rows = 0;
                for (const auto& run : rank.runs) {
                    rows += run.rows;
                    EXPECT_GE(run.keys, run.rows);
                }
                EXPECT_EQ(rows, 1536 / ranks) << found.order;
                EXPECT_EQ(rank.others, rank.needed - rows);
                pairs += rank.pairs;
            }
            EXPECT_EQ(pairs, all);
            EXPECT_LT(static_cast<double>(found.fullest().pairs), 1.6 * static_cast<double>(all) / ranks) << ranks;
        }
    }
    // Contiguous rows cut the document of 900 rows; the second GPU sees its 408 first rows.
    const DocumentsOnRanks two = spread_documents({360, 816, 360}, 2, false);
    ASSERT_EQ(two.order, "contiguous");
    ASSERT_EQ(two.ranks[1].runs.size(), 2U);
    EXPECT_EQ(two.ranks[1].runs[0].rows, 408);
    EXPECT_EQ(two.ranks[1].runs[0].keys, 816);
    EXPECT_EQ(two.ranks[1].others, 408);
    EXPECT_EQ(two.peers(408), 1);
    EXPECT_EQ(spread_documents({1536}, 4, false).peers(1152), 3);
    EXPECT_EQ(spread_documents({1536}, 4, false).peers(0), 0);
}

/// One document is the dense sequence; many short ones need few rows of others, so that they are cheaper.
TEST(ContextParallel, documents_that_cross_gpus) {
    for (const Pass pass : kPasses) {
        const ContextParallelPrediction dense = predicted(sequence(65536), pass, on(4));
        const ContextParallelPrediction one = predicted({65536}, pass, on(4));
        EXPECT_EQ(one.order, "zigzag");
        // The chunks of the last GPU follow each other and are one call.
        const auto received = static_cast<double>(dense.bytes_received);
        EXPECT_NEAR(static_cast<double>(one.bytes_received), received, 0.1 * received);
        EXPECT_NEAR(one.kernel_ms, dense.kernel_ms, 0.05 * dense.kernel_ms);
        PredictContextParallelOptions few_gpus = on(4), many_gpus = on(64);
        few_gpus.copies = many_gpus.copies = false;
        const ContextParallelPrediction many = predicted(std::vector<std::int64_t>(64, 1024), pass, few_gpus);
        EXPECT_EQ(many.bytes_received, 0) << "no document crosses GPUs";
        const ContextParallelPrediction more = predicted(std::vector<std::int64_t>(1024, 1024), pass, many_gpus);
        EXPECT_LT(more.ms, 1.05 * many.ms) << "GPUs that send nothing take no time";
        EXPECT_LT(many.kernel_ms, 0.5 * one.kernel_ms);
        EXPECT_GT(many.ring_ms, 0);
        double sum = 0;
        for (const Part& part : many.parts) sum += part.ms;
        EXPECT_NEAR(sum, many.ms, 1e-9 * many.ms);
        EXPECT_EQ(predicted({65536}, pass, on(1)).ms, predicted({65536}, pass, on(1)).one_gpu_ms);
    }
}

TEST(ContextParallel, steps_in_time) {
    const auto on_gpu = [](const std::vector<RankStep>& steps, Pass pass) {
        const RanksInTime time = in_time(steps, pass);
        EXPECT_EQ(time.parts.back().name, "host");
        return time.ms - time.parts.back().ms;
    };
    const RankStep step{.pack = 1, .gather = 4, .copy = 1, .kernels = 10};
    // The first exchange, the kernels of both steps, and what the second exchange takes from the first kernels.
    EXPECT_NEAR(on_gpu({step, step}, Pass::forward), 6 + 20 + 2, 1e-9);
    EXPECT_NEAR(in_time({step, step}, Pass::forward).hidden_ms, 6, 1e-9);
    RankStep slow = step;
    slow.gather = 40;  // kernels wait for every exchange
    EXPECT_NEAR(on_gpu({slow, slow}, Pass::forward), 2 * 42 + 10, 1e-9);
    const RankStep copies{.pack = 1, .copy = 5, .kernels = 10};
    EXPECT_NEAR(on_gpu({copies, {.copy = 5, .kernels = 10}}, Pass::forward), 6 + 20, 1e-9) << "they take no cores";
    // The last gradients travel and are added up behind the kernels.
    const RankStep both{.copy = 5, .kernels = 10, .scatter = 4, .sum = 1};
    EXPECT_NEAR(on_gpu({both, both}, Pass::backward), 5 + 10 + 10 + 1 + 4 + 1, 1e-9);
    EXPECT_GT(in_time({{.kernels = 0.01}}, Pass::forward).ms, 0.3) << "the host is slower";
}

TEST(ContextParallel, links_have_sources) {
    EXPECT_EQ(find_link("carrier pigeon"), nullptr);
    for (const Link& link : links()) {
        EXPECT_GT(link.gather_gbs.value, 0) << link.name;
        for (const Quantity& rate : {link.gather_gbs, link.gather_us, link.hop_us, link.send_gbs, link.send_us})
            EXPECT_FALSE(rate.source.empty()) << link.name;
        EXPECT_EQ(link.copy_gbs > 0, link.gpus_of_host > 0) << link.name << ": GPUs of one host copy from each other";
        for (const Quantity& rate : {link.copy_gbs, link.copy_us, link.meet_us})
            EXPECT_EQ(rate.source.empty(), link.gpus_of_host == 0) << link.name;
    }
}

TEST(ContextParallel, refused_with_a_reason) {
    const auto reason = [](const Problem& p, const char* machine = "h200") {
        return context_parallel_refusal(p, Schedule::fa2, Pass::forward, *find_machine(machine), on(2)).value_or("");
    };
    Problem p = sequence(4096);
    EXPECT_EQ(reason(p), "");
    EXPECT_NE(reason(p, "xeon-16").find("CPU"), std::string::npos);
    p.len_q = 1;
    EXPECT_NE(reason(p).find("as many queries as keys"), std::string::npos);
    p = sequence(4096);
    p.alibi = true;
    EXPECT_NE(reason(p).find("ALiBi"), std::string::npos);
    p = sequence(4096);
    p.ragged = true, p.total_q = p.total_kv = 4096;
    EXPECT_EQ(reason(p), "");
    p.mask.window_left = 127;
    EXPECT_NE(reason(p).find("documents without a window"), std::string::npos);
}

TEST(ContextParallel, options_out_of_range_are_named) {
    const auto argument = [](const Problem& p, const PredictContextParallelOptions& options) -> std::string {
        try {
            predicted(p, Pass::forward, options);
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
            return error.argument();
        }
        return "";
    };
    EXPECT_EQ(argument(sequence(4096), on(0)), "ranks");
    EXPECT_EQ(argument(sequence(4097), on(2)), "len");
    EXPECT_EQ(argument(sequence(4096), {.ranks = 2, .link = {}}), "link.gather_gbs");
    PredictContextParallelOptions options = on(2);
    options.steps = -1;
    EXPECT_EQ(argument(sequence(4096), options), "steps");
    options = on(2);
    options.kernels.sequences = {{1, 1}};
    EXPECT_EQ(argument(sequence(4096), options), "kernels.sequences");
    Problem packed = documents({1000, 24});
    options.kernels.sequences = {};
    EXPECT_EQ(argument(packed, options), "kernels.sequences") << "one for each document";
    options.kernels.sequences = {{1000, 1000}, {24, 25}};
    EXPECT_EQ(argument(packed, options), "kernels.sequences") << "as many keys as queries";
    packed = documents({1000, 25});
    options.kernels.sequences = {{1000, 1000}, {25, 25}};
    EXPECT_EQ(argument(packed, options), "len");
}

}  // namespace
}  // namespace tessera::model::test::context_parallel_test
