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

#include "diagnose/call_inputs.hpp"
#include "diagnose/calls.hpp"
#include "diagnose/ways.hpp"
#include "long_run.hpp"

namespace tessera::diagnose::cure_test {
namespace {

using enum SdpBackend;

std::int64_t up_to_8(std::int64_t size) { return (size + 7) / 8 * 8; }

/// A copy is packed, and begins at the first element of its storage.
void resize(Call& c, std::size_t dim, std::int64_t q, std::int64_t k, std::int64_t v) {
    for (const auto& [t, size] : {std::pair{&c.q, q}, {&c.k, k}, {&c.v, v}}) {
        Sizes shape = *t->shape;
        if (shape[dim] == size) continue;
        shape[dim] = size;
        set_shape(*t, shape);
    }
}

/// A view keeps strides and offset.
void view(Call& c, std::int64_t batch) {
    for (Operand* t : {&c.q, &c.k, &c.v}) {
        if (t->shape->front() == 1) t->strides->front() = 0;
        t->shape->front() = batch;
    }
}

void four(Operand& t) {
    while (t.shape->size() < 4) {
        t.shape->insert(t.shape->begin(), 1);
        if (t.strides) t.strides->insert(t.strides->begin(), 1);
    }
}

/// Does what a printed change says. False for a name that this file does not know.
bool apply(Call& c, const std::string& name, SdpBackend wanted) {
    const auto size = [](const Operand& t, std::size_t dim) { return (*t.shape)[dim]; };
    const auto version = [&](std::size_t from) { return name.substr(from); };
    const auto four_each = [&] { return c.q.shape->size() == 4 && c.k.shape->size() == 4 && c.v.shape->size() == 4; };
    for (const char* of_four : {"expand-", "split-", "repeat-", "pad-"}) {
        if (name.starts_with(of_four) && !four_each()) return true;  // unsqueeze was left out
    }
    if (name == "leave-context") c.enabled = Enabled{};
    else if (name == "select")
        c.enabled = Enabled{.flash = wanted == flash || wanted == fa3 || wanted == fa4,
                            .efficient = wanted == efficient,
                            .math = false,
                            .cudnn = wanted == cudnn};
    else if (name == "not-deterministic") c.deterministic = false;
    else if (name == "unsqueeze") {
        four(c.q), four(c.k), four(c.v);
        if (c.mask.shape && c.mask.shape->size() == 3) four(c.mask);
    } else if (name == "contiguous" || name == "clone") {
        for (Operand* t : {&c.q, &c.k, &c.v, &c.mask}) {
            if (!t->shape || !t->strides) continue;
            const bool moves = name == "clone" ? t->storage_offset.value_or(0) != 0 : t->strides->back() != 1;
            if (moves)
                *t = [&] {
                    Operand packed = tensor(*t->shape, t->element.value_or(Element::other));
                    packed.requires_grad = t->requires_grad;
                    return packed;
                }();
        }
    } else if (name == "drop-mask")
        c.mask_kind = MaskKind::none, c.mask = Operand{.requires_grad = false}, c.is_causal = false;
    else if (name == "detach-mask") c.mask.requires_grad = false;
    else if (name == "unsqueeze-mask") {
        c.mask.shape->insert(c.mask.shape->begin(), 1);
        if (c.mask.strides) c.mask.strides->insert(c.mask.strides->begin(), 1);
    } else if (name == "cast-mask") c.mask.element = c.q.element;
    else if (name == "expand-batch") {
        const std::int64_t most = std::max({size(c.q, 0), size(c.k, 0), size(c.v, 0)});
        view(c, most);
    } else if (name == "split-batch") {  // a batch of one is not cut
        for (Operand* t : {&c.q, &c.k, &c.v}) t->shape->front() = std::min<std::int64_t>(t->shape->front(), 65535);
    } else if (name == "enable-gqa") c.enable_gqa = true;
    else if (name == "repeat-heads") {
        resize(c, 1, size(c.q, 1), size(c.q, 1), size(c.q, 1));
        c.enable_gqa = false;
    } else if (name == "pad-to-8") resize(c, 3, up_to_8(size(c.q, 3)), up_to_8(size(c.k, 3)), up_to_8(size(c.v, 3)));
    else if (name == "pad-alike") {
        const std::int64_t most = up_to_8(std::max(size(c.q, 3), size(c.v, 3)));
        resize(c, 3, most, most, most);
    } else if (name == "pad-to-256") resize(c, 3, 256, 256, 256);
    else if (name == "not-causal") c.is_causal = false;
    else if (name == "lower-right") {  // its class asks flash alone
        c.is_causal = false;
        c.enabled = Enabled{.flash = true, .efficient = false, .math = false, .cudnn = false};
    } else if (name == "cast") {
        const Element q = *c.q.element;
        const bool bf16 = c.gpu.rocm == true || *c.gpu.capability >= 80;
        const bool stays =
            q == Element::fp16 || (q == Element::bf16 && bf16) || (q == Element::fp32 && wanted == efficient);
        set_elements(c, stays ? q : bf16 ? Element::bf16 : Element::fp16);
        if (c.mask_kind == MaskKind::floating) c.mask.element = c.q.element;
    } else if (name == "dropout-in-16ths") c.dropout = std::clamp(std::round(*c.dropout * 16), 1.0, 15.0) / 16;
    else if (name == "no-dropout") c.dropout = 0;
    else if (name == "no-grad") c.q.requires_grad = c.k.requires_grad = c.v.requires_grad = false;
    else if (name == "restore-flash") c.flash_implementation = FlashImplementation::own;
    else if (name == "activate-fa3") c.flash_implementation = FlashImplementation::fa3;
    else if (name == "activate-fa4") c.flash_implementation = FlashImplementation::fa4;
    else if (name.starts_with("cudnn-")) {
        int major = 0, minor = 0, patch = 0;
        if (std::sscanf(version(6).c_str(), "%d.%d.%d", &major, &minor, &patch) != 3) return false;
        c.cudnn = major * 10000 + minor * 100 + patch;
    } else if (name.starts_with("torch-")) {
        c.torch = Version{2, std::stoi(version(8)), 0};
        c.cudnn.reset(), c.cuda.reset();
        std::vector<std::string> assumed;
        c = assume_defaults(c, assumed);
    } else return false;
    return true;
}

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

/// A question that somebody may ask: everything but the release is drawn from the usual and the unusual.
Call drawn(std::mt19937& random) {
    const auto one_of = [&](auto list) {
        return *(list.begin() + static_cast<std::ptrdiff_t>(random() % list.size()));
    };
    const auto chance = [&](unsigned of) { return random() % of == 0; };
    Call c;
    c.torch = Version{2, one_of(std::initializer_list<int>{4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}), 0};
    c.gpu = {"", one_of(std::initializer_list<int>{70, 75, 80, 86, 89, 90, 100, 103, 120, 121}), false};
    const std::int64_t d = one_of(std::initializer_list<std::int64_t>{64, 72, 100, 128, 192, 200, 256, 320, 512});
    const std::int64_t dv = chance(4) ? one_of(std::initializer_list<std::int64_t>{64, 100, 128, 256}) : d;
    const std::int64_t heads = one_of(std::initializer_list<std::int64_t>{8, 12, 32});
    const std::int64_t kv = chance(3) ? one_of(std::initializer_list<std::int64_t>{1, 2, 5, 8}) : heads;
    const std::int64_t q = one_of(std::initializer_list<std::int64_t>{1, 128, 521, 2048});
    const std::int64_t k = chance(3) ? one_of(std::initializer_list<std::int64_t>{1, 64, 512, 2048}) : q;
    const std::int64_t batch = chance(30) ? 70000 : 2;
    const Element element = one_of(
        std::initializer_list<Element>{Element::bf16, Element::bf16, Element::fp16, Element::fp32, Element::fp64});
    c.q = tensor({batch, heads, q, d}, element);
    c.k = tensor({chance(12) ? 1 : batch, kv, k, d}, chance(12) ? Element::fp32 : element);
    c.v = tensor({(*c.k.shape)[0], kv, k, dv}, *c.k.element);
    if (chance(12)) {
        for (Operand* t : {&c.q, &c.k, &c.v}) set_shape(*t, Sizes(t->shape->begin() + 1, t->shape->end()));
    }
    c.mask_kind = MaskKind::none, c.is_causal = chance(3), c.mask.requires_grad = false;
    if (chance(3)) {
        c.is_causal = false;
        set_mask(c, chance(3) ? Sizes{heads, q, k} : Sizes{q, k}, chance(2) ? MaskKind::boolean : MaskKind::floating);
        c.mask.element = c.mask_kind == MaskKind::boolean ? Element::other : element;
        c.mask.requires_grad = chance(4);
    }
    if (chance(10)) c.k.strides->back() = 2;
    if (chance(10)) c.q.storage_offset = 3;
    c.enable_gqa = kv != heads && chance(2);
    if (chance(4)) c.dropout = one_of(std::initializer_list<double>{0.1, 0.25, 0.02});
    if (chance(4)) c.q.requires_grad = c.k.requires_grad = c.v.requires_grad = true;
    if (chance(6)) c.deterministic = true;
    if (chance(5))
        c.enabled = Enabled{.flash = chance(2), .efficient = chance(2), .math = chance(2), .cudnn = chance(2)};
    std::vector<std::string> assumed;
    return assume_defaults(c, assumed);
}

/// A question with what drawn() never has: the edges of releases, installed cuDNNs and FlashAttentions, fp8, masks that
/// broadcast, expanded and empty tensors, nested ones, MQA, the newest GPUs.
Call drawn_at_the_edges(std::mt19937& random) {
    const auto one_of = [&](auto list) {
        return *(list.begin() + static_cast<std::ptrdiff_t>(random() % list.size()));
    };
    const auto chance = [&](unsigned of) { return random() % of == 0; };
    Call c = drawn(random);
    if (c.torch->minor == 5) c.torch->patch = chance(2) ? 1 : 0;
    c.gpu.capability = one_of(std::initializer_list<int>{70, 75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121});
    if (chance(3))
        c.cudnn = one_of(std::initializer_list<int>{90000, 90100, 90501, 91000, 91100, 91200, 91400, 91500, 91501,
                                                    91900, 92200, 92201, 92400, 92401, 92500, 92501, 92600});
    if (chance(4)) c.cuda = one_of(std::initializer_list<int>{12010, 12080, 13000, 13020});
    if (chance(5))
        c.flash_implementation =
            one_of(std::initializer_list<FlashImplementation>{FlashImplementation::fa3, FlashImplementation::fa4});
    if (chance(12)) set_elements(c, Element::fp8_e4m3);
    if (chance(40)) c.nested = true;
    const bool four = c.q.shape->size() == 4;
    if (four && chance(4)) {
        const Sizes& q = *c.q.shape;
        const std::int64_t keys = (*c.k.shape)[2];
        const Sizes shapes[] = {{q[0], 1, 1, keys}, {1, 1, q[2], keys}, {q[0], q[1], q[2], keys}, {1, keys}, {keys}};
        c.is_causal = false;
        set_mask(c, shapes[random() % 5], chance(2) ? MaskKind::boolean : MaskKind::floating);
        if (c.mask_kind == MaskKind::floating) c.mask.element = chance(3) ? Element::fp32 : *c.q.element;
        if (chance(4)) c.mask.strides->back() = 2;
    }
    if (four && chance(10)) c.k.strides->front() = c.v.strides->front() = 0;  // expanded
    if (four && chance(40)) {
        for (Operand* t : {&c.k, &c.v}) {
            Sizes empty = *t->shape;
            empty[2] = 0;
            set_shape(*t, empty);
        }
    }
    return c;
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

/// Every printed cure does what it says, and none of its changes can be left out.
TEST(Cure, does_what_it_says_when_it_is_applied_by_hand) { expect_cures_that_work(drawn, 20261129, 600, 900); }
TEST(Cure, does_what_it_says_at_the_edges) { expect_cures_that_work(drawn_at_the_edges, 41, 300, 400); }

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
