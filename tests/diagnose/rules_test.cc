// SPDX-License-Identifier: Apache-2.0
//
// Every row of the table has a call that it refuses and a neighbour that it does not.
#include "diagnose/rules.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <string>

#include "diagnose/calls.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose::rules_test {
namespace {

using Change = std::function<void(Call&)>;

struct Case {
    Change trigger;
    Change neighbour;
};

Change dims(std::int64_t qk, std::int64_t v) {
    return [=](Call& c) { set_shapes(c, {2, 8, 512, qk}, {2, 8, 512, qk}, {2, 8, 512, v}); };
}
Change heads(std::int64_t q, std::int64_t k, std::int64_t v, bool gqa) {
    return [=](Call& c) {
        set_shapes(c, {2, q, 512, 64}, {2, k, 512, 64}, {2, v, 512, 64});
        c.enable_gqa = gqa;
    };
}
Change lengths(std::int64_t q, std::int64_t k) {
    return [=](Call& c) { set_shapes(c, {2, 8, q, 64}, {2, 8, k, 64}, {2, 8, k, 64}); };
}
Change batches(std::int64_t q, std::int64_t k) {
    return [=](Call& c) { set_shapes(c, {q, 8, 512, 64}, {k, 8, 512, 64}, {k, 8, 512, 64}); };
}
Change gpu(int capability) {
    return [=](Call& c) { c.gpu.capability = capability; };
}
Change elements(Element q, Element k) {
    return [=](Call& c) { c.q.element = q, c.k.element = k, c.v.element = k; };
}
Change k_stride(std::int64_t last) {
    return [=](Call& c) { c.k.strides->back() = last; };
}
Change nested(std::int64_t dim) {
    return [=](Call& c) {
        dims(dim, dim)(c);
        c.nested = true;
    };
}
Change release(const Version& version) {
    return [=](Call& c) { c.torch = version; };
}
Change training(std::int64_t dim, double dropout, int capability) {
    return [=](Call& c) {
        dims(dim, dim)(c);
        c.q.requires_grad = true, c.dropout = dropout, c.gpu.capability = capability;
    };
}
Change decode_on(int capability, int cudnn) {
    return [=](Call& c) { lengths(1, 512)(c), c.gpu.capability = capability, c.cudnn = cudnn; };
}
Change trained_on(std::int64_t keys, int cudnn) {
    return [=](Call& c) {
        lengths(512, keys)(c);
        c.q.requires_grad = true, c.is_causal = false, c.gpu.capability = 90, c.cudnn = cudnn;
    };
}
void nothing(Call&) {}

using Cases = std::map<std::string, Case>;

const Change kThreeDims = [](Call& c) { set_shape(c.k, {8, 512, 64}); };
const Change kFp32 = elements(Element::fp32, Element::fp32);

Cases flash_cases() {
    return {
        {"flash-off", {[](Call& c) { c.enabled->flash = false; }, [](Call& c) { c.enabled->cudnn = false; }}},
        {"flash-rank", {kThreeDims, nothing}},
        {"flash-mask",
         {[](Call& c) {
              set_mask(c, {512, 512});
          },
          [](Call& c) { c.is_causal = true; }}},
        {"flash-head-dim", {dims(192, 128), dims(256, 256)}},
        {"flash-gpu", {gpu(75), gpu(80)}},
        {"flash-wide-training", {training(200, 0, 86), training(200, 0, 80)}},
        {"flash-causal-not-square",
         {[](Call& c) { lengths(128, 512)(c), c.is_causal = true; }, [](Call& c) { lengths(128, 512)(c); }}},
        {"flash-dtype", {kFp32, elements(Element::bf16, Element::bf16)}},
        {"flash-nested-head-dim", {nested(60), dims(60, 60)}},
        {"flash-batch", {batches(2, 1), batches(3, 3)}},
        {"flash-heads", {heads(8, 2, 2, false), heads(4, 4, 4, false)}},
        {"flash-heads-k-v", {heads(8, 2, 4, true), heads(8, 2, 2, true)}},
        {"flash-heads-divide", {heads(8, 3, 3, true), heads(9, 3, 3, true)}},
        {"flash-zero-length", {lengths(0, 512), lengths(1, 512)}},
        {"flash-stride", {k_stride(2), [](Call& c) { dims(1, 1)(c), c.k.strides->back() = 2; }}},
        {"flash-too-many", {batches(65536, 65536), batches(65535, 65535)}},
        {"flash-nested-shapes", {nested(64), nothing}},
    };
}

Cases efficient_cases() {
    return {
        {"efficient-off", {[](Call& c) { c.enabled->efficient = false; }, [](Call& c) { c.enabled->flash = false; }}},
        {"efficient-gpu", {gpu(37), gpu(50)}},
        {"efficient-rank", {kThreeDims, nothing}},
        {"efficient-head-dim", {dims(68, 68), dims(72, 72)}},
        {"efficient-offset", {[](Call& c) { c.k.storage_offset = 4; }, [](Call& c) { c.k.storage_offset = 8; }}},
        {"efficient-nested-training",
         {[](Call& c) { c.nested = true, c.v.requires_grad = true; }, [](Call& c) { c.v.requires_grad = true; }}},
        {"efficient-nested-shapes", {nested(64), nothing}},
        {"efficient-zero-length", {lengths(512, 0), lengths(512, 1)}},
        {"efficient-stride",
         {[](Call& c) {
              set_mask(c, {512, 512}), c.mask.strides->back() = 0;
          },
          [](Call& c) {
              set_mask(c, {512, 512});
          }}},
        {"efficient-batch", {batches(2, 1), batches(1, 1)}},
        {"efficient-heads", {heads(8, 2, 2, false), heads(2, 2, 2, true)}},
        {"efficient-heads-k-v", {heads(8, 2, 4, true), heads(8, 4, 4, true)}},
        {"efficient-heads-divide", {heads(8, 3, 3, true), heads(6, 3, 3, true)}},
        {"efficient-dtype", {elements(Element::bf16, Element::fp32), kFp32}},
    };
}

Cases cudnn_cases() {
    return {
        {"cudnn-opt-in", {nothing, release({2, 5, 0})}},
        {"cudnn-off", {[](Call& c) { c.enabled->cudnn = false; }, [](Call& c) { c.enabled->math = false; }}},
        {"cudnn-dropout-version",
         {[](Call& c) { c.cudnn = 91200, c.dropout = 0.125; }, [](Call& c) { c.cudnn = 91400, c.dropout = 0.125; }}},
        {"cudnn-nested", {nested(64), nothing}},
        {"cudnn-rank", {kThreeDims, nothing}},
        {"cudnn-deterministic", {[](Call& c) { c.deterministic = true; }, nothing}},
        {"cudnn-dtype", {kFp32, elements(Element::bf16, Element::bf16)}},
        {"cudnn-mask-gradient",
         {[](Call& c) {
              set_mask(c, {512, 512}, MaskKind::floating), c.mask.requires_grad = true;
          },
          [](Call& c) {
              set_mask(c, {512, 512}, MaskKind::floating);
          }}},
        {"cudnn-mask-shape",
         {[](Call& c) {
              set_mask(c, {8, 512, 512});
          },
          [](Call& c) {
              set_mask(c, {2, 1, 1, 512});
          }}},
        {"cudnn-gpu", {gpu(75), gpu(86)}},
        {"cudnn-dropout-16ths", {[](Call& c) { c.dropout = 0.1; }, [](Call& c) { c.dropout = 0.125; }}},
        {"cudnn-zero-length", {lengths(0, 512), lengths(512, 512)}},
        {"cudnn-stride", {k_stride(2), k_stride(1)}},
        {"cudnn-batch", {batches(2, 1), batches(1, 1)}},
        {"cudnn-heads", {heads(8, 2, 2, false), heads(8, 2, 2, true)}},
        {"cudnn-heads-divide", {heads(8, 4, 3, true), heads(8, 4, 2, true)}},
        {"cudnn-too-many", {heads(65536, 65536, 65536, false), heads(65535, 65535, 65535, false)}},
        {"cudnn-decode", {decode_on(100, 92400), decode_on(100, 92401)}},
        {"cudnn-query-gradient", {trained_on(576, 92500), trained_on(576, 92600)}},
        {"cudnn-head-dim", {dims(264, 264), dims(128, 128)}},
        {"cudnn-head-dim-8", {dims(60, 60), dims(64, 64)}},
        {"cudnn-length-1", {lengths(1, 512), lengths(2, 512)}},
        {"cudnn-one-key", {lengths(512, 1), lengths(1, 512)}},
        {"cudnn-one-query-dropout",
         {[](Call& c) { lengths(1, 512)(c), c.dropout = 0.5; }, [](Call& c) { lengths(2, 512)(c), c.dropout = 0.5; }}},
        {"cudnn-backward-head-dim", {training(192, 0, 90), [](Call& c) { dims(192, 192)(c); }}},
    };
}

Cases other_cases() {
    return {
        {"math-off", {[](Call& c) { c.enabled->math = false; }, nothing}},
        {"fa3-release", {nothing, release({2, 11, 0})}},
        {"fa3-gpu", {gpu(100), gpu(90)}},
        {"fa3-dropout", {[](Call& c) { c.dropout = 0.1; }, nothing}},
        {"fa4-release", {nothing, release({2, 10, 0})}},
        {"fa4-gpu", {gpu(80), gpu(100)}},
        {"fa4-dropout", {[](Call& c) { c.dropout = 0.1; }, nothing}},
    };
}

Cases cases() {
    Cases all = flash_cases();
    for (const Cases& more : {efficient_cases(), cudnn_cases(), other_cases()}) all.insert(more.begin(), more.end());
    return all;
}

const Verdict& verdict_of(const Explanation& explanation, SdpBackend backend) {
    for (const Verdict& verdict : explanation.verdicts) {
        if (verdict.backend == backend) return verdict;
    }
    throw std::logic_error("every backend has a verdict");
}

bool refused_by(const Call& call, const Rule& rule) {
    const Explanation explanation = explain(call);
    for (const Rule* refusal : verdict_of(explanation, rule.backend).refusals) {
        if (std::string(refusal->name) == rule.name) return true;
    }
    return false;
}

bool about_sequences(const Rule& rule) { return std::string(rule.name).find("nested-shapes") != std::string::npos; }

Call changed(const Version& torch, const Change& change) {
    Call call = known_call(torch);
    change(call);
    return call;
}

TEST(Rules, every_row_refuses_its_case_and_not_the_neighbour) {
    const auto all = cases();
    std::set<const Rule*> triggered;
    for (const Rule& rule : rules()) {
        ASSERT_TRUE(all.count(rule.name)) << rule.name << " has no case";
        const Case& of_rule = all.at(rule.name);
        const std::string where =
            std::string(rule.name) + " in " + std::to_string(rule.from.major) + "." + std::to_string(rule.from.minor);
        EXPECT_FALSE(refused_by(changed(rule.from, of_rule.neighbour), rule)) << where;
        const Call call = changed(rule.from, of_rule.trigger);
        if (about_sequences(rule)) {  // the lengths of the sequences are unknown, and so is the verdict
            const Verdict verdict = verdict_of(explain(call), rule.backend);
            EXPECT_EQ(Standing::unknown, verdict.standing) << where;
            ASSERT_FALSE(verdict.missing_fields.empty()) << where;
            EXPECT_NE(std::string::npos, verdict.missing_fields.front().find("sequences")) << where;
            triggered.insert(&rule);
            continue;
        }
        EXPECT_TRUE(refused_by(call, rule)) << where;
        if (rule.refuses(call).is_true()) triggered.insert(&rule);
    }
    EXPECT_EQ(rules().size(), triggered.size()) << "every row was triggered";
    std::set<std::string> names;
    for (const Rule& rule : rules()) names.insert(rule.name);
    EXPECT_EQ(names.size(), all.size()) << "every case belongs to a row";
}

Call on_rocm(const Version& torch) {
    Call call = known_call(torch);
    call.gpu = {.name = "AMD Instinct MI300X"};
    recognise_amd(call.gpu);
    call.prefers_ck = false;
    return call;
}

Change gfx(const char* architecture) {
    return [=](Call& c) { c.gpu.gfx = architecture; };
}

Cases rocm_cases() {
    const Change masked = [](Call& c) { set_mask(c, {512, 512}, MaskKind::floating); };
    return {
        {"rocm-flash-head-dim", {dims(520, 520), dims(256, 256)}},
        {"rocm-flash-gpu", {gfx("gfx906"), gfx("gfx90a")}},
        {"rocm-flash-dtype", {kFp32, elements(Element::bf16, Element::bf16)}},
        {"rocm-efficient-gpu", {gfx("gfx1030"), [](Call& c) { gfx("gfx1030")(c), c.prefers_ck = true; }}},
        {"rocm-efficient-head-dim",
         {[](Call& c) {
              set_shapes(c, {2, 8, 512, 72}, {2, 8, 512, 64}, {2, 8, 512, 64});
          },
          dims(128, 128)}},
        {"rocm-efficient-nested", {nested(64), nothing}},
        {"rocm-efficient-heads", {heads(8, 2, 2, true), heads(2, 2, 2, true)}},
        {"rocm-efficient-mask-dtype", {[=](Call& c) { masked(c), c.mask.element = Element::fp32; }, masked}},
        {"rocm-efficient-dtype", {[](Call& c) { kFp32(c), c.prefers_ck = true; }, kFp32}},
        {"rocm-cudnn",
         {nothing,
          [](Call& c) {
              c.gpu = {"NVIDIA H200", 90, false};
          }}},
        {"rocm-fa3",
         {nothing,
          [](Call& c) {
              c.gpu = {"NVIDIA H200", 90, false};
          }}},
        {"rocm-fa4",
         {nothing,
          [](Call& c) {
              c.gpu = {"NVIDIA H200", 90, false};
          }}},
    };
}

/// Tests the rows that are ROCm's own; the table above has the others.
TEST(Rules, every_row_of_rocm_refuses_its_case_and_not_the_neighbour) {
    const Cases all = rocm_cases();
    std::set<std::string> seen;
    for (const Rule& rule : rocm_rules()) {
        if (std::string(rule.name).substr(0, 5) != "rocm-") continue;
        ASSERT_TRUE(all.count(rule.name)) << rule.name << " has no case";
        seen.insert(rule.name);
        Call trigger = on_rocm(rule.from);
        all.at(rule.name).trigger(trigger);
        EXPECT_TRUE(refused_by(trigger, rule)) << rule.name;
        Call neighbour = on_rocm(rule.from);
        all.at(rule.name).neighbour(neighbour);
        EXPECT_FALSE(refused_by(neighbour, rule)) << rule.name;
    }
    EXPECT_EQ(seen.size(), all.size()) << "every case belongs to a row";
}

TEST(Rules, rocm_takes_flash_first_and_says_what_it_does_not_know) {
    EXPECT_EQ(explain(on_rocm({2, 10, 0})).taken, SdpBackend::flash);
    Call masked = on_rocm({2, 10, 0});
    set_mask(masked, {512, 512});
    EXPECT_EQ(explain(masked).taken, SdpBackend::efficient);
    heads(8, 2, 2, true)(masked);
    EXPECT_EQ(explain(masked).taken, SdpBackend::math) << "grouped heads with a mask";
    Call wide = on_rocm({2, 7, 0});
    dims(512, 512)(wide);
    EXPECT_EQ(explain(wide).taken, std::nullopt) << "AOTriton 0.9 takes them, and nobody knows whether 2.7 asks it";
    wide.torch = Version{2, 10, 0};
    EXPECT_EQ(explain(wide).taken, SdpBackend::flash);
    Call experimental = on_rocm({2, 10, 0});
    gfx("gfx1100")(experimental);
    EXPECT_EQ(explain(experimental).taken, std::nullopt);
    Call unnamed = on_rocm({2, 10, 0});
    gfx("")(unnamed);
    EXPECT_EQ(explain(unnamed).taken, std::nullopt);
}

/// If a later release refuses a call because its result is wrong, the answer for a release that takes the call says so.
TEST(Rules, faults_of_cudnn_are_said) {
    const auto decoding = [](const Version& version) {
        Call c = known_call(version);
        decode_on(100, 92400)(c);
        c.cuda = 13000;
        return explain(c);
    };
    const Explanation before = decoding({2, 13, 0});
    EXPECT_EQ(before.taken, SdpBackend::cudnn);
    ASSERT_FALSE(before.remarks.empty());
    EXPECT_NE(before.remarks.back().find("pytorch#193893"), std::string::npos);
    EXPECT_EQ(decoding({2, 14, 0}).taken, SdpBackend::flash);
    Call trained = known_call({2, 13, 0});
    trained_on(576, 92000)(trained);
    trained.cuda = 13000;
    EXPECT_EQ(explain(trained).taken, SdpBackend::cudnn);
    EXPECT_NE(explain(trained).remarks.back().find("pytorch#196678"), std::string::npos);
    trained.is_causal = true;
    set_shapes(trained, {2, 8, 576, 64}, {2, 8, 576, 64}, {2, 8, 576, 64});
    EXPECT_EQ(explain(trained).remarks.back().find("pytorch#196678"), std::string::npos);
}

TEST(Rules, amd_gpus_are_known_by_their_names) {
    const auto architecture = [](const char* name) {
        Gpu gpu{.name = name, .capability = 94};
        recognise_amd(gpu);
        return gpu.rocm == true ? gpu.gfx + "!" : gpu.gfx;
    };
    EXPECT_EQ(architecture("AMD Instinct MI300X"), "gfx942!");
    EXPECT_EQ(architecture("AMD Instinct MI250X"), "gfx90a!");
    EXPECT_EQ(architecture("AMD Instinct MI355X"), "gfx950!");
    EXPECT_EQ(architecture("AMD Radeon RX 7900 XTX"), "!");
    EXPECT_EQ(architecture("NVIDIA H200"), "");
}

/// Rows of one name follow each other without a gap, so a check never vanishes between two releases.
TEST(Rules, rows_of_one_name_follow_each_other) {
    std::map<std::string, Version> until;
    std::vector<Rule> all(rules().begin(), rules().end());
    for (const Rule& rule : rocm_rules()) {
        if (std::string(rule.name).substr(0, 5) == "rocm-") all.push_back(rule);
    }
    for (const Rule& rule : all) {
        EXPECT_LT(rule.from, rule.until) << rule.name;
        if (until.count(rule.name) > 0) {
            EXPECT_EQ(until[rule.name], rule.from) << rule.name;
        }
        until[rule.name] = rule.until;
        EXPECT_NE('\0', rule.source[0]) << rule.name;
        EXPECT_NE('\0', rule.meaning[0]) << rule.name;
    }
}

}  // namespace
}  // namespace tessera::diagnose::rules_test
