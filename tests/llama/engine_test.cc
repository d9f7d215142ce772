// SPDX-License-Identifier: Apache-2.0
//
// Whole models: greedy texts beside those of transformers and of the trainer, and the bits of a text in any batch.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "llama/support.hpp"

namespace llama::test::engine_test {
namespace {

TEST(Engine, says_what_the_trained_model_says) {
    const nlohmann::json expected = read_json(kTrained + "/expected.json");
    const std::vector<std::int32_t> prompt = bytes_of(expected["prompt"]);
    std::vector<std::int32_t> tokens = expected["greedy_bytes"];
    tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()));
    Recorded run(kTrained, {.ignore_end = true});
    run.submit({.prompt = prompt, .new_tokens = static_cast<std::int64_t>(tokens.size())});
    run.run();
    EXPECT_EQ(run.texts[0].tokens, tokens);
    const std::vector<float> logits = expected["logits_after_prompt"];
    for (std::size_t i = 0; i < logits.size(); ++i) {
        EXPECT_NEAR(run.texts[0].logits[i], logits[i], 0.01) << i;  // the trainer's are bf16
    }
}

/// transformers' tokens and logits of random models (python/tests/test_llama_example.py writes the files).
class RandomModel : public testing::TestWithParam<const char*> {};

TEST_P(RandomModel, says_what_transformers_says) {
    const std::string path = std::string(TESSERA_SOURCE_DIR) + "/tests/llama/" + GetParam() + ".json";
    const nlohmann::json cases = read_json(path)["cases"];
    Recorded run(random_model(GetParam()), {.model = {.page_size = 5}});
    for (const auto& c : cases) run.submit({.prompt = c["prompt"], .new_tokens = 40});
    run.run();
    for (std::size_t n = 0; n < cases.size(); ++n) {
        std::vector<std::int32_t> all = cases[n]["prompt"];
        all.insert(all.end(), run.texts[n].tokens.begin(), run.texts[n].tokens.end());
        EXPECT_EQ(all, cases[n]["tokens"].get<std::vector<std::int32_t>>()) << n;
        const std::vector<float> logits = cases[n]["logits"];
        for (std::size_t i = 0; i < logits.size(); ++i) EXPECT_NEAR(run.texts[n].logits[i], logits[i], 1e-4) << i;
    }
}

/// Prompts of several lengths, so that some steps mix prompts with single tokens and others do not.
TEST_P(RandomModel, says_the_same_by_decode_block) {
    const std::string path = std::string(TESSERA_SOURCE_DIR) + "/tests/llama/" + GetParam() + ".json";
    const nlohmann::json cases = read_json(path)["cases"];
    for (const std::int64_t running : {1, 16}) {
        EngineOptions options{.model = {.page_size = 5, .block = true}};
        options.scheduler.running = running;
        Recorded run(random_model(GetParam()), options);
        for (const auto& c : cases) run.submit({.prompt = c["prompt"], .new_tokens = 40});
        run.run();
        EXPECT_GE(run.engine.model().times().blocks.steps(), 39);
        for (std::size_t n = 0; n < cases.size(); ++n) {
            std::vector<std::int32_t> all = cases[n]["prompt"];
            all.insert(all.end(), run.texts[n].tokens.begin(), run.texts[n].tokens.end());
            EXPECT_EQ(all, cases[n]["tokens"].get<std::vector<std::int32_t>>()) << n;
        }
    }
}

/// The separate kernels write the new key of a step too, and decode_block() comes last.
TEST_P(RandomModel, comparing_the_blocks_changes_no_logit) {
    std::vector<float> logits[2];
    for (const std::int64_t compared : {0, 5}) {
        Recorded run(random_model(GetParam()), {.model = {.block = true, .compared_steps = compared}});
        for (const std::int32_t first : {3, 40}) run.submit({.prompt = {first, 7, 9}, .new_tokens = 12});
        run.run();
        const Times& times = run.engine.model().times();
        EXPECT_GT(times.blocks.median(times.blocks.steps()), 0);
        EXPECT_EQ(times.compared_kernels.steps(), compared);
        EXPECT_EQ(times.compared_kernels.median(compared) > 0, compared > 0);
        for (const auto& text : run.texts) {
            std::vector<float>& all = logits[compared > 0 ? 1 : 0];
            all.insert(all.end(), text.logits.begin(), text.logits.end());
        }
    }
    EXPECT_FALSE(logits[0].empty());
    EXPECT_EQ(logits[0], logits[1]);
}

INSTANTIATE_TEST_SUITE_P(Models, RandomModel, testing::Values("qwen3", "llama3"));

/// Requests of very different lengths, half of them sampled.
std::vector<Request> mixed_requests() {
    std::mt19937 random(1);
    std::vector<Request> requests;
    for (const std::int64_t length : {1, 70, 3, 16, 17, 130, 2, 31, 48, 5}) {
        Request request{.new_tokens = 4 + length % 23};
        for (std::int64_t n = 0; n < length; ++n)
            request.prompt.push_back(static_cast<std::int32_t>(1 + random() % 96));
        if (requests.size() % 2 == 1) request.sampling = {.temperature = 0.8, .top_k = 40, .top_p = 0.95, .seed = 7};
        requests.push_back(request);
    }
    return requests;
}

/// A way to run the requests together.
struct Batching {
    const char* name;
    EngineOptions options;
    bool preempts;

    friend void PrintTo(const Batching& company, std::ostream* out) { *out << company.name; }
};

class Batched : public testing::TestWithParam<Batching> {};

TEST_P(Batched, every_text_has_the_bits_that_it_has_alone) {
    const std::vector<Request> requests = mixed_requests();
    EngineOptions alone{.model = {.page_size = 16, .threads = 1}};
    alone.model.dtype = GetParam().options.model.dtype;
    alone.scheduler.running = 1;
    Recorded expected(random_model("qwen3"), alone), got(random_model("qwen3"), GetParam().options);
    for (const Request& request : requests) {
        expected.submit(request);
        got.submit(request);
    }
    expected.run();
    got.run();
    for (std::size_t n = 0; n < requests.size(); ++n) {
        EXPECT_FALSE(got.texts[n].tokens.empty());
        EXPECT_EQ(got.texts[n].tokens, expected.texts[n].tokens) << n;
        ASSERT_EQ(got.texts[n].logits.size(), expected.texts[n].logits.size()) << n;
        EXPECT_EQ(std::memcmp(got.texts[n].logits.data(), expected.texts[n].logits.data(),
                              got.texts[n].logits.size() * sizeof(float)),
                  0)
            << n;
    }
    EXPECT_EQ(got.engine.scheduler().preemptions() > 0, GetParam().preempts);
    EXPECT_EQ(got.engine.scheduler().pages().used(), 0);
    EXPECT_GT(got.engine.scheduler().pages().most_used(), 0);
}

EngineOptions options(std::int32_t pages, std::int64_t page_size, std::int64_t running, std::int64_t step_tokens,
                      int threads, tessera::DType dtype = tessera::DType::fp32) {
    return {.model = {.pages = pages, .page_size = page_size, .dtype = dtype, .threads = threads},
            .scheduler = {.running = running, .step_tokens = step_tokens}};
}

INSTANTIATE_TEST_SUITE_P(Batches, Batched,
                         testing::Values(Batching{"all at once", options(256, 16, 16, 512, 2), false},
                                         Batching{"prompts in pieces of 7", options(256, 16, 7, 7, 3), false},
                                         Batching{"pages of one token", options(600, 1, 16, 64, 2), false},
                                         Batching{"three run", options(64, 5, 3, 33, 1), false},
                                         Batching{"few pages: preemptions", options(48, 4, 8, 64, 2), true},
                                         Batching{"a cache of bf16", options(256, 16, 16, 100, 2, tessera::DType::bf16),
                                                  false}));

TEST(Engine, a_text_ends_at_the_end_token_or_not) {
    // The trained model ends its verses with a newline, its end token.
    for (const bool ignore : {false, true}) {
        Recorded run(kTrained, {.ignore_end = ignore});
        run.submit({.prompt = bytes_of("And God said, Let there be "), .new_tokens = 300});
        run.run();
        const std::vector<std::int32_t>& tokens = run.texts[0].tokens;
        const auto end = std::find(tokens.begin(), tokens.end(), '\n');
        ASSERT_NE(end, tokens.end());
        EXPECT_EQ(end + 1 == tokens.end(), !ignore);
        EXPECT_EQ(run.engine.scheduler().pages().used(), 0);
    }
}

TEST(Engine, long_prompts_do_not_stop_the_others) {
    Recorded run(random_model("qwen3"), options(256, 16, 4, 8, 1));
    run.submit({.prompt = {1, 2}, .new_tokens = 30});
    run.submit({.prompt = std::vector<std::int32_t>(200, 5), .new_tokens = 2});
    for (int steps = 0; steps < 10; ++steps) {
        const std::vector<Token> tokens = run.engine.step();
        ASSERT_EQ(tokens.size(), 1U) << steps;
        EXPECT_EQ(tokens[0].request, 0);
    }
}

TEST(Engine, refuses_requests_that_cannot_run) {
    HostMemory memory;
    Engine engine(random_model("qwen3"), options(4, 16, 4, 8, 1), memory);
    const auto error = [&](const Request& request) { return error_of([&] { engine.submit(request); }); };
    EXPECT_EQ(error({}), "prompt: expected one token at least, got 0");
    EXPECT_EQ(error({.prompt = {3, 97}}), "prompt: expected tokens under 97, got 97");
    EXPECT_EQ(error({.prompt = {3, -1}}), "prompt: expected tokens under 97, got -1");
    EXPECT_EQ(error({.prompt = {3}, .new_tokens = 0}), "new_tokens: expected a number > 0, got 0");
    EXPECT_EQ(error({.prompt = {3}, .new_tokens = 512}),
              "new_tokens: expected at most 511 after a prompt of 1 tokens (max_position_embeddings 512), got 512");
    EXPECT_EQ(error({.prompt = {3}, .new_tokens = 65}), "pages: expected space for the 65 tokens of request 0, got 64");
    EXPECT_EQ(error({.prompt = {3}, .new_tokens = 1, .sampling = {.temperature = -1}}),
              "temperature: expected a number >= 0, got -1");
    EXPECT_FALSE(engine.busy());
    EXPECT_TRUE(engine.step().empty());
    EXPECT_EQ(error({.prompt = {3}, .new_tokens = 64}), "");
    EXPECT_EQ(error_of([&] { Engine(random_model("qwen3"), options(4, 16, 9, 8, 1), memory); }),
              "step_tokens: expected at least running, 9, got 8");
    EXPECT_EQ(error_of([&] { Engine(random_model("qwen3"), options(2, std::int64_t{1} << 40, 4, 8, 1), memory); }),
              "page_size: expected 1 to 1073741824, got 1099511627776");
    EXPECT_EQ(error_of([&] { Engine(random_model("qwen3"), options(0, 16, 4, 8, 1), memory); }),
              "pages: expected a number > 0, got 0");
}

}  // namespace
}  // namespace llama::test::engine_test
