// SPDX-License-Identifier: Apache-2.0
//
// The estimates for a model of the learner's: closed forms, the pencil's rules against the model, and the measured
// table against the Records.
#include "learn/estimate.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <tuple>

#include "learn/answer.hpp"
#include "learn/quiz.hpp"
#include "measure/record.hpp"
#include "tessera/error.hpp"

namespace tessera::learn::estimate_test {
namespace {

ModelShape with(void (*change)(ModelShape&)) {
    ModelShape model;
    change(model);
    return model;
}

Grade grade(int index, const ModelShape& model, const std::string& answer) {
    return grade_answer(estimate_exercise(index, model), answer);
}

TEST(Estimate, bytes_are_twelve_a_score) {
    EXPECT_TRUE(grade(0, {}, "12 * 8192^2 * 32 * 32 / 10^9").right);
    EXPECT_TRUE(grade(0, {}, "768 GiB").right) << "the same bytes in another unit";
    const ModelShape causal = with([](ModelShape& m) { m.causal = true; });
    EXPECT_TRUE(grade(0, causal, "6 * 8192^2 * 32 * 32 / 10^9").right);
    const std::pair<const char*, const char*> slips[] = {{"12 * 8192^2 * 32 / 10^9", "one layer"},
                                                         {"6 * 8192^2 * 32 * 32 / 10^9", "two directions"},
                                                         {"12 * 8192^2 * 8 * 32 / 10^9", "scores of its own"}};
    for (const auto& [answer, says] : slips) {
        const Grade wrong = grade(0, {}, answer);
        EXPECT_FALSE(wrong.right) << answer;
        EXPECT_NE(wrong.text.find(says), std::string::npos) << wrong.text;
    }
}

/// A learner who follows the rules of lesson 15 is right, on every GPU that they are written for.
TEST(Estimate, rules_of_thumb_count_as_right) {
    struct Gpu {
        const char* name;
        double bytes, peak, reach;
    };
    for (const Gpu& gpu : {Gpu{"h200", 4800, 989, 0.65}, Gpu{"h100", 3350, 989, 0.65}, Gpu{"a100", 2039, 312, 0.6}}) {
        for (const std::int64_t len : {4096, 8192}) {
            ModelShape model;
            model.device = gpu.name, model.len = len;
            const double scores = 32.0 * 32 * static_cast<double>(len * len);
            const double standard = 12 * scores / gpu.bytes / 1e6 / 0.7;
            const double flash = 512 * scores / gpu.peak / 1e9 / gpu.reach;
            EXPECT_TRUE(grade(1, model, std::to_string(standard)).right) << gpu.name << len << " " << standard;
            EXPECT_TRUE(grade(2, model, std::to_string(flash)).right) << gpu.name << len << " " << flash;
            EXPECT_TRUE(grade(3, model, std::to_string(standard / flash)).right) << gpu.name << len;
            EXPECT_TRUE(grade(4, model, std::to_string(1 / (0.7 + 0.3 * flash / standard))).right) << gpu.name << len;
        }
    }
    const ModelShape short_one = with([](ModelShape& m) { m.len = 1024; });
    const std::string by_rule = std::to_string(12.0 * 1024 * 1024 * 1024 / 4800 / 1e6 / 0.7);
    EXPECT_NE(grade(1, short_one, by_rule).text.find("They do not hold here: in short calls"), std::string::npos);
    EXPECT_FALSE(grade(1, {}, "10").right);
    EXPECT_NE(grade(2, {}, std::to_string(512 * 1024.0 * 8192 * 8192 / 989.4 / 1e9)).text.find("peak"),
              std::string::npos);
}

TEST(Estimate, answers_name_the_measured_call) {
    const std::string h200 = solution_of(estimate_exercise(3, {}));
    EXPECT_NE(h200.find("2 x 8192 tokens, 16 heads of 128, no mask, standard over fa3: 7.162 / 1.568 = 4.6 times"),
              std::string::npos)
        << h200;
    const ModelShape h100 = with([](ModelShape& m) { m.device = "h100"; });
    EXPECT_NE(solution_of(estimate_exercise(1, h100)).find("standard was not measured"), std::string::npos);
    EXPECT_NE(solution_of(estimate_exercise(2, h100)).find("1.471 ms"), std::string::npos);
    EXPECT_NE(solution_of(estimate_exercise(3, h100)).find("the one GPU on which both were measured"),
              std::string::npos);
    const ModelShape a100 = with([](ModelShape& m) { m.device = "a100"; });
    EXPECT_NE(solution_of(estimate_exercise(2, a100)).find("No measurement"), std::string::npos);
    EXPECT_EQ(nearest_call(with([](ModelShape& m) { m.head_dim = 64, m.len = 3000, m.causal = true; })).text(),
              "4 x 4096 tokens, 32 heads of 64, causal");
}

TEST(Estimate, measured_table_is_that_of_the_records) {
    using Key = std::tuple<std::int64_t, bool, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
    std::map<Key, std::map<std::string, double>> recorded;
    for (const char* file : {"h200/forward", "h200/peers", "h100/forward_beside_fa3"}) {
        const std::string path = std::string(TESSERA_SOURCE_DIR) + "/bench/results/" + file + ".jsonl";
        for (const measure::Record& record : measure::read_records(path)) {
            if (record.pass != "forward") continue;
            const std::string device = std::string(file).substr(0, 4);
            const bool standard = record.by == "tessera" && record.schedule == "standard";
            const bool theirs = record.by == record.schedule && std::string(file) != "h200/forward";
            if (!standard && !theirs) continue;
            recorded[{record.head_dim, record.mask == "causal", record.len_q, record.batch, record.heads_q,
                      record.heads_kv}][device + " " + record.schedule] = record.ms;
        }
    }
    EXPECT_EQ(measured_calls().size(), recorded.size());
    for (const MeasuredCall& call : measured_calls()) {
        const auto& times =
            recorded.at({call.head_dim, call.causal, call.len, call.batch, call.heads_q, call.heads_kv});
        for (const auto& [name, ms] :
             {std::pair("h200 standard", call.h200.standard), std::pair("h200 fa2", call.h200.fa2),
              std::pair("h200 fa3", call.h200.fa3), std::pair("h100 standard", call.h100.standard),
              std::pair("h100 fa2", call.h100.fa2), std::pair("h100 fa3", call.h100.fa3)}) {
            const auto found = times.find(name);
            EXPECT_NEAR(ms, found == times.end() ? 0 : found->second, 5e-4 * ms) << call.text() << " " << name;
        }
    }
}

TEST(Estimate, models_that_cannot_be_are_refused) {
    const std::pair<void (*)(ModelShape&), const char*> wrong[] = {
        {[](ModelShape& m) { m.device = "xeon-16"; }, "device: expected a GPU that computes in bf16: "},
        {[](ModelShape& m) { m.device = "h300"; }, "got \"h300\""},
        {[](ModelShape& m) { m.layers = 0; }, "layers: expected 1 to 1000, got 0"},
        {[](ModelShape& m) { m.heads_kv = 5; }, "heads: expected"},
        {[](ModelShape& m) { m.head_dim = 300; }, "head_dim: expected 1 to 256, got 300"},
        {[](ModelShape& m) { m.len = 0; }, "len: expected"},
        {[](ModelShape& m) { m.share = 1; }, "share: expected"},
        {[](ModelShape& m) { m.len = 1 << 20; }, "for the scores of all pairs, h200 has 140.0 GiB"}};
    for (const auto& [change, says] : wrong) {
        try {
            estimate_exercise(0, with(change));
            ADD_FAILURE() << says;
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
        }
    }
}

TEST(Estimate, is_a_quiz_with_names_of_its_own) {
    const ExerciseId id = exercise_of("estimate d");
    EXPECT_EQ(id.saved(), "estimate d");
    EXPECT_EQ(id.make().task, exercise_for(id, {}).task);
    const ModelShape short_one = with([](ModelShape& m) { m.len = 512; });
    EXPECT_NE(exercise_for(id, short_one).value, id.make().value);
    EXPECT_EQ(exercise_for(exercise_of("6a"), short_one).task, exercise_of("6a").make().task);
    for (const char* none : {"estimate", "estimate f", "estimatea"}) EXPECT_THROW(exercise_of(none), Error) << none;
}

}  // namespace
}  // namespace tessera::learn::estimate_test
