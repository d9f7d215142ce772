// SPDX-License-Identifier: Apache-2.0
//
// Cures are applied here a second time, change by change and by this file's own hand, and PyTorch's rules are asked
// again.
#include "diagnose/cure.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>

#include "diagnose/applied_changes.hpp"
#include "diagnose/call_inputs.hpp"
#include "diagnose/calls.hpp"
#include "diagnose/drawn_calls.hpp"
#include "diagnose/ways.hpp"
#include "long_run.hpp"

namespace tessera::diagnose::cure_test {
namespace {

using namespace cures;

bool runs(const Call& call, SdpBackend wanted) {
    const Explanation e = explain(call);
    if (e.raises || !e.taken) return false;
    const auto active = *call.flash_implementation;
    if (wanted != fa3 && wanted != fa4)
        return *e.taken == wanted && (wanted != flash || active == FlashImplementation::own);
    const bool is_active = active == (wanted == fa3 ? FlashImplementation::fa3 : FlashImplementation::fa4);
    const Verdict& own = e.verdicts[wanted == fa3 ? 4 : 5];
    return is_active && *e.taken == flash && own.backend == wanted && own.standing == Standing::could_run;
}

std::string text_of(const Cure& cure) {
    std::string text = std::string(name_of(cure.backend)) + ":";
    for (const Change& change : cure.changes) text += " " + change.name;
    return text;
}

void expect_cures_that_work(Call (*question_of)(std::mt19937&), std::uint64_t seed, int questions, int least) {
    std::mt19937 random(static_cast<std::mt19937::result_type>(random_seed(seed)));
    const int times = long_run() ? 10 : 1;
    int cures = 0, changes = 0, none = 0;
    for (int question = 0; question < questions * times; ++question) {
        const Call call = question_of(random);
        for (const SdpBackend wanted : {flash, efficient, cudnn, fa3, fa4}) {
            const Cure cure = cure_for(call, wanted);
            if (!cure.found) {
                ++none;
                EXPECT_TRUE(!cure.blocked_by.empty() || !cure.missing_fields.empty() || explain(call).raises)
                    << question << " " << name_of(wanted) << ": " << text_of(call);
                continue;
            }
            ++cures;
            for (std::size_t left_out = 0; left_out <= cure.changes.size(); ++left_out) {
                Call after = call;
                bool known = true;
                for (std::size_t i = 0; i < cure.changes.size(); ++i)
                    known = (i == left_out || apply(after, cure.changes[i].name, wanted)) && known;
                ASSERT_TRUE(known) << text_of(cure);
                const bool whole = left_out == cure.changes.size();
                // PyTorch 2.14 and later unsqueezes by itself, so the call also runs without this change. The cure
                // keeps it, because the other changes name dimensions of a tensor of four.
                if (!whole && cure.changes[left_out].name == "unsqueeze" && after.torch >= Version{2, 14, 0}) continue;
                EXPECT_EQ(runs(after, wanted), whole)
                    << question << " " << text_of(cure) << (whole ? "" : ", without " + cure.changes[left_out].name);
            }
            changes += static_cast<int>(cure.changes.size());
        }
    }
    EXPECT_GT(cures, least * times);
    EXPECT_GT(changes, 2 * least * times);
    EXPECT_GT(none, least / 5 * times);
    ::testing::Test::RecordProperty("cures", cures);
    if (long_run()) std::printf("%d cures of %d changes, none in %d questions\n", cures, changes, none);
}

/// All changes, in an order in which a set of them can be made: installations first, PyTorch's before those of what it
/// loads, then copies, then arguments, and the choice of the backends last.
std::vector<std::string> all_changes() {
    std::vector<std::string> names;
    for (int minor = 5; minor < 16; ++minor) names.push_back(fmt::format("torch-2.{}", minor));
    for (const char* release :
         {"9.5.1", "9.10.0", "9.11.0", "9.14.0", "9.15.1", "9.23.0", "9.24.1", "9.25.1", "9.26.0"})
        names.push_back(std::string("cudnn-") + release);
    for (const char* name : {"restore-flash",
                             "activate-fa3",
                             "activate-fa4",
                             "unsqueeze",
                             "expand-batch",
                             "split-batch",
                             "repeat-heads",
                             "pad-to-8",
                             "pad-alike",
                             "pad-to-256",
                             "cast",
                             "contiguous",
                             "clone",
                             "drop-mask",
                             "detach-mask",
                             "unsqueeze-mask",
                             "cast-mask",
                             "enable-gqa",
                             "not-causal",
                             "dropout-in-16ths",
                             "no-dropout",
                             "no-grad",
                             "not-deterministic",
                             "leave-context",
                             "select",
                             "lower-right"})
        names.emplace_back(name);
    return names;
}

/// A set of up to `most` changes that gets there, by trying all of them; empty: there is none.
std::string set_that_gets_there(const Call& call, SdpBackend wanted, std::size_t from, int most) {
    static const std::vector<std::string> kChanges = all_changes();
    for (std::size_t i = from; i < kChanges.size(); ++i) {
        if (!can(call, kChanges[i], wanted)) continue;
        Call after = call;
        EXPECT_TRUE(apply(after, kChanges[i], wanted)) << kChanges[i];
        if (runs(after, wanted)) return kChanges[i];
        if (most == 1) continue;
        if (const std::string rest = set_that_gets_there(after, wanted, i + 1, most - 1); !rest.empty())
            return kChanges[i] + " " + rest;
    }
    return "";
}

/// From 2.14 on PyTorch unsqueezes by itself, but other changes are of four dimensions.
TEST(Cure, unsqueezes_for_the_sake_of_another_change) {
    Call call = known_call({2, 14, 0});
    set_shapes(call, {32, 128, 192}, {32, 512, 192}, {32, 512, 192});
    call.is_causal = true;
    EXPECT_EQ(text_of(cure_for(call, flash)), "flash: unsqueeze lower-right");
    set_shapes(call, {8, 521, 256}, {8, 521, 256}, {8, 521, 128});
    EXPECT_EQ(text_of(cure_for(call, flash)), "flash: select unsqueeze pad-alike");
}

/// "Nothing gets there" is true of all sets of up to three changes, tried one after the other.
void expect_none_gets_there(Call (*question_of)(std::mt19937&), std::uint64_t seed, int questions) {
    constexpr int kMostChanges = 3;
    std::mt19937 random(static_cast<std::mt19937::result_type>(random_seed(seed)));
    int none = 0;
    for (int question = 0; question < questions * (long_run() ? 10 : 1); ++question) {
        const Call call = question_of(random);
        for (const SdpBackend wanted : {flash, efficient, cudnn, fa3, fa4}) {
            if (cure_for(call, wanted).found) continue;
            ++none;
            EXPECT_EQ(set_that_gets_there(call, wanted, 0, kMostChanges), "")
                << question << " " << name_of(wanted) << ": " << text_of(call);
        }
    }
    EXPECT_GT(none, questions / 2);
    ::testing::Test::RecordProperty("without_a_cure", none);
}

TEST(Cure, is_missing_only_where_no_three_changes_get_there) { expect_none_gets_there(drawn, 20261130, 40); }
TEST(Cure, is_missing_at_the_edges_only_where_no_three_changes_get_there) {
    expect_none_gets_there(drawn_at_the_edges, 42, 40);
}

/// Every printed cure does what it says, and none of its changes can be left out.
TEST(Cure, does_what_it_says_when_it_is_applied_by_hand) { expect_cures_that_work(drawn, 20261129, 1400, 2100); }
TEST(Cure, does_what_it_says_at_the_edges) { expect_cures_that_work(drawn_at_the_edges, 41, 600, 800); }

/// A mask that is the causal one is replaced by is_causal: that gets there too.
TEST(Cure, a_mask_may_also_be_replaced_by_is_causal) {
    for (const int minor : {4, 8, 11, 15}) {
        Call call = known_call({2, minor, 0});
        set_mask(call, {512, 512});
        const Cure cure = cure_for(call, flash);
        ASSERT_TRUE(cure.found);
        EXPECT_EQ(cure.changes.back().name, "drop-mask");
        Call causal = cure.after;
        causal.is_causal = true;
        EXPECT_TRUE(runs(causal, flash)) << minor;
    }
}

TEST(Cure, takes_the_cheapest_and_says_what_stands_in_the_way) {
    Call call = known_call({2, 11, 0});
    call.enabled = Enabled{.flash = false, .efficient = false, .math = true, .cudnn = false};
    const Cure leave = cure_for(call, cudnn);
    ASSERT_EQ(leave.changes.size(), 1U);
    EXPECT_EQ(leave.changes[0].name, "leave-context");

    call = known_call({2, 8, 0});
    set_elements(call, Element::fp32);
    const Cure cast = cure_for(call, cudnn);  // behind math in this release
    EXPECT_EQ(text_of(cast), "cuDNN: select cast");

    const Cure third = cure_for(known_call({2, 11, 0}), fa3);  // cuDNN comes first there
    EXPECT_EQ(text_of(third), "FA3: select activate-fa3");

    call = known_call({2, 11, 0});
    call.gpu.capability = 80;
    const Cure on_ampere = cure_for(call, fa3);
    EXPECT_FALSE(on_ampere.found);
    ASSERT_EQ(on_ampere.blocked_by.size(), 1U);
    EXPECT_STREQ(on_ampere.blocked_by[0]->name, "fa3-gpu");

    call.gpu.capability.reset();
    EXPECT_FALSE(cure_for(call, flash).missing_fields.empty());
}

TEST(Raises, instead_of_taking_math) {
    Call call = known_call({2, 11, 0});
    set_shapes(call, {2, 32, 512, 128}, {2, 8, 512, 128}, {2, 8, 512, 128});
    EXPECT_EQ(explain(call).raises->error,
              "The size of tensor a (32) must match the size of tensor b (8) at non-singleton dimension 1");
    EXPECT_EQ(text_of(cure_for(call, cudnn)), "cuDNN: enable-gqa");
    call.enable_gqa = true;
    EXPECT_FALSE(explain(call).raises);
    set_shapes(call, {2, 32, 512, 128}, {2, 5, 512, 128}, {2, 5, 512, 128});
    EXPECT_STREQ(explain(call).raises->name, "heads-do-not-divide");
    set_shapes(call, {3, 8, 512, 128}, {2, 8, 512, 128}, {2, 8, 512, 128});
    call.enable_gqa = false;
    EXPECT_EQ(explain(call).raises->error,
              "The size of tensor a (3) must match the size of tensor b (2) at non-singleton dimension 0");
    set_shapes(call, {2, 8, 512, 128}, {1, 1, 512, 128}, {1, 1, 512, 128});
    EXPECT_FALSE(explain(call).raises) << "dimensions of one broadcast";
    call.enabled = Enabled{.flash = false, .efficient = false, .math = true, .cudnn = false};
    set_shapes(call, {2, 1, 512, 128}, {2, 3, 512, 128}, {2, 2, 512, 128});  // the scores have three heads
    EXPECT_EQ(explain(call).raises->error,
              "The size of tensor a (3) must match the size of tensor b (2) at non-singleton dimension 1");
    call.enabled = Enabled{};
    call = known_call({2, 11, 0});
    call.k.element = Element::fp32;
    EXPECT_STREQ(explain(call).raises->name, "dtypes-differ");
}

/// A kernel is called faster by a prediction or a measurement that exceeds the errors, never by its name.
TEST(Ways, faster_is_more_than_the_errors) {
    Call call = known_call({2, 8, 0});
    set_shapes(call, {4, 16, 4096, 128}, {4, 16, 4096, 128}, {4, 16, 4096, 128});
    const Ways from_flash = ways_of(call, flash, Pass::forward, {});
    for (const Way& way : from_flash.all) {
        if (way.gain.missing.empty() && way.cure.found) {
            const double factor = from_flash.baseline.ms / way.gain.kernel_ms;
            EXPECT_EQ(way.gain.faster, factor > 1 + std::hypot(way.gain.error, from_flash.baseline.error));
        }
    }
    // A trace whose kernel is as fast as the prediction has nothing to gain, and one of ten times the time has.
    const double predicted = from_flash.all.front().gain.kernel_ms;
    EXPECT_EQ(ways_of(call, flash, Pass::forward, {predicted, 1, predicted}).first(), nullptr);
    const Ways slow = ways_of(call, flash, Pass::forward, {10 * predicted, 1, 10 * predicted});
    ASSERT_NE(slow.first(), nullptr);
    EXPECT_NEAR(slow.first()->gain.call_factor, 10, 4);
    // On a slowed clock every measured time is long; a kernel that the model calls no faster is not called so for that.
    Call small = known_call({2, 11, 0});
    set_shapes(small, {1, 16, 512, 128}, {1, 16, 512, 128}, {1, 16, 512, 128});
    const Ways usual = ways_of(small, cudnn, Pass::forward, {});
    ASSERT_EQ(usual.first(), nullptr);
    const double longer = 3 * usual.baseline.predicted_ms;
    EXPECT_EQ(ways_of(small, cudnn, Pass::forward, {longer, 1, longer}).first(), nullptr);
    EXPECT_GT(slow.baseline.predicted_ms, 0) << "the model's own time of what ran stands beside the measured one";
    // The math path is predicted, with a wide bar; a card without a name has no prediction.
    const Ways from_math = ways_of(call, math, Pass::forward, {});
    EXPECT_FALSE(from_math.baseline.at_least);
    EXPECT_GE(from_math.baseline.error, 0.3);
    ASSERT_NE(from_math.first(), nullptr);
    call.gpu.name.clear();
    EXPECT_EQ(ways_of(call, math, Pass::forward, {}).first(), nullptr);
}

/// The cheapest faster way comes first: leaving a context before an installation.
TEST(Ways, the_least_effort_comes_first) {
    Call call = known_call({2, 11, 0});
    set_shapes(call, {4, 16, 4096, 128}, {4, 16, 4096, 128}, {4, 16, 4096, 128});
    call.enabled = Enabled{.flash = false, .efficient = false, .math = true, .cudnn = false};
    const Ways ways = ways_of(call, math, Pass::forward, {20, 1, 20});
    ASSERT_NE(ways.first(), nullptr);
    EXPECT_EQ(ways.first()->cure.changes.at(0).name, "leave-context");
    EXPECT_EQ(ways.first()->cure.backend, cudnn);
}

}  // namespace
}  // namespace tessera::diagnose::cure_test
