// SPDX-License-Identifier: Apache-2.0
#include "tessera/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "core/case.hpp"

namespace tessera::test::plan_test {
namespace {

Error error_of(const Problem& p, const PlanOptions& options) {
    try {
        plan(p, options);
    } catch (const Error& e) {
        return e;
    }
    return {ErrorCode::ok, "", "no error"};
}

Problem some_problem() {
    Problem p = Problem::dense(2, 64, 4, 64);
    p.mask.causal = Causal::bottom_right;
    return p;
}

TEST(Kernels, are_listed_once_and_end_with_the_reference) {
    const auto all = kernels();
    std::set<std::string> names;
    for (const KernelInfo& k : all) {
        EXPECT_TRUE(names.insert(k.name).second) << k.name << " twice";
        EXPECT_FALSE(k.summary.empty() || k.limits.empty() || k.dtypes.empty()) << k.name;
        EXPECT_EQ(k.summary.find('\n'), std::string::npos);
        EXPECT_EQ(k.name.rfind(std::string(name_of(k.backend)) + ".", 0), 0u) << k.name;
    }
    ASSERT_GE(all.size(), 2u);
    EXPECT_EQ(all[all.size() - 2].name, "reference.forward");
    EXPECT_EQ(all[all.size() - 1].name, "reference.backward");
    EXPECT_EQ(kernels().data(), all.data());  // one list: its addresses are kept in Plans
}

TEST(Plan, tells_every_other_kernel_why_not) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
        for (const DType dtype : {DType::fp64, DType::fp32, DType::bf16, DType::fp16}) {
            Problem p = some_problem();
            p.dtype = dtype;
            const Plan how = plan(p, {.pass = pass});
            EXPECT_EQ(how.kernel->pass, pass);
            EXPECT_EQ(how.refused.size() + 1, kernels().size());
            EXPECT_NE(std::find(how.kernel->dtypes.begin(), how.kernel->dtypes.end(), dtype), how.kernel->dtypes.end());
            for (const Refusal& r : how.refused) {
                EXPECT_NE(r.kernel, how.kernel);
                EXPECT_FALSE(r.reason.empty());
                EXPECT_EQ(r.reason.find('\n'), std::string::npos) << r.reason;
                EXPECT_TRUE(r.kernel->pass == pass || !r.capable) << r.kernel->name;
            }
            EXPECT_GE(how.threads, 1);
            EXPECT_FALSE(how.target.empty());
            EXPECT_GE(how.tile.block_q, 1);
            EXPECT_GE(how.tile.block_kv, 1);
        }
    }
}

TEST(Plan, a_capable_kernel_runs_when_it_is_asked_for) {
    const Plan first = plan(some_problem());
    for (const Refusal& r : first.refused) {
        if (!r.capable) continue;
        const Plan asked = plan(some_problem(), {.kernel = r.kernel->name});
        EXPECT_EQ(asked.kernel, r.kernel);
        EXPECT_TRUE(std::any_of(asked.refused.begin(), asked.refused.end(), [&](const Refusal& other) {
            return other.kernel == first.kernel && other.capable && !other.reason.empty();
        }));
    }
}

TEST(Plan, is_chosen_by_the_problem_alone) {
    const Plan a = plan(some_problem());
    const Plan b = plan(some_problem());
    EXPECT_EQ(a.kernel, b.kernel);
    EXPECT_EQ(a.tile, b.tile);
    EXPECT_EQ(a.workspace_bytes, b.workspace_bytes);
    // Tiles never depend on the batch or the lengths: bits must not depend on neighbours.
    for (const KernelInfo& k : kernels()) {
        Problem p = some_problem();
        const PlanOptions options{.pass = k.pass, .kernel = k.name};
        if (error_of(p, options).code() != ErrorCode::ok) continue;
        const Tile tile = plan(p, options).tile;
        p.batch = 7, p.len_q = 1, p.len_kv = 3000, p.heads_kv = 1;
        if (error_of(p, options).code() != ErrorCode::ok) continue;
        EXPECT_EQ(plan(p, options).tile, tile) << k.name;
    }
}

TEST(Plan, options_that_leave_no_kernel) {
    Problem wide = some_problem();
    wide.dtype = DType::fp64;
    const Error tiles = error_of(wide, {.tile = Tile{64, 64}});
    EXPECT_EQ(tiles.code(), ErrorCode::unsupported);
    for (const KernelInfo& k : kernels()) {  // every kernel of the pass says why
        const bool listed = std::string(tiles.what()).find(k.name + ": ") != std::string::npos;
        EXPECT_EQ(listed, k.pass == Pass::forward) << k.name;
    }
    EXPECT_EQ(error_of(some_problem(), {.backend = Backend::reference, .schedule = Schedule::fa3}).code(),
              ErrorCode::unsupported);
    EXPECT_EQ(error_of(some_problem(), {.kernel = "reference.backward"}).code(), ErrorCode::unsupported);
    const auto all = kernels();
    if (std::none_of(all.begin(), all.end(), [](const KernelInfo& k) { return k.backend == Backend::cuda; })) {
        EXPECT_EQ(error_of(some_problem(), {.backend = Backend::cuda}).code(), ErrorCode::device_unavailable);
    }
}

TEST(Plan, wrong_options_are_named) {
    const auto expect_named = [](const PlanOptions& options, const char* argument) {
        const Error e = error_of(some_problem(), options);
        EXPECT_EQ(e.code(), ErrorCode::invalid_argument) << argument;
        EXPECT_EQ(e.argument(), argument) << e.what();
    };
    expect_named({.kernel = "cpu.fa9.forward"}, "kernel");
    expect_named({.kernel = "Reference.Forward"}, "kernel");
    expect_named({.threads = -1}, "threads");
    expect_named({.threads = 1025}, "threads");
    expect_named({.tile = Tile{0, 64}}, "block_q");
    expect_named({.tile = Tile{64, 0}}, "block_kv");
    expect_named({.tile = Tile{4097, 64}}, "block_q");
    expect_named({.tile = Tile{64, -5}}, "block_kv");
    Problem p = some_problem();
    p.head_dim = 0;
    EXPECT_EQ(error_of(p, {}).argument(), "head_dim");
    EXPECT_EQ(plan(some_problem(), {.threads = 1024}).threads, 1024);
    EXPECT_EQ(plan(some_problem(), {.threads = 3}).threads, 3);
}

TEST(Plan, a_workspace_beyond_any_machine_is_a_refusal) {
    Problem p = Problem::dense(1, 1, 1, 256);
    p.len_kv = std::int64_t{1} << 32;
    const Plan how = plan(p, {.kernel = "reference.forward", .threads = 1024});
    EXPECT_GT(how.workspace_bytes, std::size_t{1} << 53);  // sums are 64-bit: 1024 * 2^32 * 512 * 8 bytes
}

TEST(Plan, describe_fits_80_columns) {
    Problem p = Problem::dense(12345, 1234567, 64, 192, DType::fp64);
    p.len_kv = 12345;
    p.heads_kv = 8;
    p.head_dim_v = 128;
    p.mask = {Causal::bottom_right, 1234567, 1234567};
    p.scale = 0.1234567890123;
    p.softcap = 12.3456789;
    p.alibi = p.bias = p.bias_gradient = true;
    p.dropout = {0.123456789, 18446744073709551615u};
    for (const Problem& problem : {p, some_problem()}) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            const std::string text = plan(problem, {.pass = pass}).describe();
            std::istringstream lines(text);
            for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
            EXPECT_EQ(text.back(), '\n');
            for (const char* label : {"problem ", "kernel ", "tile ", "threads ", "workspace "}) {
                EXPECT_NE(text.find(label), std::string::npos) << label;
            }
        }
    }
    EXPECT_NE(Plan{}.describe().find("none"), std::string::npos);
}

TEST(Plan, describe_keeps_every_word) {
    const Plan how = plan(some_problem());
    std::string text = how.describe();
    std::istringstream words(text);
    std::string joined;
    for (std::string word; words >> word;) joined += word + " ";
    EXPECT_NE(joined.find(how.problem.describe()), std::string::npos) << text;
    for (const Refusal& r : how.refused) {
        const bool told = joined.find(r.kernel->name + ": " + r.reason) != std::string::npos;
        EXPECT_EQ(told, r.kernel->pass == how.pass) << text;
    }
}

/// Workspace of a kernel for `len` queries and keys, or 0 when it does not take them.
double workspace_of(const KernelInfo& kernel, std::int64_t len, DType dtype) {
    Problem p = Problem::dense(1, len, 2, 64, dtype);
    const PlanOptions options{.pass = kernel.pass, .kernel = kernel.name, .threads = 2};
    if (error_of(p, options).code() != ErrorCode::ok) return 0;
    return static_cast<double>(plan(p, options).workspace_bytes);
}

TEST(Plan, workspace_is_linear_in_the_length_but_for_standard) {
    for (const KernelInfo& kernel : kernels()) {
        for (const DType dtype : kernel.dtypes) {
            const double at_8k = workspace_of(kernel, 8192, dtype);
            const double at_32k = workspace_of(kernel, 32768, dtype);
            if (at_8k == 0 || at_32k == 0) continue;  // refused, or more than this machine has
            if (kernel.schedule == Schedule::standard && kernel.backend != Backend::reference) {
                EXPECT_GE(at_8k, 8192.0 * 8192.0 * 2) << kernel.name << " keeps S or P of a head";
                EXPECT_GT(at_32k, 12 * at_8k) << kernel.name;
            } else {
                const double at_128k = workspace_of(kernel, 131072, dtype);
                EXPECT_LE(at_128k, 4.5 * at_32k + 4096) << kernel.name << " " << name_of(dtype);
                // The CPU's backward makes sums over more than 16,384 rows in parts, whose totals take memory too.
                EXPECT_LE(at_32k, 2 * 4 * at_8k + 4096) << kernel.name << " " << name_of(dtype);
                // A row takes some vectors of head_dim in fp32 for each head, a thread a constant; nothing takes N x N.
                EXPECT_LT(at_32k, 32768.0 * 32768.0) << kernel.name << " " << name_of(dtype);
            }
        }
    }
}

}  // namespace
}  // namespace tessera::test::plan_test
