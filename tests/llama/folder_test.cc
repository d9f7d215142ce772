// SPDX-License-Identifier: Apache-2.0
//
// Folders that are no model: the error names the file, the field or tensor, what was expected and what came.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "io/safetensors.hpp"
#include "llama/support.hpp"

namespace llama::test::folder_test {
namespace {

namespace fs = std::filesystem;

/// A copy of a random model that a test damages.
class Folder : public testing::Test {
 protected:
    void SetUp() override {
        path_ = fs::temp_directory_path() / ("llama_folder_" + std::to_string(getpid()));
        fs::remove_all(path_);
        fs::copy(random_model("qwen3"), path_);
    }
    void TearDown() override { fs::remove_all(path_); }

    void write_config(const std::string& text) { std::ofstream(path_ / "config.json") << text; }

    /// The error after config[field] = value; null removes the field.
    std::string with(const std::string& field, const nlohmann::json& value) {
        nlohmann::json config = read_json(random_model("qwen3") + "/config.json");
        if (value.is_null()) {
            config.erase(field);
        } else {
            config[field] = value;
        }
        write_config(config.dump());
        return error();
    }

    /// The error without the folder's name.
    std::string error() {
        std::string text = error_of([&] { Model(path_, {.pages = 4}, memory_); });
        if (const auto at = text.find(path_.string() + "/"); at == 0) text.erase(0, path_.string().size() + 1);
        return text;
    }

    fs::path path_;
    HostMemory memory_;
};

TEST_F(Folder, loads_undamaged) { EXPECT_EQ(error(), ""); }

TEST_F(Folder, without_files) {
    fs::remove(path_ / "model.safetensors");
    EXPECT_NE(error().find("model.safetensors"), std::string::npos) << error();
    fs::remove(path_ / "config.json");
    EXPECT_NE(error().find("config.json"), std::string::npos) << error();
    fs::remove_all(path_);
    EXPECT_NE(error().find("config.json"), std::string::npos) << error();
}

/// Weights in two files have the logits of those in one, and an index agrees with its files.
class Shards : public Folder {
 protected:
    void SetUp() override {
        Folder::SetUp();
        const tessera::io::TensorFile file = tessera::io::read_safetensors(path_ / "model.safetensors");
        std::vector<std::pair<std::string, tessera::TensorView>> tensors[2];
        for (const tessera::io::NamedTensor& tensor : file.tensors()) {
            const bool second = tensor.name.find(".1.") != std::string::npos;
            tensors[second].emplace_back(tensor.name, file.view(tensor));
            map_[tensor.name] = second ? kSecond : kFirst;
        }
        tessera::io::write_safetensors(path_ / kFirst, tensors[0]);
        tessera::io::write_safetensors(path_ / kSecond, tensors[1]);
        fs::remove(path_ / "model.safetensors");
        write_index(map_);
    }

    void write_index(const nlohmann::json& map) {
        std::ofstream(path_ / "model.safetensors.index.json") << nlohmann::json{{"metadata", {}}, {"weight_map", map}};
    }

    static constexpr const char* kFirst = "model-00001-of-00002.safetensors";
    static constexpr const char* kSecond = "model-00002-of-00002.safetensors";
    nlohmann::json map_;
};

TEST_F(Shards, have_the_weights_of_one_file) {
    const Config config = read_config(path_);
    const Weights two(path_, config), one(random_model("qwen3"), config);
    EXPECT_EQ(two.parameters(), one.parameters());
    EXPECT_EQ(two.final_norm, one.final_norm);
    ASSERT_EQ(two.layers.size(), one.layers.size());
    for (std::size_t n = 0; n < one.layers.size(); ++n) {
        const Matrix &a = two.layers[n].gate, &b = one.layers[n].gate;
        const auto bytes = static_cast<std::size_t>(a.outputs * a.inputs * size_of(a.dtype));
        EXPECT_EQ(std::memcmp(a.data, b.data, bytes), 0) << "layer " << n;
        EXPECT_EQ(two.layers[n].input_norm, one.layers[n].input_norm);
    }
    EXPECT_EQ(error(), "");
}

TEST_F(Shards, that_do_not_fit_their_index) {
    const std::string index = "model.safetensors.index.json: ";
    std::ofstream(path_ / "model.safetensors.index.json") << "{}";
    EXPECT_EQ(error(), index + "expected an object whose weight_map has a file for each tensor");
    nlohmann::json map = map_;
    map["model.norm.weight"] = "../model.safetensors";
    write_index(map);
    EXPECT_EQ(error(), index +
                           "weight_map: expected the name of a .safetensors file in this folder for tensor "
                           "\"model.norm.weight\", got \"../model.safetensors\"");
    map["model.norm.weight"] = 7;
    write_index(map);
    EXPECT_NE(error().find("got \"7\""), std::string::npos) << error();
    map["model.norm.weight"] = kSecond;
    write_index(map);
    const auto of_first = std::count(map_.begin(), map_.end(), nlohmann::json(kFirst));
    EXPECT_EQ(error(), fmt::format("{}: expected the {} tensors of model.safetensors.index.json, got {}", kFirst,
                                   of_first - 1, of_first));
    map = map_;
    map["model.layers.9.mlp.up_proj.weight"] = kFirst;
    write_index(map);
    EXPECT_EQ(error(), std::string(kFirst) +
                           ": expected tensor \"model.layers.9.mlp.up_proj.weight\", which "
                           "model.safetensors.index.json says is here, got none");
    write_index(map_);
    fs::remove(path_ / kSecond);
    EXPECT_NE(error().find(kSecond), std::string::npos) << error();
}

TEST_F(Folder, with_text_that_is_no_config) {
    write_config("{\"model_type\": ");
    EXPECT_EQ(error(), "config.json: expected JSON, got an error at byte 16");
    write_config("[1, 2]");
    EXPECT_EQ(error(), "config.json: expected an object, got [1,2]");
}

TEST_F(Folder, with_a_wrong_field) {
    EXPECT_EQ(with("model_type", "gemma3"), "config.json: model_type: expected \"llama\" or \"qwen3\", got \"gemma3\"");
    EXPECT_EQ(with("hidden_size", nullptr), "config.json: expected the field \"hidden_size\"");
    EXPECT_EQ(with("hidden_size", 44.5),
              "config.json: hidden_size: expected a whole number from 1 to 131072, got 44.5");
    EXPECT_EQ(with("hidden_size", -44), "config.json: hidden_size: expected a whole number from 1 to 131072, got -44");
    EXPECT_EQ(with("vocab_size", "many"),
              "config.json: vocab_size: expected a whole number from 1 to 16777216, got \"many\"");
    EXPECT_EQ(with("num_key_value_heads", 4), "config.json: num_key_value_heads: expected a divisor of 6, got 4");
    EXPECT_EQ(with("head_dim", 25), "config.json: head_dim: expected an even number up to 256, got 25");
    EXPECT_EQ(with("head_dim", nullptr), "config.json: hidden_size: expected a multiple of 6 heads, got 44");
    EXPECT_EQ(with("hidden_act", "gelu"), "config.json: hidden_act: expected \"silu\", got \"gelu\"");
    EXPECT_EQ(with("attention_bias", true), "config.json: attention_bias: expected false, got true");
    EXPECT_EQ(with("use_sliding_window", true), "config.json: use_sliding_window: expected false, got true");
    EXPECT_EQ(with("rms_norm_eps", 0), "config.json: rms_norm_eps: expected a number > 0, got 0");
    EXPECT_EQ(with("tie_word_embeddings", 1), "config.json: tie_word_embeddings: expected true or false, got 1");
    EXPECT_EQ(with("eos_token_id", 97), "config.json: eos_token_id: expected tokens under 97, got 97");
    EXPECT_EQ(with("rope_parameters", {{"rope_type", "yarn"}, {"rope_theta", 1e6}}),
              "config.json: rope_parameters: rope_type: expected \"default\" or \"llama3\", got \"yarn\"");
    EXPECT_EQ(with("quantization_config", {{"bits", 4}}),
              "config.json: quantization_config: expected none, got {\"bits\":4}");
}

TEST_F(Folder, with_weights_of_another_shape) {
    EXPECT_EQ(with("intermediate_size", 80),
              "model.safetensors: tensor model.layers.0.mlp.gate_proj.weight: expected bf16 or fp32 [80, 44], got fp32 "
              "[76, 44]");
    EXPECT_NE(with("num_hidden_layers", 4).find("model.layers.3.input_layernorm.weight"), std::string::npos);
    EXPECT_EQ(with("num_hidden_layers", 2),
              "model.safetensors: tensor \"model.layers.2.input_layernorm.weight\": expected no such tensor in a qwen3 "
              "model");
    // Qwen3's norms of Q and K must not be ignored.
    EXPECT_EQ(
        with("model_type", "llama"),
        "model.safetensors: tensor \"model.layers.0.self_attn.q_norm.weight\": expected no such tensor in a llama "
        "model");
}

TEST_F(Folder, with_weights_of_another_dtype) {
    const tessera::io::TensorFile file = tessera::io::read_safetensors(path_ / "model.safetensors");
    std::vector<std::pair<std::string, tessera::TensorView>> tensors;
    for (const tessera::io::NamedTensor& tensor : file.tensors()) {
        tensors.emplace_back(tensor.name, file.view(tensor));
        if (tensor.name == "model.norm.weight") tensors.back().second.dtype = tessera::DType::int32;
    }
    tessera::io::write_safetensors(path_ / "model.safetensors", tensors);
    EXPECT_EQ(error(), "model.safetensors: tensor model.norm.weight: expected bf16 or fp32 [44], got int32 [44]");
}

TEST_F(Folder, with_a_cut_file) {
    fs::resize_file(path_ / "model.safetensors", fs::file_size(path_ / "model.safetensors") - 4);
    EXPECT_NE(error().find("model.safetensors: "), std::string::npos) << error();
}

TEST_F(Folder, generation_config_has_the_last_word_on_end_tokens) {
    EXPECT_EQ(read_config(path_).end_tokens, std::vector<std::int32_t>{0});
    std::ofstream(path_ / "generation_config.json") << "{\"eos_token_id\": [5, 6]}";
    EXPECT_EQ(read_config(path_).end_tokens, (std::vector<std::int32_t>{5, 6}));
}

TEST_F(Folder, with_a_config_of_transformers_4) {
    nlohmann::json config = read_json(random_model("llama3") + "/config.json");
    nlohmann::json rotary = config["rope_parameters"];
    config.erase("rope_parameters");
    config["rope_theta"] = rotary["rope_theta"];
    rotary.erase("rope_theta");
    config["rope_scaling"] = rotary;
    write_config(config.dump());
    const Config read = read_config(path_);
    EXPECT_EQ(read.rope_theta, 500);
    ASSERT_TRUE(read.llama3_rotary);
    EXPECT_EQ(read.llama3_rotary->factor, 8);
    EXPECT_EQ(read.llama3_rotary->original_positions, 64);
}

}  // namespace
}  // namespace llama::test::folder_test
