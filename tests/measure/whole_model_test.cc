// SPDX-License-Identifier: Apache-2.0
#include "measure/whole_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/error.hpp"

namespace tessera::measure::test::whole_model_test {
namespace {

using Json = nlohmann::json;

/// The fields of published config.json files that count, and the number of parameters that their makers state.
struct Published {
    const char* name;
    const char* config;
    double parameters;
    std::int64_t heads_kv, head_dim;
    double cache_bytes_of_token;  // in bf16
};

const Published kPublished[] = {
    {"Llama 3.1 8B",
     R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false,
         "torch_dtype": "bfloat16", "rope_scaling": {"factor": 8.0}})",
     8.03e9, 8, 128, 131072},
    {"Mixtral 8x7B",
     R"({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 32000})",
     46.7e9, 8, 128, 131072},
    {"Qwen3 30B-A3B",
     R"({"model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
         "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128,
         "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "sliding_window": null,
         "use_sliding_window": false, "tie_word_embeddings": false, "vocab_size": 151936, "max_window_layers": 48})",
     30.5e9, 4, 128, 98304},
    {"DeepSeek V3",
     R"({"model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
         "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
         "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
         "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "tie_word_embeddings": false, "vocab_size": 129280, "moe_layer_freq": 1})",
     671e9, 128, 192, 70272},
    {"Gemma 2 9B",
     R"({"model_type": "gemma2", "attn_logit_softcapping": 50.0, "head_dim": 256, "hidden_size": 3584,
         "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
         "sliding_window": 4096, "vocab_size": 256000, "tie_word_embeddings": true})",
     9.24e9, 8, 256, 344064},
    {"gpt-oss 20B",
     R"({"model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
         "experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32, "num_attention_heads": 64,
         "num_key_value_heads": 8, "num_hidden_layers": 24, "sliding_window": 128, "vocab_size": 201088,
         "tie_word_embeddings": false})",
     20.9e9, 8, 64, 49152},
    {"GPT-2",
     R"({"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257,
         "tie_word_embeddings": true})",
     124e6, 12, 64, 36864},
    {"Falcon 7B",
     R"({"model_type": "falcon", "hidden_size": 4544, "multi_query": true, "new_decoder_architecture": false,
         "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71, "vocab_size": 65024,
         "tie_word_embeddings": true})",
     6.92e9, 1, 64, 8192},
    {"DBRX",
     R"({"model_type": "dbrx", "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}, "d_model": 6144,
         "ffn_config": {"ffn_hidden_size": 10752, "moe_jitter_eps": 0, "moe_num_experts": 16, "moe_top_k": 4},
         "n_heads": 48, "n_layers": 40, "tie_word_embeddings": false, "vocab_size": 100352})",
     132e9, 8, 128, 163840},
    {"XLM-RoBERTa base",  // without its table of positions
     R"({"model_type": "xlm-roberta", "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
         "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 250002, "tie_word_embeddings": true})",
     277.6e6, 12, 64, 0},
};

ModelConfig config_of(const char* text) { return model_config_from_json(Json::parse(text)); }

ModelCost cost(const ModelConfig& config, std::int64_t batch, std::int64_t len, const char* machine = "h200") {
    return cost_of({config,
                    *model::find_machine(machine),
                    batch,
                    len,
                    DType::bf16,
                    {std::begin(kSchedules), std::end(kSchedules)},
                    {.by = "published"}});
}

TEST(WholeModel, published_models_have_their_parameters) {
    for (const Published& model : kPublished) {
        const ModelConfig config = config_of(model.config);
        const ModelCost answer = cost(config, 1, 2048);
        EXPECT_NEAR(answer.parameters / model.parameters, 1, 0.015) << model.name << " " << answer.parameters;
        EXPECT_EQ(config.heads_kv, model.heads_kv) << model.name;
        EXPECT_EQ(config.head_dim, model.head_dim) << model.name;
        EXPECT_EQ(answer.cache_token_bytes, model.cache_bytes_of_token) << model.name;
    }
}

/// Files of these families leave tie_word_embeddings out where it has the value of their class in transformers.
TEST(WholeModel, an_absent_tie_is_that_of_the_family) {
    const auto without_tie = [](std::string config) {
        for (const char* field : {R"("tie_word_embeddings": true)", R"("tie_word_embeddings": false)"})
            if (const std::size_t at = config.find(field); at != std::string::npos)
                config.replace(at, std::string(field).size(), R"("unknown": 0)");
        return config;
    };
    for (const Published& model : kPublished) {
        const ModelConfig config = config_of(without_tie(model.config).c_str());
        EXPECT_NEAR(cost(config, 1, 2048).parameters / model.parameters, 1, 0.015) << model.name;
        EXPECT_NE(config.assumed.front().find("output layer"), std::string::npos) << model.name;
    }
    // OPT-125m and BERT-base as published, without the table of positions.
    const char* opt = R"({"model_type": "opt", "ffn_dim": 3072, "hidden_size": 768, "num_attention_heads": 12,
                          "num_hidden_layers": 12, "vocab_size": 50272})";
    EXPECT_NEAR(cost(config_of(opt), 1, 512).parameters, 125.2e6 - 1.6e6, 1e6);
    const char* bert = R"({"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072,
                           "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30522})";
    EXPECT_NEAR(cost(config_of(bert), 1, 512).parameters, 109.5e6 - 1e6, 1.5e6);
}

TEST(WholeModel, weights_of_another_size_are_said) {
    const auto answer = [](const std::string& fields) {
        const std::string text =
            R"({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64)" +
            fields + "}";
        return cost(config_of(text.c_str()), 1, 64);
    };
    const auto says = [](const ModelCost& cost) {
        for (const std::string& one : cost.assumed)
            if (one.starts_with("weights are counted in bf16, while the file says ")) return one.substr(49);
        return std::string();
    };
    EXPECT_EQ(says(answer("")), "");
    EXPECT_EQ(says(answer(R"(, "torch_dtype": "float16")")), "");  // another format of the same size
    EXPECT_TRUE(answer(R"(, "torch_dtype": "bfloat16")").weights_known);
    const std::pair<const char*, const char*> others[] = {
        {R"(, "torch_dtype": "float32")", "fp32"},
        {R"(, "dtype": "float8_e4m3fn")", "float8_e4m3fn"},
        {R"(, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"})", "fp8"},
        {R"(, "quantization_config": {"quant_method": "gptq", "bits": 4})", "gptq, 4 bits"},
        {R"(, "quantization_config": {"load_in_8bit": true})", "quantised, 8 bits"}};
    for (const auto& [fields, format] : others) {
        EXPECT_EQ(says(answer(fields)), format) << fields;
        EXPECT_FALSE(answer(fields).weights_known) << fields;
    }
}

TEST(WholeModel, latent_attention_assumes_nothing_on_decode_or_head_dim) {
    const ModelCost answer = cost(config_of(kPublished[3].config), 1, 2048);
    EXPECT_FALSE(answer.calls[2].known());
    for (const std::string& one : answer.assumed)
        for (const char* word : {"head_dim", "decode", "experts at random"})
            EXPECT_EQ(one.find(word), std::string::npos) << one;
}

TEST(WholeModel, layers_are_told_by_their_kind) {
    using Kind = LayerGroup::Kind;
    const auto groups = [](const char* fields) {
        std::string text;
        for (const LayerGroup& group :
             config_of((std::string(R"({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 12,)") +
                        fields + "}")
                           .c_str())
                 .groups) {
            const char* kind = group.kind == Kind::full      ? "full"
                               : group.kind == Kind::sliding ? "sliding"
                               : group.kind == Kind::chunked ? "chunked"
                                                             : "other";
            text += std::string(text.empty() ? "" : ", ") + std::to_string(group.layers) + " " + kind + " " +
                    std::to_string(group.width);
        }
        return text;
    };
    EXPECT_EQ(groups(R"("model_type": "llama")"), "12 full 0");
    EXPECT_EQ(groups(R"("model_type": "mistral", "sliding_window": 4096)"), "12 sliding 4096");
    EXPECT_EQ(groups(R"("model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": false)"), "12 full 0");
    EXPECT_EQ(groups(R"("model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": true,
                        "max_window_layers": 10)"),
              "10 full 0, 2 sliding 4096");
    EXPECT_EQ(groups(R"("model_type": "gemma2", "sliding_window": 4096)"), "6 sliding 4096, 6 full 0");
    EXPECT_EQ(groups(R"("model_type": "gemma3_text", "sliding_window": 512)"), "10 sliding 512, 2 full 0");
    EXPECT_EQ(groups(R"("model_type": "cohere2", "sliding_window": 4096, "sliding_window_pattern": 4)"),
              "9 sliding 4096, 3 full 0");
    EXPECT_EQ(groups(R"("model_type": "llama4_text", "attention_chunk_size": 8192)"), "9 chunked 8192, 3 full 0");
    EXPECT_EQ(groups(R"("model_type": "qwen3_next", "full_attention_interval": 4)"), "9 other 0, 3 full 0");
    EXPECT_EQ(groups(R"("model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4)"),
              "11 other 0, 1 full 0");
    EXPECT_EQ(groups(R"("model_type": "modernbert", "local_attention": 128, "global_attn_every_n_layers": 3)"),
              "8 sliding 128, 4 full 0");
    EXPECT_EQ(groups(R"("model_type": "bamba", "attn_layer_indices": [3, 9])"), "10 other 0, 2 full 0");
    EXPECT_EQ(groups(R"("model_type": "gpt_neo", "attention_types": [[["global", "local"], 6]], "window_size": 64)"),
              "6 full 0, 6 sliding 64");
    EXPECT_EQ(groups(R"("model_type": "mpt", "attn_config": {"attn_type": "multihead_attention"}, "mlp_only_layers": [],
                        "moe_layer_freq": 1)"),
              "12 full 0");
    EXPECT_EQ(groups(R"("sliding_window": 128, "layer_types": ["sliding_attention", "full_attention",
                        "sliding_attention", "full_attention", "sliding_attention", "full_attention",
                        "sliding_attention", "full_attention", "linear_attention", "full_attention",
                        "sliding_attention", "full_attention"])"),
              "5 sliding 128, 6 full 0, 1 other 0");
}

/// Shares of a 7-billion model that a person can redo: 4 len hidden / 2 FLOP of visible pairs over 2 parameters.
TEST(WholeModel, shares_are_those_of_a_calculation_by_hand) {
    const ModelConfig config = config_of(kPublished[0].config);
    const ModelCost answer = cost(config, 2, 8192);
    ASSERT_EQ(answer.calls.size(), 3U);
    const CallCost &prefill = answer.calls[0], &training = answer.calls[1], &decode = answer.calls[2];
    const double tokens = 2 * 8192.0, layers = 32, heads = 32, dim = 128;
    const double pairs = 8192.0 * 8193 / 2;
    EXPECT_NEAR(prefill.attention_flop / (4 * 2 * pairs * heads * dim * layers), 1, 1e-9);
    EXPECT_NEAR(training.attention_flop / prefill.attention_flop, 3.5, 1e-9);
    const double of_layers = answer.parameters - 2 * 128256.0 * 4096;
    EXPECT_NEAR(prefill.other_flop / (2 * tokens * of_layers), 1, 1e-3);
    EXPECT_NEAR(training.other_flop / (6 * tokens * (of_layers + 128256.0 * 4096)), 1, 1e-9);
    EXPECT_EQ(decode.cache_bytes, tokens * 131072);
    EXPECT_NEAR(decode.weight_bytes, 2 * (of_layers + 128256.0 * 4096), 1);
    // No kernel reads the cache faster than the memory of the GPU.
    EXPECT_GT(decode.ms(), decode.cache_bytes / 4800e9 * 1e3);
    EXPECT_GT(training.ms(), 2.5 * prefill.ms());
}

TEST(WholeModel, a_window_caps_the_keys_of_its_layers) {
    const ModelConfig config = config_of(kPublished[4].config);
    const ModelCost short_row = cost(config, 1, 4096), long_row = cost(config, 1, 32768);
    EXPECT_EQ(short_row.cache_bytes, 4096 * 344064.0);
    EXPECT_EQ(long_row.cache_bytes, (32768 + 4096) * 344064.0 / 2);
    const auto groups = [](const ModelCost& answer) { return answer.calls[0].groups; };
    EXPECT_EQ(groups(long_row)[0].row.problem.mask.window_left, 4095);
    EXPECT_EQ(groups(short_row)[0].row.problem.mask.window_left, unbounded);
    EXPECT_LT(groups(long_row)[0].best()->ms(), 0.5 * groups(long_row)[1].best()->ms());
    EXPECT_EQ(groups(long_row)[0].row.problem.softcap, 50);
}

/// The expected numbers of parameters are those that transformers 5.24 counts.
TEST(WholeModel, the_activation_tells_the_gate_of_an_mlp) {
    const auto matrices = [](const std::string& family, const std::string& activation, int width, int layers) {
        const std::string text =
            R"({"hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1000, "model_type": ")" + family +
            R"(", "intermediate_size": )" + std::to_string(width) + R"(, "num_hidden_layers": )" +
            std::to_string(layers) + activation + "}";
        return config_of(text.c_str()).mlp_matrices;
    };
    EXPECT_EQ(matrices("camembert", R"(, "hidden_act": "gelu")", 4096, 2), 2);
    EXPECT_EQ(matrices("arcee", R"(, "hidden_act": "relu2")", 4096, 2), 2);
    EXPECT_EQ(matrices("apertus", R"(, "hidden_act": "xielu")", 4096, 2), 2);
    EXPECT_EQ(matrices("smolvlm_vision", R"(, "hidden_act": "gelu_pytorch_tanh")", 4096, 2), 2);
    EXPECT_EQ(matrices("clip_text_model", R"(, "hidden_act": "quick_gelu")", 4096, 2), 2);
    EXPECT_EQ(matrices("gemma3_text", R"(, "hidden_activation": "gelu_pytorch_tanh")", 4096, 2), 3);
    EXPECT_EQ(matrices("qwen3", R"(, "hidden_act": "silu")", 4096, 2), 3);
    EXPECT_EQ(matrices("esm", R"(, "activation": "swiglu")", 4096, 2), 3);
    EXPECT_EQ(matrices("bitnet", R"(, "hidden_act": "relu2")", 4096, 2), 3);
    EXPECT_EQ(matrices("a_new_one", "", 4096, 2), 3);
}

TEST(WholeModel, encoders_are_not_causal) {
    const auto causal = [](const std::string& fields) {
        const std::string text = R"({"hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1000,
                                     "intermediate_size": 4096, "num_hidden_layers": 2, )" +
                                 fields + "}";
        return config_of(text.c_str()).causal;
    };
    EXPECT_TRUE(causal(R"("model_type": "llama")"));
    EXPECT_TRUE(causal(R"("model_type": "a_new_one", "architectures": ["NewForCausalLM"])"));
    EXPECT_FALSE(causal(R"("model_type": "a_new_one", "architectures": ["NewForMaskedLM"])"));
    EXPECT_FALSE(causal(R"("model_type": "deberta-v2")"));
    EXPECT_FALSE(causal(R"("model_type": "bert", "architectures": ["BertForSequenceClassification"])"));
    EXPECT_TRUE(causal(R"("model_type": "bert", "is_decoder": true)"));
    EXPECT_FALSE(causal(R"("model_type": "llama", "is_causal": false)"));
}

TEST(WholeModel, a_type_that_was_not_compared_is_named) {
    const auto says = [](const char* type) {
        const std::string text = R"({"hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 1000,
                                     "intermediate_size": 4096, "num_hidden_layers": 2, "model_type": ")" +
                                 std::string(type) + "\"}";
        const ModelConfig config = config_of(text.c_str());
        return std::any_of(config.assumed.begin(), config.assumed.end(),
                           [](const std::string& one) { return one.find("were not compared") != std::string::npos; });
    };
    EXPECT_FALSE(says("llama"));
    EXPECT_FALSE(says("qwen3_moe"));
    EXPECT_TRUE(says("hrm_text"));
    EXPECT_TRUE(says("a_new_one"));
}

TEST(WholeModel, infinities_of_python_are_read) {
    const auto json =
        parse_config(R"({"time_step_limit": [0.0, Infinity], "a": -Infinity, "b": NaN, "n": "Infinity \" NaN"})");
    ASSERT_FALSE(json.is_discarded());
    EXPECT_TRUE(json["time_step_limit"][1].is_null());
    EXPECT_TRUE(json["a"].is_null());
    EXPECT_EQ(json["n"], "Infinity \" NaN");
    EXPECT_TRUE(parse_config(R"({"a": nan})").is_discarded());
}

TEST(WholeModel, more_experts_are_read_by_more_sequences) {
    const ModelConfig config = config_of(kPublished[1].config);
    const auto weights = [&](std::int64_t batch) { return cost(config, batch, 1024).calls[2].weight_bytes; };
    EXPECT_NEAR(weights(1), 2 * 12.7e9, 0.5e9);  // of the 12.9 billion active parameters
    EXPECT_LT(weights(1), weights(4));
    EXPECT_NEAR(weights(4096), 2 * 46.5e9, 0.5e9);
}

TEST(WholeModel, a_nested_text_config_is_read_and_said) {
    const ModelConfig config = config_of(
        R"({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model", "hidden_size": 4096,
            "num_attention_heads": 32, "num_hidden_layers": 40}, "vision_config": {"hidden_size": 1280}})");
    EXPECT_EQ(config.layers, 40);
    EXPECT_EQ(config.name, "mllama_text_model");
    EXPECT_NE(config.assumed.front().find("text_config"), std::string::npos);
}

TEST(WholeModel, errors_name_the_field) {
    const auto expect_bad = [](const char* text, const std::string& message) {
        try {
            config_of(text);
            ADD_FAILURE() << text;
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
        }
    };
    expect_bad("[]", "config: expected a JSON object");
    expect_bad("{}", "hidden_size: expected a whole number (or n_embd, d_model, dim), got nothing");
    expect_bad(R"({"hidden_size": 64})", "num_hidden_layers: expected a whole number");
    expect_bad(R"({"hidden_size": 64, "num_hidden_layers": 2})", "num_attention_heads: expected");
    expect_bad(R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3})", "head_dim: expected");
    expect_bad(R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 0})", "from 1 to 2^28, got 0");
    expect_bad(R"({"hidden_size": 1e3, "num_hidden_layers": 2})", "hidden_size: expected a whole number, got 1000.0");
    expect_bad(R"({"hidden_size": 99999999999999, "num_hidden_layers": 2})",
               "hidden_size: expected a whole number from");
    expect_bad(R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 3})",
               "num_key_value_heads: expected a divisor of 4");
    expect_bad(
        R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "layer_types": ["full_attention"]})",
        "layer_types: expected 2 entries");
    expect_bad(R"({"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                   "layer_types": ["sliding_attention"]})",
               "sliding_window: expected a whole number");
    expect_bad(R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 8})",
               "num_experts_per_tok: expected");
    expect_bad(
        R"({"model_type": "nemotron_h", "hidden_size": 64, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-"})",
        "hybrid_override_pattern: expected a model whose layers all have attention and an MLP");
    expect_bad(R"({"model_type": "t5", "is_encoder_decoder": true})", "t5 has an encoder and a decoder");
    const auto expect_refused = [&](const std::string& fields, const std::string& message) {
        const std::string text =
            R"({"model_type": "odd", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, )" + fields +
            "}";
        expect_bad(text.c_str(), message);
    };
    expect_refused(R"("attn_config": {"kv_n_heads": "2"})", "attn_config.kv_n_heads: expected a whole number");
    expect_refused(R"("attn_config": {"kv_n_heads": 3})", "num_key_value_heads: expected a divisor of 4");
    expect_refused(R"("ffn_config": {"moe_num_experts": 16})", "num_experts_per_tok: expected");
    expect_refused(R"("mlp_only_layers": [0])", "mlp_only_layers: expected a model whose layers");
    expect_refused(R"("moe_layer_freq": [0, 1, 1, 1])", "moe_layer_freq: expected a model whose layers");
    expect_refused(R"("moe_layer_freq": 2)", "moe_layer_freq: expected a model whose layers");
    expect_refused(R"("attention_types": [[["global", "local"], 1]])", "attention_types: expected 4 kinds, got 2");
    expect_refused(R"("attention_types": ["global"])", "attention_types: expected a list of pairs");
    expect_refused(R"("num_experts": 8, "num_experts_per_tok": 9, "moe_intermediate_size": 8)",
                   "num_experts_per_tok: expected at most 8, the experts of a layer, got 9");
    expect_refused(R"("num_heads": 8, "state_size": 128)", "state_size: expected a list of the layers");
    expect_refused(R"("mamba_d_state": 128)", "mamba_d_state: expected a list of the layers");
    expect_refused(R"("layer_types": ["hybrid", "full_attention", "conv", "conv"])", "odd has hybrid");
    expect_refused(R"("hidden_size_per_layer_input": 256)", "hidden_size_per_layer_input: expected a model with one");
    expect_refused(R"("num_kv_shared_layers": 2)", "num_kv_shared_layers: expected");
    expect_refused(R"("cross_attention_layers": [1, 3])", "cross_attention_layers: expected");
    expect_refused(R"("add_cross_attention": true)", "add_cross_attention: expected");
    expect_refused(R"("num_hidden_groups": 1)", "num_hidden_groups: expected");
    expect_refused(R"("embedding_size": 32)", "embedding_size: expected");
    expect_refused(R"("block_auto_adjust_ff_dim": true)", "block_auto_adjust_ff_dim: expected");
    expect_refused(R"("expert_ffn_hidden_size": 64)", "expert_ffn_hidden_size: expected");
    expect_bad(R"({"model_type": "odd\nline"})", R"(model_type: expected a name of printable ASCII, got "odd\nline")");
}

}  // namespace
}  // namespace tessera::measure::test::whole_model_test
