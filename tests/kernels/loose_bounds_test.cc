// SPDX-License-Identifier: Apache-2.0
//
// Ragged calls whose Problem states bounds far beyond the lengths of its sequences. The work follows the sequences.
#include <algorithm>
#include <vector>

#include "kernels/support.hpp"

namespace tessera::check::loose_bounds_test {
namespace {

/// Bounds that this kernel takes in the memory of a test machine: `standard` lays scores out by len_kv, and fa1 refuses
/// by it.
std::int64_t loose_bound(const KernelInfo& kernel) {
    return kernel.schedule == Schedule::standard ? 1 << 12 : kernel.schedule == Schedule::fa1 ? 1 << 16 : 1 << 20;
}

/// A loop that counts its tasks and runs them on the calling thread.
struct CountedLoop {
    std::int64_t tasks = 0;
    std::int64_t loops = 0;

    Run run(int threads) {
        return {.threads = threads, .how = {.parallel_for = [this](std::int64_t count, int, const TaskBody& body) {
                                        tasks += count;
                                        ++loops;
                                        for (std::int64_t task = 0; task < count; ++task) body(task, 0);
                                    }}};
    }
};

struct Lengths {
    std::vector<std::int64_t> q;
    std::vector<std::int64_t> kv;
};

/// Decoding, sequences without queries or keys, and one that is much longer than the rest.
std::vector<Lengths> all_lengths() {
    std::vector<Lengths> all = {{std::vector<std::int64_t>(64, 1), std::vector<std::int64_t>(64, 100)},
                                {{3, 0, 70, 1}, {600, 40, 0, 1300}},
                                {std::vector<std::int64_t>(33, 2), std::vector<std::int64_t>(33, 5)}};
    all[2].q[7] = 700;
    all[2].kv[7] = 900;
    return all;
}

/// No loop cuts a head into more: 16 queries by 512 keys, or 32 keys.
std::int64_t most_tasks_of_a_loop(const Problem& p, const Lengths& lengths) {
    std::int64_t of_a_head = 0;
    for (std::size_t b = 0; b < lengths.q.size(); ++b) {
        of_a_head += (lengths.q[b] / 16 + 1) * (lengths.kv[b] / 512 + 1) + lengths.kv[b] / 32 + 1;
    }
    return p.heads_q * of_a_head;
}

/// Calls f(kernel, tight, loose, lengths): the same tensors with the bounds of their lengths and with looser ones.
template <class F>
void for_each_pair(Pass pass, const F& f) {
    for_each_kernel(pass, [&](const KernelInfo& kernel) {
        if (kernel.backend != Backend::cpu) return;
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            for (const Lengths& lengths : all_lengths()) {
                Problem p = make_ragged(lengths.q, lengths.kv, 4, 2, 16, dtype);
                p.mask.causal = Causal::bottom_right;
                Attention tight(p, 3, lengths.q, lengths.kv);
                p.len_q = p.len_kv = loose_bound(kernel);
                SCOPED_TRACE(p.describe());
                Attention loose(p, 3, lengths.q, lengths.kv);
                f(kernel, tight, loose, lengths);
            }
        }
    });
}

/// Numbers of threads, with fewer and with more threads than tasks: heads are distributed differently.
constexpr int kThreads[] = {1, 4, 300};

TEST(LooseBounds, forward_runs_as_many_tasks_as_the_sequences_give_and_has_the_bits_of_tight_bounds) {
    for_each_pair(Pass::forward, [](const KernelInfo& kernel, Attention& tight, Attention& loose, const Lengths& of) {
        ASSERT_TRUE(tight.forward(kernel));
        for (const int threads : kThreads) {
            CountedLoop loop;
            ASSERT_TRUE(loose.forward(kernel, loop.run(threads)));
            EXPECT_LE(loop.tasks, loop.loops * most_tasks_of_a_loop(loose.problem, of)) << threads << " threads";
            EXPECT_TRUE(loose.o.same_bits(tight.o) && loose.lse.same_bits(tight.lse)) << threads << " threads";
        }
    });
}

TEST(LooseBounds, backward_runs_as_many_tasks_as_the_sequences_give_and_has_the_bits_of_tight_bounds) {
    for_each_pair(Pass::backward, [](const KernelInfo& kernel, Attention& tight, Attention& loose, const Lengths& of) {
        tight.prepare_backward();
        loose.o = tight.o;
        loose.lse = tight.lse;
        ASSERT_TRUE(tight.backward(kernel));
        for (const int threads : kThreads) {
            CountedLoop loop;
            ASSERT_TRUE(loose.backward(kernel, loop.run(threads)));
            EXPECT_LE(loop.tasks, loop.loops * most_tasks_of_a_loop(loose.problem, of)) << threads << " threads";
            EXPECT_TRUE(loose.dq.same_bits(tight.dq) && loose.dk.same_bits(tight.dk) && loose.dv.same_bits(tight.dv))
                << threads << " threads";
        }
    });
}

}  // namespace
}  // namespace tessera::check::loose_bounds_test
