// SPDX-License-Identifier: Apache-2.0
#include "llama/config.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "io/file.hpp"
#include "llama/json_file.hpp"
#include "tessera/error.hpp"

namespace llama {
namespace {

using nlohmann::json;

/// The fields of a JSON object, with errors that name the file and the field.
class Fields {
 public:
    Fields(const json& object, std::string origin) : object_(object), origin_(std::move(origin)) {
        if (!object.is_object()) fail("expected an object", object);
    }

    bool has(const char* name) const { return object_.contains(name) && !object_[name].is_null(); }

    const json& at(const char* name) const {
        if (!has(name)) {
            throw tessera::Error(tessera::ErrorCode::bad_data, origin_, fmt::format("expected the field \"{}\"", name));
        }
        return object_[name];
    }

    Fields object(const char* name) const { return Fields(at(name), fmt::format("{}: {}", origin_, name)); }

    std::string text(const char* name) const {
        if (!at(name).is_string()) fail(fmt::format("{}: expected a string", name), at(name));
        return at(name);
    }

    std::int64_t size(const char* name, std::int64_t most) const {
        const json& value = at(name);
        const bool whole = value.is_number_unsigned() && value.get<std::uint64_t>() <= static_cast<std::uint64_t>(most);
        if (!whole || value == 0) fail(fmt::format("{}: expected a whole number from 1 to {}", name, most), value);
        return value;
    }

    double positive(const char* name) const {
        const json& value = at(name);
        if (!value.is_number() || !(value.get<double>() > 0))
            fail(fmt::format("{}: expected a number > 0", name), value);
        return value;
    }

    bool flag(const char* name, bool otherwise) const {
        if (!has(name)) return otherwise;
        if (!at(name).is_boolean()) fail(fmt::format("{}: expected true or false", name), at(name));
        return at(name);
    }

    /// Refuses a value of a field that this program does not compute with.
    void expect(const char* name, const json& only) const {
        if (has(name) && at(name) != only) fail(fmt::format("{}: expected {}", name, only.dump()), at(name));
    }

    [[noreturn]] void fail(const std::string& expected, const json& came) const {
        std::string text = came.dump(-1, ' ', true, json::error_handler_t::replace);
        if (text.size() > 60) text = text.substr(0, 57) + "...";
        throw tessera::Error(tessera::ErrorCode::bad_data, origin_, fmt::format("{}, got {}", expected, text));
    }

 private:
    const json& object_;
    std::string origin_;
};

json parse(const std::string& path) { return read_json_file(path, std::uint64_t{1} << 20); }

void read_rotary(const Fields& fields, Config& config) {
    // transformers 5 keeps theta and the type in rope_parameters, version 4 in rope_theta and rope_scaling.
    const bool nested = fields.has("rope_parameters");
    config.rope_theta =
        nested ? fields.object("rope_parameters").positive("rope_theta") : fields.positive("rope_theta");
    const char* const name = nested ? "rope_parameters" : "rope_scaling";
    if (!fields.has(name)) return;
    const Fields rotary = fields.object(name);
    const char* const type = rotary.has("rope_type") ? "rope_type" : "type";
    if (rotary.text(type) == "llama3") {
        config.llama3_rotary = {.factor = rotary.positive("factor"),
                                .low_frequency_factor = rotary.positive("low_freq_factor"),
                                .high_frequency_factor = rotary.positive("high_freq_factor"),
                                .original_positions = rotary.positive("original_max_position_embeddings")};
        if (config.llama3_rotary->low_frequency_factor >= config.llama3_rotary->high_frequency_factor) {
            rotary.fail("high_freq_factor: expected more than low_freq_factor", rotary.at("high_freq_factor"));
        }
    } else if (rotary.text(type) != "default") {
        rotary.fail(fmt::format("{}: expected \"default\" or \"llama3\"", type), rotary.at(type));
    }
}

/// The tokens that end a text: generation_config.json wins over config.json, as in transformers.
void read_end_tokens(const Fields& fields, Config& config) {
    if (!fields.has("eos_token_id")) return;
    const json& ends = fields.at("eos_token_id");
    config.end_tokens.clear();
    for (const json& token : ends.is_array() ? ends : json::array({ends})) {
        if (!token.is_number_unsigned() ||
            token.get<std::uint64_t>() >= static_cast<std::uint64_t>(config.vocab_size)) {
            fields.fail(fmt::format("eos_token_id: expected tokens under {}", config.vocab_size), ends);
        }
        config.end_tokens.push_back(token);
    }
}

bool is_file(const std::string& path) {
    try {
        tessera::io::InputFile file(path);
        return true;
    } catch (const tessera::Error&) {
        return false;
    }
}

}  // namespace

Config read_config(const std::string& folder) {
    const std::string path = folder + "/config.json";
    const json root = parse(path);
    const Fields fields(root, path);
    Config config;
    config.model_type = fields.text("model_type");
    if (config.model_type != "llama" && config.model_type != "qwen3") {
        fields.fail("model_type: expected \"llama\" or \"qwen3\"", fields.at("model_type"));
    }
    fields.expect("hidden_act", "silu");
    fields.expect("attention_bias", false);
    fields.expect("mlp_bias", false);
    fields.expect("use_sliding_window", false);
    if (fields.has("quantization_config"))
        fields.fail("quantization_config: expected none", fields.at("quantization_config"));

    config.vocab_size = fields.size("vocab_size", 1 << 24);
    config.hidden_size = fields.size("hidden_size", 1 << 17);
    config.intermediate_size = fields.size("intermediate_size", 1 << 19);
    config.layers = fields.size("num_hidden_layers", 1024);
    config.heads_q = fields.size("num_attention_heads", 1024);
    config.heads_kv = fields.has("num_key_value_heads") ? fields.size("num_key_value_heads", 1024) : config.heads_q;
    if (config.heads_q % config.heads_kv != 0) {
        fields.fail(fmt::format("num_key_value_heads: expected a divisor of {}", config.heads_q),
                    fields.at("num_key_value_heads"));
    }
    if (!fields.has("head_dim") && config.hidden_size % config.heads_q != 0) {
        fields.fail(fmt::format("hidden_size: expected a multiple of {} heads", config.heads_q),
                    fields.at("hidden_size"));
    }
    config.head_dim = fields.has("head_dim") ? fields.size("head_dim", 256) : config.hidden_size / config.heads_q;
    if (config.head_dim % 2 != 0 || config.head_dim > 256) {
        fields.fail("head_dim: expected an even number up to 256", config.head_dim);
    }
    config.max_positions = fields.size("max_position_embeddings", 1 << 24);
    config.rms_norm_eps = fields.positive("rms_norm_eps");
    read_rotary(fields, config);
    config.qk_norm = config.model_type == "qwen3";
    config.tied_embeddings = fields.flag("tie_word_embeddings", false);
    read_end_tokens(fields, config);
    if (const std::string generation = folder + "/generation_config.json"; is_file(generation)) {
        const json other = parse(generation);
        read_end_tokens(Fields(other, generation), config);
    }
    return config;
}

}  // namespace llama
