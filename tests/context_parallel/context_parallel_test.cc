// SPDX-License-Identifier: Apache-2.0
//
// context_parallel() over threads as ranks: the results beside one process and beside the reference.
#include "tessera/context_parallel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "context_parallel/thread_ranks.hpp"
#include "tessera/error.hpp"

namespace tessera::test::context_parallel_test {
namespace {

constexpr std::int64_t kTotal = 96;

struct Case {
    const char* name;
    Problem whole;
    std::vector<std::int64_t> cu_seqlens{};
};

Problem dense(Mask mask, std::int64_t batch = 1, DType dtype = DType::fp32) {
    Problem p = Problem::dense(batch, kTotal, 4, 16, dtype);
    p.heads_kv = 2;
    p.head_dim_v = 24;
    p.mask = mask;
    return p;
}

Case documents(const char* name, Mask mask, std::vector<std::int64_t> offsets) {
    Problem p = dense(mask);
    p.ragged = true;
    p.batch = static_cast<std::int64_t>(offsets.size()) - 1;
    p.total_q = p.total_kv = kTotal;
    return {name, p, std::move(offsets)};
}

std::vector<Case> cases() {
    const Mask causal{.causal = Causal::bottom_right};
    return {{"full", dense({})},
            {"causal", dense(causal)},
            {"causal, two members", dense(causal, 2)},
            {"causal bf16", dense(causal, 1, DType::bf16)},
            {"window", dense({.causal = Causal::bottom_right, .window_left = 20})},
            {"two-sided window, two members", dense({.window_left = 20, .window_right = 9}, 2)},
            {"window to the right", dense({.window_right = 5})},
            documents("documents", causal, {0, 13, 50, 50, 61, 96}),
            documents("documents and rows past", {}, {0, 13, 50, 61, 90}),
            documents("documents with a window", {.window_left = 11, .window_right = 6}, {0, 37, 96})};
}

/// Inputs of the whole sequence and its results.
struct Whole {
    const Case& of;
    Owned q, k, v, d_o, dlse, o, lse, dq, dk, dv;

    explicit Whole(const Case& c)
        : of(c),
          q(rows(c, c.whole.heads_q, c.whole.head_dim)),
          k(rows(c, c.whole.heads_kv, c.whole.head_dim)),
          v(rows(c, c.whole.heads_kv, c.whole.head_dim_v)),
          d_o(rows(c, c.whole.heads_q, c.whole.head_dim_v)),
          dlse(lse_of(c)),
          o(rows(c, c.whole.heads_q, c.whole.head_dim_v)),
          lse(lse_of(c)),
          dq(rows(c, c.whole.heads_q, c.whole.head_dim)),
          dk(rows(c, c.whole.heads_kv, c.whole.head_dim)),
          dv(rows(c, c.whole.heads_kv, c.whole.head_dim_v)) {
        unsigned seed = 0;
        for (Owned* t : {&q, &k, &v, &d_o, &dlse}) t->fill(++seed);
    }

    static Owned rows(const Case& c, std::int64_t heads, std::int64_t dim) {
        if (c.whole.ragged) return {c.whole.dtype, {kTotal, heads, dim}};
        return {c.whole.dtype, {c.whole.batch, kTotal, heads, dim}};
    }
    static Owned lse_of(const Case& c) {
        if (c.whole.ragged) return {DType::fp32, {c.whole.heads_q, kTotal}};
        return {DType::fp32, {c.whole.batch, c.whole.heads_q, kTotal}};
    }

    /// Computes o to dv in this process. `schedule`: of the kernels, or "reference".
    void compute(const std::string& kernels) {
        TensorView cu{};
        if (!of.cu_seqlens.empty())
            cu = dense_view(of.cu_seqlens.data(), DType::int64, {static_cast<std::int64_t>(of.cu_seqlens.size())});
        const Plan forwards = plan(of.whole, {.pass = Pass::forward, .kernel = kernels + ".forward"});
        const Plan backwards = plan(of.whole, {.pass = Pass::backward, .kernel = kernels + ".backward"});
        const Workspace a(forwards), b(backwards);
        for (std::int64_t h = 0; h < lse.view.size(); ++h)  // rows past the documents
            store_from_double(lse.memory.data() + h * 4, DType::fp32, -HUGE_VAL);
        forward(forwards,
                {.q = q.view,
                 .k = k.view,
                 .v = v.view,
                 .cu_seqlens_q = cu,
                 .cu_seqlens_kv = cu,
                 .o = o.view,
                 .lse = lse.view},
                a);
        backward(backwards,
                 {.q = q.view,
                  .k = k.view,
                  .v = v.view,
                  .cu_seqlens_q = cu,
                  .cu_seqlens_kv = cu,
                  .o = o.view,
                  .lse = lse.view,
                  .d_o = d_o.view,
                  .dlse = dlse.view,
                  .dq = dq.view,
                  .dk = dk.view,
                  .dv = dv.view},
                 b);
    }
};

/// The results of one rank.
struct Results {
    Owned o, lse, dq, dk, dv;
};

int lse_dim(const Case& c) { return c.whole.ragged ? 1 : 2; }
int row_dim(const Case& c) { return c.whole.ragged ? 0 : 1; }

Results run(const Whole& whole, Communicator& communicator, ContextParallelOptions options) {
    const Case& c = whole.of;
    options.cu_seqlens = c.cu_seqlens;
    options.threads = 1;
    ContextParallel attention = context_parallel(c.whole, communicator, options);
    const auto own = [&](const Owned& t) { return rows_at(t, row_dim(c), attention.positions()); };
    const auto own_lse = [&](const Owned& t) { return rows_at(t, lse_dim(c), attention.positions()); };
    const Owned q = own(whole.q), k = own(whole.k), v = own(whole.v), d_o = own(whole.d_o), dlse = own_lse(whole.dlse);
    Results to{own(whole.d_o), own_lse(whole.dlse), own(whole.q), own(whole.k), own(whole.v)};
    const Workspace a(attention.workspace_bytes(Pass::forward)), b(attention.workspace_bytes(Pass::backward));
    for (int again = 0; again < 2; ++again) {  // an object serves any number of calls
        attention.forward({.q = q.view, .k = k.view, .v = v.view, .o = to.o.view, .lse = to.lse.view}, a);
        attention.backward({.q = q.view,
                            .k = k.view,
                            .v = v.view,
                            .o = to.o.view,
                            .lse = to.lse.view,
                            .d_o = d_o.view,
                            .dlse = dlse.view,
                            .dq = to.dq.view,
                            .dk = to.dk.view,
                            .dv = to.dv.view},
                           b);
    }
    return to;
}

void expect_same_bits(const Owned& got, const Owned& want, const std::string& what) {
    EXPECT_EQ(got.memory, want.memory) << what;
}

void expect_close(const Owned& got, const Owned& want, double limit, const std::string& what) {
    double error = 0, size = 0;
    for (std::int64_t i = 0; i < want.view.size(); ++i) {
        if (std::isinf(want.at(i))) {
            ASSERT_EQ(got.at(i), want.at(i)) << what;
            continue;
        }
        error += (got.at(i) - want.at(i)) * (got.at(i) - want.at(i));
        size += want.at(i) * want.at(i);
    }
    EXPECT_LE(std::sqrt(error), limit * std::sqrt(size) + 1e-12) << what;
}

/// A permutation in which rank 0 holds the end of the sequence, each rank's rows in two pieces.
std::vector<std::int64_t> reversed(int ranks) {
    const std::int64_t rows = kTotal / ranks, cut = rows / 3;
    std::vector<std::int64_t> positions;
    for (std::int64_t rank = ranks - 1; rank >= 0; --rank) {
        for (std::int64_t i = cut; i < rows; ++i) positions.push_back(rank * rows + i);
        for (std::int64_t i = 0; i < cut; ++i) positions.push_back(rank * rows + i);
    }
    return positions;
}

/// Calls body(options, name) for every order.
template <class Body>
void in_every_order(int ranks, const Body& body) {
    body(ContextParallelOptions{.order = SequenceOrder::zigzag}, "zig-zag");
    body(ContextParallelOptions{.order = SequenceOrder::contiguous}, "contiguous");
    const std::vector<std::int64_t> positions = reversed(ranks);
    body(ContextParallelOptions{.order = SequenceOrder::permutation, .permutation = positions}, "permutation");
}

TEST(ContextParallel, has_the_bits_of_one_process) {
    for (const Case& c : cases()) {
        Whole one(c), reference(c);
        one.compute("cpu.fa1");
        reference.compute("reference");
        const double limit = c.whole.dtype == DType::bf16 ? 1e-2 : 2e-6;
        for (int ranks = 1; ranks <= 4; ++ranks) {
            in_every_order(ranks, [&](ContextParallelOptions options, const char* order) {
                options.forward_kernel = "cpu.fa1.forward";
                options.backward_kernel = "cpu.fa1.backward";
                options.steps = 1 + ranks % 2;
                on_ranks(ranks, [&](Communicator& communicator) {
                    const Results got = run(one, communicator, options);
                    const std::string what = std::string(c.name) + ", " + order + ", rank " +
                                             std::to_string(communicator.rank()) + " of " + std::to_string(ranks);
                    const ContextParallelOptions of_positions = [&] {
                        ContextParallelOptions o = options;
                        o.cu_seqlens = c.cu_seqlens;
                        return o;
                    }();
                    const ContextParallel attention = context_parallel(c.whole, communicator, of_positions);
                    const auto own = [&](const Owned& t) { return rows_at(t, row_dim(c), attention.positions()); };
                    const auto own_lse = [&](const Owned& t) { return rows_at(t, lse_dim(c), attention.positions()); };
                    expect_same_bits(got.o, own(one.o), what + ": o");
                    expect_same_bits(got.lse, own_lse(one.lse), what + ": lse");
                    expect_same_bits(got.dq, own(one.dq), what + ": dq");
                    expect_close(got.o, own(reference.o), limit, what + ": o beside the reference");
                    expect_close(got.lse, own_lse(reference.lse), 2e-6, what + ": lse beside the reference");
                    expect_close(got.dq, own(reference.dq), limit, what + ": dq beside the reference");
                    expect_close(got.dk, own(reference.dk), limit, what + ": dk beside the reference");
                    expect_close(got.dv, own(reference.dv), limit, what + ": dv beside the reference");
                });
            });
        }
    }
}

TEST(ContextParallel, gradient_blocks_give_every_number_of_ranks_the_same_gradients) {
    for (const Case& c : cases()) {
        if (c.whole.batch > 1 && !c.whole.ragged) continue;
        const Whole inputs(c);
        Whole want(c);
        on_ranks(1, [&](Communicator& communicator) {
            const Results got = run(inputs, communicator, {.order = SequenceOrder::contiguous, .gradient_blocks = 24});
            want.dq.memory = got.dq.memory;
            want.dk.memory = got.dk.memory;
            want.dv.memory = got.dv.memory;
        });
        for (int ranks = 2; ranks <= 4; ++ranks) {
            for (const SequenceOrder order : {SequenceOrder::zigzag, SequenceOrder::contiguous}) {
                on_ranks(ranks, [&](Communicator& communicator) {
                    ContextParallelOptions options{.order = order, .gradient_blocks = 24, .steps = 2};
                    const Results got = run(inputs, communicator, options);
                    options.cu_seqlens = c.cu_seqlens;
                    const ContextParallel attention = context_parallel(c.whole, communicator, options);
                    const auto own = [&](const Owned& t) { return rows_at(t, row_dim(c), attention.positions()); };
                    const std::string what = std::string(c.name) + ", " + std::to_string(ranks) + " ranks";
                    expect_same_bits(got.dq, own(want.dq), what + ": dq");
                    expect_same_bits(got.dk, own(want.dk), what + ": dk");
                    expect_same_bits(got.dv, own(want.dv), what + ": dv");
                });
            }
        }
    }
}

TEST(ContextParallel, sends_only_the_rows_that_are_seen) {
    const auto received = [](const Case& c, SequenceOrder order) {
        const Whole whole(c);
        std::int64_t before = 0;
        const std::int64_t all = on_ranks(4, [&](Communicator& communicator) {
            ContextParallelOptions options{.order = order, .cu_seqlens = c.cu_seqlens};
            ContextParallel attention = context_parallel(c.whole, communicator, options);
            const auto own = [&](const Owned& t) { return rows_at(t, row_dim(c), attention.positions()); };
            const Owned q = own(whole.q), k = own(whole.k), v = own(whole.v), o = own(whole.d_o);
            const Workspace memory(attention.workspace_bytes(Pass::forward));
            attention.forward({.q = q.view, .k = k.view, .v = v.view, .o = o.view}, memory);
        });
        before = on_ranks(4, [&](Communicator& communicator) {
            static_cast<void>(context_parallel(c.whole, communicator, {.order = order, .cu_seqlens = c.cu_seqlens}));
        });
        return all - before;
    };
    constexpr std::int64_t kRow = 2 * (16 + 24) * 4;  // bytes of K and V
    EXPECT_EQ(received({"full", dense({})}, SequenceOrder::contiguous), 4 * 72 * kRow);
    EXPECT_EQ(received({"causal", dense({.causal = Causal::bottom_right})}, SequenceOrder::contiguous),
              (24 + 48 + 72) * kRow);
    const Mask window{.causal = Causal::bottom_right, .window_left = 5};
    EXPECT_EQ(received({"window", dense(window)}, SequenceOrder::contiguous), 3 * 5 * kRow);
    EXPECT_EQ(received(documents("documents", {}, {0, 24, 48, 72, 96}), SequenceOrder::contiguous), 0);
}

std::string refusal_of(int ranks, const std::function<void(Communicator&)>& body, ErrorCode code) {
    std::string text = "no error";
    try {
        on_ranks(ranks, body);
    } catch (const Error& error) {
        EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
        text = error.what();
    }
    return text;
}

TEST(ContextParallel, ranks_that_differ_are_named) {
    const auto differs = [](const std::function<void(Problem&, ContextParallelOptions&)>& change) {
        return refusal_of(
            3,
            [&](Communicator& communicator) {
                Problem whole = dense({.causal = Causal::bottom_right});
                ContextParallelOptions options;
                if (communicator.rank() == 2) change(whole, options);
                static_cast<void>(context_parallel(whole, communicator, options));
            },
            ErrorCode::invalid_argument);
    };
    EXPECT_EQ(differs([](Problem&, ContextParallelOptions& o) { o.gradient_blocks = 8; }),
              "gradient_blocks: expected the same on all ranks, got 0 on ranks 0, 1, 8 on rank 2");
    EXPECT_NE(differs([](Problem& p, ContextParallelOptions&) { p.softcap = 2; }).find("whole: expected the same"),
              std::string::npos);
    EXPECT_EQ(differs([](Problem&, ContextParallelOptions& o) { o.steps = -1; }),
              "rank 2 refused the call: steps: expected 0 or more, got -1");
}

TEST(ContextParallel, refuses_what_it_does_not_take) {
    const auto refused = [](const Problem& whole, const ContextParallelOptions& options, ErrorCode code) {
        return refusal_of(
            2, [&](Communicator& c) { static_cast<void>(context_parallel(whole, c, options)); }, code);
    };
    Problem p = dense({});
    p.alibi = true;
    EXPECT_EQ(refused(p, {}, ErrorCode::unsupported), "whole: takes no alibi over ranks");
    p = dense({});
    p.len_kv = 95;
    EXPECT_EQ(refused(p, {}, ErrorCode::invalid_argument), "whole: expected as many keys as queries, got 95 and 96");
    p = dense({});
    p.len_q = p.len_kv = 94;
    EXPECT_EQ(refused(p, {}, ErrorCode::invalid_argument),
              "whole: expected a sequence whose length 4 divides (2 ranks), got 94 rows");
    const std::vector<std::int64_t> twice(96, 1);
    EXPECT_EQ(
        refused(dense({}), {.order = SequenceOrder::permutation, .permutation = twice}, ErrorCode::invalid_argument),
        "permutation: expected each position below 96 once, got 1 twice");
    EXPECT_EQ(refused(dense({}), {.gradient_blocks = 7}, ErrorCode::invalid_argument),
              "gradient_blocks: expected a divisor of the 96 rows, got 7");
    EXPECT_EQ(refused(documents("", {}, {0, 96}).whole, {}, ErrorCode::invalid_argument),
              "cu_seqlens: expected 2 offsets, got 0");
}

TEST(ContextParallel, tensors_are_checked_before_anything_is_sent) {
    on_ranks(1, [](Communicator& communicator) {
        ContextParallel attention = context_parallel(dense({}), communicator);
        const Owned q(DType::fp32, {1, kTotal, 4, 16}), k(DType::fp32, {1, kTotal, 2, 16}),
            v(DType::fp32, {1, kTotal, 2, 24}), o(DType::fp32, {1, kTotal, 4, 24});
        const Workspace memory(attention.workspace_bytes(Pass::forward));
        const ForwardArgs args{.q = q.view, .k = k.view, .v = v.view, .o = o.view};
        attention.forward(args, memory);
        const auto message = [&](const ForwardArgs& changed, std::span<std::byte> workspace) -> std::string {
            try {
                attention.forward(changed, workspace);
            } catch (const Error& error) {
                return error.what();
            }
            return "no error";
        };
        ForwardArgs changed = args;
        changed.k = q.view;
        EXPECT_EQ(message(changed, memory).substr(0, 2), "k:");
        changed = args;
        changed.k = transposed(dense_view(k.memory.data(), DType::fp32, {1, 2, kTotal, 16}), 1, 2);
        EXPECT_EQ(message(changed, memory).substr(0, 50), "k: expected rows whose heads lie side by side, got");
        changed = args;
        changed.sinks = o.view;
        EXPECT_EQ(message(changed, memory), "sinks: is not taken by a call over ranks");
        EXPECT_EQ(message(args, memory.span().first(64)).substr(0, 10), "workspace:");
    });
}

TEST(NcclCommunicator, names_what_is_missing) {
    try {
        static_cast<void>(nccl_communicator(nullptr));
        FAIL() << "no error";
    } catch (const Error& error) {
        EXPECT_EQ(error.argument(), "comm") << error.what();
    }
}

}  // namespace
}  // namespace tessera::test::context_parallel_test
