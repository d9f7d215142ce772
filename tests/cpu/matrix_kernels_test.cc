// SPDX-License-Identifier: Apache-2.0
//
// The fa2 kernels on every matrix unit of this processor. Without AMX they run on VDPBF16PS, with the same layout and
// pipeline.
#include <limits>
#include <map>

#include "check/run_case.hpp"
#include "long_run.hpp"
#include "units.hpp"

namespace tessera::cpu::matrix::matrix_kernels_test {
namespace {

// Cases are in groups, so that parallel test processes can share them.
class MatrixRandomCases : public testing::TestWithParam<std::uint64_t> {};
constexpr std::uint64_t kRandomCases = 500;
constexpr std::uint64_t kGroup = 50;

TEST_P(MatrixRandomCases, are_right_on_every_unit) {
    std::map<Unit, int> ran;
    for (std::uint64_t index = GetParam(); index < GetParam() + kGroup; ++index) {
        check::Case random = check::random_case(random_seed(2027), index);
        if (random.problem.dtype == DType::fp16) continue;
        if (index % 4 != 0) random.tile.reset();
        check::CaseRunner runner(random);  // the reference is the same for all units, and takes most of the time
        for (const Unit chosen : {Unit::none, Unit::dot, Unit::amx}) {
            if (!has_unit(chosen)) continue;
            const OnlyUnit only(chosen);
            for (const KernelInfo& kernel : kernels()) {
                if (kernel.backend != Backend::cpu || kernel.schedule != Schedule::fa2) continue;
                const check::Outcome outcome = runner.run(kernel);
                ran[chosen] += outcome.refusal ? 0 : 1;
                EXPECT_TRUE(outcome.pass()) << "unit " << static_cast<int>(chosen) << "\n"
                                            << check::to_command(random, kernel.name) << "\n"
                                            << outcome.report.describe();
            }
        }
    }
    for (const auto& [chosen, count] : ran) EXPECT_GT(count, 50) << "unit " << static_cast<int>(chosen);
}

INSTANTIATE_TEST_SUITE_P(All, MatrixRandomCases, testing::Range<std::uint64_t>(0, kRandomCases, kGroup));

/// The last panels of one query head and the first of the next share a task. By the window, whole blocks of keys lie
/// between those that they see.
TEST(MatrixKernels, a_task_may_skip_blocks_of_keys) {
    for (const Unit chosen : {Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        for (const DType dtype : {DType::bf16, DType::fp32}) {
            for (const int threads : {1, 2, 16}) {
                check::Case c{.id = "gap", .seed = 5, .threads = threads};
                c.problem = {.dtype = dtype,
                             .batch = 1,
                             .len_q = 1500,
                             .len_kv = 1500,
                             .heads_q = 2,
                             .heads_kv = 1,
                             .head_dim = 16,
                             .head_dim_v = 16};
                c.problem.mask.window_left = 64;
                c.problem.mask.window_right = 0;
                check::CaseRunner runner(c);
                for (const KernelInfo& kernel : kernels()) {
                    if (kernel.backend != Backend::cpu || kernel.schedule != Schedule::fa2) continue;
                    const check::Outcome outcome = runner.run(kernel);
                    EXPECT_TRUE(outcome.pass())
                        << kernel.name << " " << name_of(dtype) << " on " << threads << " threads\n"
                        << outcome.report.describe();
                }
            }
        }
    }
}

/// An infinite value makes dS of the other keys infinite, and with it dK. Its bf16 parts must not make that NaN.
TEST(MatrixKernels, an_infinite_value_gives_infinite_gradients) {
    for (const Unit chosen : {Unit::none, Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        for (const std::int64_t queries : {1, 2}) {
            check::Case c{.id = "infinity", .seed = 3};
            c.problem = {.dtype = DType::fp32,
                         .batch = 1,
                         .len_q = queries,
                         .len_kv = 70,
                         .heads_q = 1,
                         .heads_kv = 1,
                         .head_dim = 32,
                         .head_dim_v = 32,
                         .scale = 0.05};
            c.elements = {{check::Input::v, {0, 20, 0, 3}, std::numeric_limits<double>::infinity()}};
            check::CaseRunner runner(c);
            for (const KernelInfo& kernel : kernels()) {
                if (kernel.backend != Backend::cpu || kernel.pass != Pass::backward) continue;
                const check::Outcome outcome = runner.run(kernel);
                EXPECT_TRUE(outcome.pass())
                    << kernel.name << " on unit " << static_cast<int>(chosen) << ", " << queries << " queries\n"
                    << outcome.report.describe();
            }
        }
    }
}

/// Partial results have a memory limit; without it these calls would take 9.6 and 8.6 GB.
TEST(MatrixKernels, few_queries_of_many_keys_take_little_memory) {
    for (const Unit chosen : {Unit::dot, Unit::amx}) {
        if (!has_unit(chosen)) continue;
        const OnlyUnit only(chosen);
        Problem p{.dtype = DType::bf16, .batch = 1, .len_kv = 1 << 20, .head_dim = 128, .head_dim_v = 128};
        p.len_q = 8000, p.heads_q = p.heads_kv = 1;
        EXPECT_LT(plan(p, {.backend = Backend::cpu, .threads = 16}).workspace_bytes, std::size_t{1} << 30);
        p.len_q = 1, p.len_kv = 1 << 17, p.heads_q = 64;
        EXPECT_LT(plan(p, {.pass = Pass::backward, .backend = Backend::cpu, .threads = 2}).workspace_bytes,
                  std::size_t{1} << 30);
    }
}

}  // namespace
}  // namespace tessera::cpu::matrix::matrix_kernels_test
