// SPDX-License-Identifier: Apache-2.0
//
// A cache of keys, in slots or in pages: every sequence of a call has the bits that a dense call on its keys alone
// gives it, whatever the layout of the cache, its page size and its capacity, the table past the length and the
// unused rows. The dense call is compared with the fp64 reference.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "cpu/units.hpp"
#include "kernels/cache_call.hpp"
#include "kernels/sparse_memory.hpp"
#include "long_run.hpp"

namespace tessera::check::cache_test {
namespace {

using cpu::matrix::Unit;

bool same(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

/// Every sequence has the bits of its dense call, and rows that belong to nobody are not written.
void expect_bits_of_sequences(CacheCall& call, const std::string& kernel, std::initializer_list<int> threads,
                              bool against_reference) {
    SCOPED_TRACE(kernel + ": " + call.describe());
    const auto all = kernels();
    const auto info = std::find_if(all.begin(), all.end(), [&](const KernelInfo& k) { return k.name == kernel; });
    std::vector<Attention> sequences;
    for (std::int64_t b = 0; b < call.batch(); ++b) {
        sequences.push_back(call.alone(b));
        ASSERT_TRUE(sequences.back().forward(*info));
        if (!against_reference) continue;
        const Report report = sequences.back().check_forward();
        ASSERT_TRUE(report.pass()) << report.describe();
    }
    for (const int count : threads) {
        call.run(kernel, count);
        for (std::int64_t b = 0; b < call.batch(); ++b) {
            const Attention& alone = sequences[static_cast<std::size_t>(b)];
            for (std::int64_t i = 0; i < alone.problem.len_q; ++i) {
                for (std::int64_t h = 0; h < alone.problem.heads_q; ++h) {
                    ASSERT_TRUE(same(call.row_lse(b, h, i), alone.lse.get(0, h, i)))
                        << "lse of sequence " << b << ", head " << h << ", row " << i << ": " << call.row_lse(b, h, i)
                        << ", alone " << alone.lse.get(0, h, i);
                    for (std::int64_t c = 0; c < alone.problem.head_dim_v; ++c) {
                        ASSERT_TRUE(same(call.row(call.o, b, i, h, c), alone.o.get(0, i, h, c)))
                            << "o of sequence " << b << ", row " << i << ", head " << h << ", column " << c << ": "
                            << call.row(call.o, b, i, h, c) << ", alone " << alone.o.get(0, i, h, c);
                    }
                }
            }
        }
        const std::int64_t rows = call.problem.ragged ? call.problem.total_q : 0;
        for (std::int64_t row = call.first_row(call.batch()); row < rows; ++row) {
            ASSERT_EQ(call.o.get(row, 0, 0), 7);
            ASSERT_EQ(call.lse.get(0, row), 7);
        }
    }
}

/// A random call: some sequences without keys, with a negative length or with one over the capacity.
CacheCall random_call(std::mt19937_64& random, DType dtype, bool decode) {
    const auto below = [&](std::int64_t n) {
        return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
    };
    const auto one_of = [&](std::vector<std::int64_t> list) { return list[random() % list.size()]; };
    CacheCall call;
    Problem& p = call.problem;
    p.dtype = dtype;
    p.kv_lengths = true;
    p.batch = 1 + below(4);
    p.page_size = one_of({0, 1, 3, 5, 16, 64, 784, 1056});
    const std::int64_t capacity = 1 + below(decode ? 1500 : 200);
    p.len_kv = p.page_size == 0 ? capacity : (capacity + p.page_size - 1) / p.page_size * p.page_size;
    p.heads_kv = 1 + below(2);
    p.heads_q = p.heads_kv * one_of({1, 2, 4, 5});
    p.head_dim = one_of({16, 40, 64, 128});
    p.head_dim_v = below(4) == 0 ? one_of({16, 40, 64}) : p.head_dim;
    p.cache_batch_index = p.page_size == 0 && below(2) == 0;
    p.left_padding = below(3) == 0;
    p.ragged = below(2) == 0;
    if (below(3) > 0) p.mask.causal = Causal::bottom_right;
    if (below(3) == 0) p.mask.window_left = below(100);
    if (below(6) == 0) p.softcap = 15;
    p.alibi = below(6) == 0;
    p.sinks = below(4) == 0;
    p.len_q = decode ? 1 + below(8) : 1 + below(70);
    if (!decode && below(60) == 0) {  // a long prompt
        p.len_q = 1000 + below(2000);
        p.heads_kv = p.heads_q = 1;
        p.head_dim = p.head_dim_v = 16;
    }
    for (std::int64_t b = 0; b < p.batch; ++b) {
        call.queries.push_back(p.ragged ? below(p.len_q + 1) : p.len_q);
        const std::int64_t kind = below(8);
        call.lengths.push_back(kind == 0 ? -below(3) : kind == 1 ? p.len_kv + below(100) : below(p.len_kv + 1));
        call.padding.push_back(below(20) - 2);
    }
    call.spare_rows = below(3);
    if (p.ragged) p.total_q = call.first_row(p.batch) + call.spare_rows;
    call.cache_layout = static_cast<CacheLayout>(below(5));
    call.seed = random();
    call.make(random);
    return call;
}

struct Kind {
    DType dtype;
    bool decode;
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << name_of(kind.dtype) << (kind.decode ? "_decode" : ""); }

class Cache : public testing::TestWithParam<Kind> {
 protected:
    static constexpr int kCalls = 24;
    static constexpr int kCallsOfLongRun = 1667;  // over all six kinds: 10,002
};

TEST_P(Cache, members_have_the_bits_of_dense_calls) {
    std::mt19937_64 random(random_seed(20261128));
    const int calls = long_run() ? kCallsOfLongRun : kCalls;
    for (int n = 0; n < calls && !HasFatalFailure(); ++n) {
        CacheCall call = random_call(random, GetParam().dtype, GetParam().decode);
        for (const char* kernel : {"cpu.fa2.forward", "cpu.fa1.forward", "cpu.standard.forward"})
            expect_bits_of_sequences(call, kernel, {1, 3}, true);
    }
}

TEST_P(Cache, the_reference_reads_it) {
    std::mt19937_64 random(7);
    for (int n = 0; n < kCalls / 4 && !HasFatalFailure(); ++n) {
        CacheCall call = random_call(random, GetParam().dtype, GetParam().decode);
        expect_bits_of_sequences(call, "reference.forward", {1, 2}, false);
    }
}

/// Runs each matrix unit that the processor has, and none.
TEST_P(Cache, every_unit_gives_the_bits_of_dense_calls) {
    for (const Unit unit : {Unit::none, Unit::dot, Unit::amx}) {
        if (unit != Unit::none && !cpu::matrix::has_unit(unit)) continue;
        const cpu::matrix::OnlyUnit only(unit);
        std::mt19937_64 random(5);
        for (int n = 0; n < kCalls && !HasFatalFailure(); ++n) {
            CacheCall call = random_call(random, GetParam().dtype, GetParam().decode);
            expect_bits_of_sequences(call, "cpu.fa2.forward", {1, 3}, false);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, Cache,
                         testing::Values(Kind{DType::fp32, false}, Kind{DType::bf16, false}, Kind{DType::fp16, false},
                                         Kind{DType::fp32, true}, Kind{DType::bf16, true}, Kind{DType::fp16, true}),
                         testing::PrintToStringParamName());

/// The capacity of the cache and the number of threads change no bit of a long sequence.
TEST(CacheSplit, one_long_sequence_has_the_same_bits_on_any_threads) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        std::mt19937_64 random(3);
        CacheCall call;
        call.problem = make_problem(1, 1, 6000, 4, 1, 64, dtype);
        call.problem.kv_lengths = true;
        call.problem.page_size = 16;
        call.queries = {1};
        call.lengths = {4321};
        call.make(random);
        expect_bits_of_sequences(call, "cpu.fa2.forward", {1, 2, 3, 8}, true);
    }
}

/// Slots that lie more than 2^31 elements apart: an offset of 32 bits would read other memory.
TEST(CacheSlots, that_lie_2_to_the_31_elements_apart_bug_s4) {
    constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 24, kRows = 40, kHeads = 2, kDim = 16;
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        std::mt19937_64 random(12);
        CacheCall call;
        call.problem = make_problem(2, 1, kRows, 2 * kHeads, kHeads, kDim, dtype);
        call.problem.kv_lengths = call.problem.cache_batch_index = true;
        call.queries = {1, 1};
        call.lengths = {33, kRows};
        call.make(random);
        const std::int64_t slots = call.k.shape[0], elements = (slots - 1) * kStride + 2 * kRows * kHeads * kDim;
        const SparseMemory memory(static_cast<std::size_t>(elements * size_of(dtype)));
        if (memory.data() == nullptr) GTEST_SKIP() << "no address space for " << elements << " elements";
        CacheCall far = call;
        auto* first = static_cast<std::byte*>(memory.data());
        for (auto [view, from] : {std::pair(&far.k, &call.k), std::pair(&far.v, &call.v)}) {
            *view = *from;
            view->data = first + (from == &call.k ? 0 : kDim * size_of(dtype));
            view->strides = {kStride, 2 * kHeads * kDim, 2 * kDim, 1};
            const Packed values = packed_copy(*from);
            store_all(values.view, *view);
        }
        for (const char* kernel : {"cpu.fa2.forward", "cpu.fa1.forward", "cpu.standard.forward", "reference.forward"})
            expect_bits_of_sequences(far, kernel, {1, 3}, true);
    }
}

/// Sequences of which one is long.
CacheCall one_long_sequence(DType dtype, std::int64_t queries, bool ragged) {
    std::mt19937_64 random(4);
    CacheCall call;
    call.problem = make_problem(9, queries, 6000, 8, 2, 64, dtype);
    call.problem.kv_lengths = true;
    call.problem.page_size = 16;
    call.problem.mask.causal = Causal::bottom_right;
    call.problem.sinks = true;
    call.problem.ragged = ragged;
    for (std::int64_t b = 0; b < call.batch(); ++b) {
        call.queries.push_back(ragged ? b % (queries + 1) : queries);
        call.lengths.push_back(b == 4 ? 5900 : 10 * b - 20);
    }
    if (ragged) call.queries[4] = queries;
    if (ragged) call.problem.total_q = call.first_row(call.batch());
    call.make(random);
    return call;
}

/// A call with a panel for every thread splits the keys of its long sequence nevertheless, and no bit of it changes.
TEST(CacheSplit, a_long_member_among_short_ones_is_split) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        for (const std::int64_t queries : {1, 3}) {
            for (const bool ragged : {false, true}) {
                CacheCall call = one_long_sequence(dtype, queries, ragged);
                expect_bits_of_sequences(call, "cpu.fa2.forward", {1, 2, 3, 4, 16}, queries == 1);
                if (cpu::matrix::packing_pays(dtype) && cpu::matrix::unit() == Unit::amx) continue;
                std::int64_t most = 0;
                const Execution how{.parallel_for = [&](std::int64_t tasks, int, const TaskBody& body) {
                    most = std::max(most, tasks);
                    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
                }};
                const Plan plan = tessera::plan(call.problem, {.kernel = "cpu.fa2.forward", .threads = 2});
                forward(plan, call.args(), Workspace(plan), how);
                EXPECT_GE(most, call.batch() * call.problem.heads_kv + 5) << "tasks of " << call.describe();
            }
        }
    }
}

}  // namespace
}  // namespace tessera::check::cache_test
