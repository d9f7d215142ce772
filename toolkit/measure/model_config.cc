// SPDX-License-Identifier: Apache-2.0
#include "measure/model_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string_view>

#include "io/file.hpp"
#include "io/other_format.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

using ConfigJson = nlohmann::json;
using Names = std::initializer_list<const char*>;

constexpr std::int64_t kMostOfConfig = std::int64_t{1} << 28;  // keeps products of a few sizes below 2^63

[[noreturn]] void bad_field(const std::string& field, const std::string& expected, const ConfigJson& got) {
    // A list or an object is not printed: dump() recurses, and the depth is the file's choice.
    constexpr std::size_t kShown = 60;
    const std::string came = got.is_null()     ? "nothing"
                             : got.is_array()  ? "a list"
                             : got.is_object() ? "an object"
                                               : got.dump(-1, ' ', true, ConfigJson::error_handler_t::replace);
    throw Error(ErrorCode::bad_data, field, fmt::format("expected {}, got {}", expected, came.substr(0, kShown)));
}

/// Fields of a config by the names that model families give them; the first name is the usual one.
class Fields {
 public:
    explicit Fields(const ConfigJson& json) : json_(json) {}

    const ConfigJson& raw(Names names) const {
        static const ConfigJson nothing;
        for (const char* name : names) {
            const auto found = json_.find(name);
            if (found != json_.end() && !found->is_null()) return *found;
        }
        return nothing;
    }

    /// A size of at least 1, or `otherwise` if none of the names is there.
    std::int64_t size(Names names, std::int64_t otherwise) const {
        const ConfigJson& value = raw(names);
        if (value.is_null()) return otherwise;
        return checked(names, value, 1);
    }

    std::int64_t required(Names names) const {
        const ConfigJson& value = raw(names);
        if (value.is_null()) {
            std::string others;
            for (const char* name : names)
                if (name != *names.begin()) others += fmt::format("{}{}", others.empty() ? "" : ", ", name);
            bad_field(*names.begin(), others.empty() ? "a whole number" : "a whole number (or " + others + ")", value);
        }
        return checked(names, value, 1);
    }

    /// A number of experts or layers, which may be 0.
    std::int64_t count(Names names, std::int64_t otherwise = 0) const {
        const ConfigJson& value = raw(names);
        return value.is_null() ? otherwise : checked(names, value, 0);
    }

    double number(Names names) const {
        const ConfigJson& value = raw(names);
        if (value.is_null()) return 0;
        if (!value.is_number()) bad_field(*names.begin(), "a number", value);
        return value.get<double>();
    }

    bool flag(const char* name, bool otherwise) const {
        const ConfigJson& value = raw({name});
        return value.is_boolean() ? value.get<bool>() : otherwise;
    }

    std::string text(const char* name) const {
        const ConfigJson& value = raw({name});
        return value.is_string() ? value.get<std::string>() : "";
    }

 private:
    static std::int64_t checked(Names names, const ConfigJson& value, std::int64_t least) {
        if (!value.is_number_integer()) bad_field(*names.begin(), "a whole number", value);
        const bool too_large = value.is_number_unsigned() && value.get<std::uint64_t>() > kMostOfConfig;
        if (too_large || value.get<std::int64_t>() < least)
            bad_field(*names.begin(), fmt::format("a whole number from {} to 2^28", least), value);
        return value.get<std::int64_t>();
    }

    const ConfigJson& json_;
};

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> list) {
    return std::find(list.begin(), list.end(), text) != list.end();
}

/// The part of a multi-modal config that describes the language model.
const ConfigJson& text_part(const ConfigJson& json, ModelConfig& config) {
    for (const char* name : {"text_config", "llm_config", "language_config", "thinker_config"}) {
        const auto found = json.find(name);
        if (found == json.end() || !found->is_object()) continue;
        config.assumed.push_back(
            fmt::format("the sizes are those of {}; other parts, such as vision, are left out", name));
        return text_part(*found, config);
    }
    return json;
}

void add_layers(ModelConfig& config, LayerGroup::Kind kind, std::int64_t width, std::int64_t layers) {
    for (LayerGroup& group : config.groups) {
        if (group.kind != kind || group.width != width) continue;
        group.layers += layers;
        return;
    }
    if (layers > 0) config.groups.push_back({kind, layers, width});
}

/// Layers by the list layer_types.
void read_layer_types(const Fields& fields, const ConfigJson& types, ModelConfig& config) {
    using Kind = LayerGroup::Kind;
    if (!types.is_array()) bad_field("layer_types", "a list of texts", types);
    if (static_cast<std::int64_t>(types.size()) != config.layers)
        bad_field("layer_types", fmt::format("{} entries, one for each layer", config.layers), types.size());
    for (const ConfigJson& entry : types) {
        if (!entry.is_string()) bad_field("layer_types", "a list of texts", entry);
        const auto type = entry.get<std::string>();
        if (type == "full_attention" || type == "attention") {
            add_layers(config, Kind::full, 0, 1);
        } else if (type == "sliding_attention" || type == "local_attention") {
            add_layers(config, Kind::sliding, fields.required({"sliding_window", "local_attention"}), 1);
        } else if (type == "chunked_attention") {
            add_layers(config, Kind::chunked, fields.required({"attention_chunk_size"}), 1);
        } else {
            add_layers(config, Kind::other, 0, 1);
        }
    }
}

/// Throws for models whose layers are not all of attention and an MLP, in ways that no field read here tells.
void refuse_unread_layers(const Fields& fields, const ModelConfig& config) {
    for (const char* name : {"hybrid_override_pattern", "block_configs", "block_types", "num_query_heads"}) {
        if (!fields.raw({name}).is_null())
            throw Error(
                ErrorCode::unsupported, name,
                fmt::format("expected a model whose layers all have attention and an MLP, {} has others", config.name));
    }
}

/// Layers without layer_types: by a period, or all of one kind.
void read_layer_pattern(const Fields& fields, ModelConfig& config) {
    using Kind = LayerGroup::Kind;
    const std::int64_t layers = config.layers;
    const std::int64_t window = fields.raw({"sliding_window"}).is_number() ? fields.count({"sliding_window"}) : 0;
    // Every `period`-th layer is full, and the others slide; 1: all layers slide.
    std::int64_t period = fields.count({"sliding_window_pattern", "_sliding_window_pattern"});
    if (period == 0 && is_one_of(config.name, {"gemma2", "gpt_oss"})) period = 2;
    if (period == 0 && is_one_of(config.name, {"gemma3", "gemma3_text"})) period = 6;
    if (const std::int64_t every = fields.count({"full_attention_interval"}); every > 0) {
        add_layers(config, Kind::other, 0, layers - layers / every);
        return add_layers(config, Kind::full, 0, layers / every);
    }
    if (const std::int64_t every = fields.count({"attn_layer_period"}); every > 0) {
        const std::int64_t first = fields.count({"attn_layer_offset"});
        const std::int64_t full = layers > first ? (layers - first + every - 1) / every : 0;
        add_layers(config, Kind::other, 0, layers - full);
        return add_layers(config, Kind::full, 0, full);
    }
    if (const ConfigJson& indices = fields.raw({"attn_layer_indices"}); indices.is_array()) {
        const auto full = std::min(layers, static_cast<std::int64_t>(indices.size()));
        add_layers(config, Kind::other, 0, layers - full);
        return add_layers(config, Kind::full, 0, full);
    }
    if (const std::int64_t every = fields.count({"global_attn_every_n_layers"}); every > 0) {
        const std::int64_t full = (layers + every - 1) / every;
        add_layers(config, Kind::sliding, fields.required({"local_attention"}), layers - full);
        return add_layers(config, Kind::full, 0, full);
    }
    if (const std::int64_t chunk = fields.count({"attention_chunk_size"}); chunk > 0) {
        const std::int64_t every = fields.count({"no_rope_layer_interval"}, 4);
        const std::int64_t full = every > 0 ? layers / every : 0;
        add_layers(config, Kind::chunked, chunk, layers - full);
        return add_layers(config, Kind::full, 0, full);
    }
    const bool slides = window > 0 && fields.flag("use_sliding_window", true);
    if (!slides) return add_layers(config, Kind::full, 0, layers);
    if (period > 1) {
        add_layers(config, Kind::sliding, window, layers - layers / period);
        return add_layers(config, Kind::full, 0, layers / period);
    }
    // Qwen: the first max_window_layers layers are full.
    const bool has_switch = fields.raw({"use_sliding_window"}).is_boolean();
    const std::int64_t full = has_switch ? std::min(layers, fields.count({"max_window_layers"})) : 0;
    add_layers(config, Kind::full, 0, full);
    add_layers(config, Kind::sliding, window, layers - full);
}

void read_heads(const Fields& fields, ModelConfig& config) {
    config.heads_q = fields.required({"num_attention_heads", "n_head", "n_heads", "num_heads"});
    const bool multi_query = fields.flag("multi_query", false) || fields.flag("multi_query_attention", false);
    const bool counted_groups =
        fields.raw({"num_key_value_heads", "num_kv_heads", "multi_query_group_num"}).is_number();
    const bool grouped = fields.flag("new_decoder_architecture", true);  // Falcon of 7 B has one key head instead
    config.heads_kv = counted_groups && grouped
                          ? fields.size({"num_key_value_heads", "num_kv_heads", "multi_query_group_num"}, 1)
                      : multi_query ? 1
                                    : config.heads_q;
    if (config.heads_q % config.heads_kv != 0)
        bad_field("num_key_value_heads", fmt::format("a divisor of {} heads", config.heads_q), config.heads_kv);
    config.head_dim = fields.size({"head_dim", "kv_channels", "d_kv", "attention_head_dim"}, 0);
    if (config.head_dim == 0) {
        if (config.hidden % config.heads_q != 0)
            bad_field("head_dim",
                      fmt::format("a whole number, since hidden_size {} is no multiple of {} heads", config.hidden,
                                  config.heads_q),
                      nullptr);
        config.head_dim = config.hidden / config.heads_q;
        config.assumed.push_back(fmt::format("head_dim is hidden_size / heads = {}", config.head_dim));
    }
    config.head_dim_v = fields.size({"v_head_dim"}, config.head_dim);
    config.kv_rank = fields.count({"kv_lora_rank"});
    if (config.kv_rank == 0) return;
    config.q_rank = fields.count({"q_lora_rank"});
    config.rope_dim = fields.required({"qk_rope_head_dim"});
    config.head_dim = fields.required({"qk_nope_head_dim"}) + config.rope_dim;
    config.head_dim_v = fields.required({"v_head_dim"});
    config.heads_kv = config.heads_q;
}

void read_mlp(const Fields& fields, ModelConfig& config) {
    const bool gated_by_name = !is_one_of(
        config.name, {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "mpt", "starcoder2",
                      "codegen", "gpt_bigcode", "bert", "roberta", "nemotron", "vit", "stablelm_alpha", "persimmon"});
    config.mlp_matrices = gated_by_name ? 3 : 2;
    config.intermediate =
        fields.size({"intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "feed_forward_dim"}, 0);
    config.experts = fields.count({"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"});
    if (config.experts > 0) {
        config.experts_per_token =
            fields.required({"num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"});
        config.expert_width = fields.size({"moe_intermediate_size"}, config.intermediate);
        if (config.expert_width == 0) fields.required({"moe_intermediate_size", "intermediate_size"});
        config.shared_width = fields.count({"shared_expert_intermediate_size"});
        if (config.shared_width == 0)
            config.shared_width = fields.count({"n_shared_experts", "num_shared_experts"}) * config.expert_width;
        const std::int64_t dense = std::min(config.layers, fields.count({"first_k_dense_replace"}));
        const std::int64_t step = std::max<std::int64_t>(
            1, fields.count({"decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period"}, 1));
        config.moe_layers = (config.layers - dense) / step;
        if (config.name == "llama4_text") {  // one shared expert; dense layers have a width of their own
            config.shared_width = config.expert_width;
            config.intermediate = fields.size({"intermediate_size_mlp"}, config.intermediate);
        }
    }
    if (config.intermediate == 0 && config.moe_layers < config.layers) {
        constexpr std::int64_t kUsual = 4;
        config.intermediate = kUsual * config.hidden;
        config.assumed.push_back(fmt::format("the MLP is 4 * hidden_size = {} wide", config.intermediate));
    }
    config.assumed.push_back(fmt::format("the MLP has {} matrices{}", config.mlp_matrices,
                                         config.mlp_matrices == 3 ? " (it has a gate)" : ""));
}

void read_dtype(const Fields& fields, ModelConfig& config) {
    std::string name = fields.text("torch_dtype");
    if (name.empty()) name = fields.text("dtype");
    if (name == "bfloat16") config.dtype = DType::bf16;
    if (name == "float16") config.dtype = DType::fp16;
}

}  // namespace

ModelConfig model_config_from_json(const ConfigJson& json) {
    if (!json.is_object()) bad_field("config", "a JSON object", json);
    ModelConfig config;
    const ConfigJson& part = text_part(json, config);
    const Fields fields(part);
    config.name = fields.text("model_type");
    if (config.name.empty()) config.name = Fields(json).text("model_type");
    if (config.name.empty()) config.name = "model";
    if (fields.flag("is_encoder_decoder", false))
        throw Error(
            ErrorCode::unsupported, "is_encoder_decoder",
            fmt::format("expected a model of one stack of layers, {} has an encoder and a decoder", config.name));
    config.hidden = fields.required({"hidden_size", "n_embd", "d_model", "dim"});
    config.layers = fields.required({"num_hidden_layers", "n_layer", "n_layers", "num_layers"});
    config.vocab = fields.size({"vocab_size", "padded_vocab_size"}, 0);
    if (config.vocab == 0) config.assumed.emplace_back("the file has no vocab_size, so the output layer is left out");
    config.tied = fields.flag("tie_word_embeddings", Fields(json).flag("tie_word_embeddings", false));
    refuse_unread_layers(fields, config);
    read_heads(fields, config);
    const ConfigJson& types = fields.raw({"layer_types", "layers_block_type"});
    if (types.is_null()) read_layer_pattern(fields, config);
    else read_layer_types(fields, types, config);
    read_mlp(fields, config);
    read_dtype(fields, config);
    config.softcap = fields.number({"attn_logit_softcapping"});
    config.sinks = config.name == "gpt_oss";
    config.causal = !is_one_of(config.name, {"bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert",
                                             "nomic_bert", "vit", "siglip_vision_model", "clip_vision_model", "esm"}) &&
                    fields.flag("is_causal", true) && !fields.flag("use_bidirectional_attention", false);
    config.assumed.emplace_back(config.causal ? "attention is causal" : "attention is not causal");
    return config;
}

ModelConfig read_model_config(const std::string& path) {
    std::error_code ignored;
    const bool folder = std::filesystem::is_directory(path, ignored);
    const std::string file = folder ? (std::filesystem::path(path) / "config.json").string() : path;
    constexpr std::uint64_t kMostBytes = std::uint64_t{64} << 20;
    const io::FileBytes bytes = io::read_file(file, kMostBytes);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data.get()), bytes.size);
    const ConfigJson json = ConfigJson::parse(text.begin(), text.end(), nullptr, false);
    if (json.is_discarded() || json.contains("weight_map")) {
        const std::string what = io::other_format(io::MemorySource(bytes.span(), file)).what;
        throw Error(ErrorCode::bad_data, file,
                    "expected the config.json of a model" + (what.empty() ? "" : ", it is " + what));
    }
    try {
        return model_config_from_json(json);
    } catch (const Error& error) {
        throw Error(error.code(), file, error.what());
    }
}

}  // namespace tessera::measure
