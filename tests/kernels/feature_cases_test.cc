// SPDX-License-Identifier: Apache-2.0
//
// Every kernel x compiled shape x feature x dtype that the kernel takes runs, and is right. The refusals are listed
// here, so that any other refusal fails. The counts are printed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "check/feature_cases.hpp"
#include "check/limits.hpp"
#include "check/run_case.hpp"
#include "cuda/fa1/host/dispatch.hpp"
#include "cuda/fa2/host/dispatch.hpp"
#include "cuda/fa3/host/backward_dispatch.hpp"
#include "cuda/fa3/host/forward_dispatch.hpp"
#include "cuda/fa3/host/pack_gqa.hpp"
#include "long_run.hpp"
#include "printed.hpp"
#include "registry.hpp"

namespace tessera::check::feature_cases_test {
namespace {

constexpr std::uint64_t kSeed = 20261122;

/// The kernels of the host, or those of a GPU.
std::vector<const KernelInfo*> kernels_on(DeviceType where) {
    std::vector<const KernelInfo*> some;
    for (const KernelInfo& kernel : kernels()) {
        if ((kernel.backend == Backend::cuda) == (where == DeviceType::cuda)) some.push_back(&kernel);
    }
    return some;
}

class FeatureCases : public testing::TestWithParam<std::tuple<DeviceType, Feature>> {
 protected:
    void SetUp() override {
        const DeviceType where = std::get<DeviceType>(GetParam());
        if (const auto reason = unavailable({where, 0})) GTEST_SKIP() << *reason;
    }
};

TEST_P(FeatureCases, are_right_on_every_shape_of_every_kernel) {
    const auto [where, feature] = GetParam();
    for (const SelectedCase& chosen : select_feature_cases(random_seed(kSeed), kernels_on(where), feature)) {
        const Case& which = chosen.item.which;
        SCOPED_TRACE(which.describe());
        CaseRunner runner(which);
        for (const KernelInfo* kernel : chosen.kernels) {
            const Outcome outcome = runner.run(*kernel);
            EXPECT_TRUE(outcome.pass()) << to_command(which, kernel->name) << "\n" << outcome.report.describe();
            EXPECT_FALSE(outcome.refusal) << kernel->name << " refused: " << *outcome.refusal;
        }
    }
}

std::string name_of_device(DeviceType where) { return where == DeviceType::cuda ? "cuda" : "host"; }

std::string name_of_case(const testing::TestParamInfo<std::tuple<DeviceType, Feature>>& which) {
    return name_of_device(std::get<0>(which.param)) + "_" + name_of(std::get<1>(which.param));
}

INSTANTIATE_TEST_SUITE_P(AllKernels, FeatureCases,
                         testing::Combine(testing::Values(DeviceType::cpu, DeviceType::cuda),
                                          testing::ValuesIn(kFeatures)),
                         name_of_case);

class FeatureCounts : public testing::TestWithParam<DeviceType> {
 protected:
    void SetUp() override {
        if (const auto reason = unavailable({GetParam(), 0})) GTEST_SKIP() << *reason;
    }
};

/// Numbers of runs, by shape, then by feature and dtype.
using Counts = std::map<std::string, std::map<std::pair<Feature, DType>, int>>;

void print(const KernelInfo& kernel, const Counts& counts) {
    fmt::print("{}: cases of each compiled shape, in {}\n", kernel.name, [&] {
        std::string dtypes;
        for (const DType dtype : kernel.dtypes) dtypes += (dtypes.empty() ? "" : "/") + std::string(name_of(dtype));
        return dtypes;
    }());
    for (const std::string& shape : kernel_of(kernel).shapes) {
        std::string line;
        for (const Feature feature : kFeatures) {
            if (!applies_to(feature, kernel.pass)) continue;
            line += fmt::format("{}{} ", line.empty() ? "" : ", ", name_of(feature));
            for (const DType dtype : kernel.dtypes) {
                const auto of_shape = counts.find(shape);
                const bool none = of_shape == counts.end() || !of_shape->second.contains({feature, dtype});
                line += fmt::format("{}{}", dtype == kernel.dtypes[0] ? "" : "/",
                                    none ? 0 : of_shape->second.at({feature, dtype}));
            }
        }
        fmt::print("  {}: {}\n", shape, line);
    }
}

/// Counts the runs of FeatureCases. A 0 is right only if the kernel refuses the feature or has another shape for it,
/// and in fp64, the dtype of the reference. The kernel of few queries and caches has cases of its own
/// (cuda_decode_test.cc).
TEST_P(FeatureCounts, no_shape_and_no_feature_goes_without_a_case) {
    const std::vector<SelectedCase> all = select_feature_cases(kSeed, kernels_on(GetParam()));
    for (const KernelInfo* kernel : kernels_on(GetParam())) {
        if (splits_keys(*kernel)) continue;
        Counts counts;
        std::set<std::pair<Feature, DType>> seen;
        for (const SelectedCase& chosen : all) {
            if (std::find(chosen.kernels.begin(), chosen.kernels.end(), kernel) == chosen.kernels.end()) continue;
            const Problem& p = chosen.item.which.problem;
            ++counts[support_of(*kernel, p).shape][{chosen.item.feature, p.dtype}];
            seen.insert({chosen.item.feature, p.dtype});
        }
        print(*kernel, counts);
        for (const std::string& shape : kernel_of(*kernel).shapes) {
            EXPECT_TRUE(counts.contains(shape)) << kernel->name << ": no case runs on " << shape;
        }
        for (const Feature feature : kFeatures) {
            if (!applies_to(feature, kernel->pass)) continue;
            for (const DType dtype : kernel->dtypes) {
                if (dtype == DType::fp64) continue;
                if (in_cache(feature) && !takes_cache(*kernel)) continue;
                EXPECT_TRUE(seen.contains({feature, dtype}))
                    << kernel->name << ": no case of " << name_of(feature) << " in " << name_of(dtype);
            }
        }
    }
}

TEST_P(FeatureCounts, kernels_refuse_what_they_say_and_nothing_else) {
    std::map<std::string, int> refused;
    for (const FeatureCase& c : feature_cases(kSeed)) {
        for (const KernelInfo* kernel : kernels_on(GetParam())) {
            const Support support = support_of(*kernel, c.which.problem);
            const std::string expected = expected_refusal(*kernel, c.which.problem);
            EXPECT_EQ(support.supported, expected.empty())
                << kernel->name << ": " << c.which.describe() << support.reason;
            EXPECT_TRUE(support.reason.starts_with(expected)) << kernel->name << ": " << support.reason;
            if (!support.supported) ++refused[kernel->name + ": " + support.reason];
        }
    }
    for (const auto& [what, count] : refused) fmt::print("refused {} times: {}\n", count, what);
}

INSTANTIATE_TEST_SUITE_P(AllKernels, FeatureCounts, testing::Values(DeviceType::cpu, DeviceType::cuda),
                         [](const auto& which) { return name_of_device(which.param); });

/// The cases reach every compiled shape in the lists of shapes. That is known without a GPU, and without CUDA.
template <class Shapes, class ShapeOf>
void expect_all_reached(const char* schedule, const std::vector<Feature>& without, const ShapeOf& shape_of) {
    std::map<std::size_t, std::set<Feature>> reached;
    for (const FeatureCase& c : feature_cases(kSeed)) {
        if (c.which.problem.dtype == DType::fp32) continue;
        if (std::find(without.begin(), without.end(), c.feature) != without.end()) continue;
        const std::optional<std::size_t> shape = shape_of(c.which.problem);
        if (shape) reached[*shape].insert(c.feature);
    }
    const std::vector<std::string> names = Shapes::names();
    const auto named = [](const char* part) {
        return [part](const std::string& name) { return name.find(part) != std::string::npos; };
    };
    const auto has_shapes = [&](const char* part) { return std::any_of(names.begin(), names.end(), named(part)); };
    for (std::size_t i = 0; i < names.size(); ++i) {
        EXPECT_FALSE(reached[i].empty()) << schedule << ": " << names[i];
        if (named("General")(names[i])) {
            for (const Feature feature : {Feature::alibi, Feature::dropout, Feature::all_but_bias}) {
                if (feature == Feature::alibi && has_shapes("Alibi")) continue;
                if (feature == Feature::dropout && has_shapes("Dropout")) continue;
                EXPECT_TRUE(reached[i].contains(feature)) << schedule << ": " << names[i] << " " << name_of(feature);
            }
        } else if (named("Alibi")(names[i])) {
            EXPECT_TRUE(reached[i].contains(Feature::alibi)) << schedule << ": " << names[i];
        } else if (named("Dropout")(names[i])) {
            EXPECT_TRUE(reached[i].contains(Feature::dropout)) << schedule << ": " << names[i];
        } else if (named("Bias")(names[i])) {
            EXPECT_TRUE(reached[i].contains(Feature::bias)) << schedule << ": " << names[i];
        } else if (named("Capped")(names[i])) {
            EXPECT_TRUE(reached[i].contains(Feature::softcap)) << schedule << ": " << names[i];
        } else if (named("Cached")(names[i])) {
            EXPECT_EQ(reached[i], (std::set{Feature::slots, Feature::pages})) << schedule << ": " << names[i];
        } else {
            // A head_dim may have one shape for calls with a mask, and another for those without.
            const bool masked = named("Masked")(names[i]);
            const bool unmasked = has_shapes((names[i] + "Masked").c_str());
            std::vector<Feature> needed;
            if (!unmasked) needed = {Feature::causal_bottom_right, Feature::causal_top_left, Feature::window};
            // With few heads, those rows have the tile of HeadDim64Short: CudaInvariance compares the bits of both.
            if (has_shapes((names[i] + "Short").c_str())) std::erase(needed, Feature::causal_top_left);
            if (!masked) needed.push_back(Feature::ragged);
            for (const Feature feature : needed) {
                EXPECT_TRUE(reached[i].contains(feature)) << schedule << ": " << names[i] << " " << name_of(feature);
            }
        }
    }
}

TEST(FeatureCasesAlone, reach_every_shape_of_every_cuda_kernel) {
    constexpr Feature slots = Feature::slots, pages = Feature::pages;
    expect_all_reached<cuda::fa3::Shapes>("fa3", {}, [](const Problem& p) { return cuda::fa3::shape_of(p); });
    expect_all_reached<cuda::fa3::backward::Shapes>("fa3 backward", {slots, pages},
                                                    [](const Problem& p) { return cuda::fa3::backward::shape_of(p); });
    const auto fa2 = [](const Problem& p) { return std::optional(cuda::fa2::shape_of(p)); };
    expect_all_reached<cuda::fa2::Shapes>("fa2", {slots, pages}, fa2);
    const auto fa1 = [](const Problem& p) { return std::optional(cuda::fa1::shape_of(p)); };
    expect_all_reached<cuda::fa1::Shapes>("fa1", {slots, pages}, fa1);
}

/// A 16-bit case whose heads fa3 packs (PackGQA), for every shape that does that.
TEST(FeatureCasesAlone, stack_the_heads_of_every_shape_of_fa3) {
    std::map<std::size_t, std::set<int>> stacked;
    int causal = 0;
    int ragged = 0;
    for (const FeatureCase& c : feature_cases(kSeed)) {
        const Problem& p = c.which.problem;
        if (c.feature != Feature::stacked_heads || p.dtype == DType::fp32) continue;
        EXPECT_FALSE(c.which.o_residual) << c.which.id;
        const std::optional<std::size_t> shape = cuda::fa3::shape_of(p);
        const int heads = cuda::fa3::pack_gqa_of(p).heads();
        if (!shape || heads == 1) continue;
        stacked[*shape].insert(heads);
        causal += p.mask.causal != Causal::none ? 1 : 0;
        ragged += p.ragged ? 1 : 0;
    }
    for (std::size_t i = 0; i < cuda::fa3::Shapes::names().size(); ++i) {
        const cuda::fa3::Config& config = cuda::fa3::Shapes::kConfigs[i];
        if (config.scores != cuda::fa3::Scores::plain || config.cached) continue;
        EXPECT_FALSE(stacked[i].empty()) << cuda::fa3::Shapes::names()[i];
    }
    EXPECT_GT(causal, 0);
    EXPECT_GT(ragged, 0);
}

TEST(FeatureCasesAlone, are_found_by_their_ids_and_have_ids_of_their_own) {
    std::set<std::string> ids;
    for (const FeatureCase& c : feature_cases(7)) {
        EXPECT_TRUE(ids.insert(c.which.id).second) << c.which.id;
        EXPECT_NO_THROW(c.which.problem.validate()) << c.which.describe();
    }
    const auto found = find_case(7, "alibi/bf16/128x64/wide");
    ASSERT_TRUE(found);
    EXPECT_TRUE(found->problem.alibi);
    EXPECT_EQ(found->problem.head_dim_v, 64);
    EXPECT_GT(found->problem.len_kv, 640);
    EXPECT_FALSE(find_case(7, "alibi/bf16/128x64/narrow"));
}

}  // namespace
}  // namespace tessera::check::feature_cases_test
