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
#include "measure/config_fields.hpp"
#include "measure/config_mlp.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

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

/// Sizes in the objects attn_config and ffn_config, by their usual names: DBRX keeps its key heads and experts there.
ConfigJson inner_sizes(const ConfigJson& json) {
    struct Inner {
        const char *object, *name, *usual;
    };
    constexpr Inner kInner[] = {{"attn_config", "kv_n_heads", "num_key_value_heads"},
                                {"ffn_config", "moe_num_experts", "num_experts"},
                                {"ffn_config", "moe_top_k", "num_experts_per_tok"},
                                {"ffn_config", "ffn_hidden_size", "intermediate_size"}};
    ConfigJson sizes = ConfigJson::object();
    for (const auto& [object, name, usual] : kInner) {
        const auto found = json.find(object);
        if (found == json.end() || !found->is_object()) continue;
        const auto value = found->find(name);
        if (value == found->end() || value->is_null()) continue;
        if (!value->is_number()) bad_field(fmt::format("{}.{}", object, name), "a whole number", *value);
        sizes[usual] = *value;
    }
    return sizes;
}

void add_layers(ModelConfig& config, LayerGroup::Kind kind, std::int64_t width, std::int64_t layers) {
    for (LayerGroup& group : config.groups) {
        if (group.kind != kind || group.width != width) continue;
        group.layers += layers;
        return;
    }
    if (layers > 0) config.groups.push_back({kind, layers, width});
}

[[noreturn]] void refuse_field(const std::string& field, std::string_view expected, const ModelConfig& config,
                               const std::string& has = "others") {
    throw Error(ErrorCode::unsupported, field, fmt::format("expected {}, {} has {}", expected, config.name, has));
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
        } else if (is_one_of(type, {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "rglru", "kda",
                                    "gated_deltanet", "lightning_attention"})) {
            add_layers(config, Kind::other, 0, 1);
        } else {
            const auto printable = [](char c) { return c > ' ' && c <= '~'; };
            const bool shown = type.size() < 60 && std::all_of(type.begin(), type.end(), printable);
            refuse_field("layer_types", "layers of softmax attention, full, sliding or chunked, or of none", config,
                         shown ? type : "others");
        }
    }
}

/// Throws for models whose layers differ in ways that no field read here tells, and for sizes in places that are not
/// read.
void refuse_unread_layers(const Fields& fields, const ModelConfig& config) {
    for (const char* name : {"hybrid_override_pattern", "block_configs", "block_types", "num_query_heads"}) {
        if (!fields.raw({name}).is_null())
            refuse_field(name, "a model whose layers all have attention and an MLP", config);
    }
    for (const char* name : {"mlp_only_layers", "moe_layer_freq", "moe_layers"}) {
        const ConfigJson& value = fields.raw({name});
        const bool listed = value.is_array() && !value.empty();
        const bool spaced = value.is_number_integer() && value != 1;
        // Llama 4 lists the layers that its step gives.
        const bool known =
            std::string_view(name) == "moe_layers" && fields.raw({"interleave_moe_layer_step"}).is_number();
        if ((listed && !known) || spaced)
            refuse_field(name, "a model whose layers after the first few all have experts", config);
    }
    if (fields.flag("block_auto_adjust_ff_dim", false))
        refuse_field("block_auto_adjust_ff_dim", "an MLP as wide as its field says", config, "another");
    if (!fields.raw({"expert_ffn_hidden_size"}).is_null())
        refuse_field("expert_ffn_hidden_size", "a model whose layers have one attention each", config);
    const bool says_which = !fields
                                 .raw({"layer_types", "layers_block_type", "attn_layer_period", "attn_layer_indices",
                                       "full_attn_idxs", "full_attention_interval"})
                                 .is_null();
    for (const char* name : {"mamba_d_state", "mamba_d_conv", "mamba_expand", "ssm_state_size", "state_size"}) {
        if (!says_which && !fields.raw({name}).is_null())
            refuse_field(name, "a list of the layers that have attention", config, "a state-space model and none");
    }
    const auto number = [&](const char* name) {
        const ConfigJson& value = fields.raw({name});
        return value.is_number_integer() ? value.get<std::int64_t>() : 0;
    };
    if (number("hidden_size_per_layer_input") > 0)
        refuse_field("hidden_size_per_layer_input", "a model with one embedding for all its layers", config,
                     "one for each");
    if (number("num_kv_shared_layers") > 0)
        refuse_field("num_kv_shared_layers", "a model whose layers each have keys and values of their own", config,
                     "layers that share them");
    if (const std::int64_t groups = number("num_hidden_groups"); groups > 0 && groups < config.layers)
        refuse_field("num_hidden_groups", "a model whose layers each have weights of their own", config,
                     "layers that share them");
    if (const std::int64_t width = number("embedding_size"); width > 0 && width != config.hidden)
        refuse_field("embedding_size", "a model whose embedding is hidden_size wide", config, "another");
}

/// GPT-Neo's attention_types, such as [[["global", "local"], 6]]: pairs of kinds and how often they repeat.
void read_attention_types(const Fields& fields, const ConfigJson& pairs, ModelConfig& config) {
    constexpr std::int64_t kUsualWindow = 256;
    const char* expected = "a list of pairs such as [[\"global\", \"local\"], 6], one kind for each layer";
    if (!pairs.is_array()) bad_field("attention_types", expected, pairs);
    std::int64_t layers = 0;
    for (const ConfigJson& pair : pairs) {
        if (!pair.is_array() || pair.size() != 2 || !pair[0].is_array() || !pair[1].is_number_unsigned() ||
            pair[1].get<std::uint64_t>() > static_cast<std::uint64_t>(config.layers))
            bad_field("attention_types", expected, pair);
        for (const ConfigJson& kind : pair[0]) {
            const auto times = pair[1].get<std::int64_t>();
            if (kind == "local")
                add_layers(config, LayerGroup::Kind::sliding, fields.size({"window_size"}, kUsualWindow), times);
            else if (kind == "global") add_layers(config, LayerGroup::Kind::full, 0, times);
            else bad_field("attention_types", "global or local", kind);
            layers += times;
        }
    }
    if (layers != config.layers) bad_field("attention_types", fmt::format("{} kinds", config.layers), layers);
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
    if (const ConfigJson& indices = fields.raw({"attn_layer_indices", "full_attn_idxs"}); indices.is_array()) {
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
    config.kv_rank = fields.count({"kv_lora_rank"});
    if (config.kv_rank > 0) {
        config.q_rank = fields.count({"q_lora_rank"});
        config.rope_dim = fields.required({"qk_rope_head_dim"});
        config.head_dim = fields.required({"qk_nope_head_dim"}) + config.rope_dim;
        config.head_dim_v = fields.required({"v_head_dim"});
        config.heads_kv = config.heads_q;
        return;
    }
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
}

/// The number format of the weights: that of quantization_config, or torch_dtype.
void read_dtype(const Fields& fields, const Fields& outer, ModelConfig& config) {
    std::string name = fields.text("torch_dtype");
    for (const std::string& other : {fields.text("dtype"), outer.text("torch_dtype"), outer.text("dtype")})
        if (name.empty()) name = other;
    if (name == "bfloat16") config.dtype = DType::bf16;
    if (name == "float16") config.dtype = DType::fp16;
    config.weights = config.dtype ? name_of(*config.dtype) : name == "float32" ? "fp32" : name;
    const ConfigJson* quantised = &fields.raw({"quantization_config"});
    if (quantised->is_null()) quantised = &outer.raw({"quantization_config"});
    if (!quantised->is_object()) return;
    const Fields how(*quantised);
    config.weights = how.text("quant_method").empty() ? "quantised" : how.text("quant_method");
    if (how.raw({"bits"}).is_number_integer()) config.weights += fmt::format(", {} bits", how.count({"bits"}));
    else if (how.flag("load_in_4bit", false) || how.flag("_load_in_4bit", false)) config.weights += ", 4 bits";
    else if (how.flag("load_in_8bit", false) || how.flag("_load_in_8bit", false)) config.weights += ", 8 bits";
}

/// Reads whether the output layer has the weights of the embedding. transformers ties them unless a family says not to,
/// so the families listed here are those whose files may leave the field out and mean true.
void read_tying(const Fields& fields, const Fields& outer, ModelConfig& config) {
    const char* field = "tie_word_embeddings";
    const bool by_default =
        config.name.starts_with("gemma") ||
        is_one_of(config.name, {"gpt2",        "opt",        "bert",       "roberta", "xlm-roberta",
                                "distilbert",  "electra",    "modernbert", "esm",     "falcon",
                                "cohere",      "cohere2",    "mpt",        "bloom",   "gpt_neo",
                                "gpt_bigcode", "starcoder2", "smollm3",    "xglm",    "recurrent_gemma"});
    config.tied = fields.flag(field, outer.flag(field, by_default));
    const bool said = fields.raw({field}).is_boolean() || outer.raw({field}).is_boolean();
    if (said || config.vocab == 0) return;
    config.assumed.push_back(
        by_default ? fmt::format("the output layer shares the embedding's weights, as {} does by default", config.name)
                   : "the output layer has weights of its own");
}

/// Python writes NaN, Infinity and -Infinity, which are no JSON; no field that is read here may be one, so they become
/// null.
std::string without_infinities(std::string_view text) {
    std::string result;
    bool in_string = false;
    for (std::size_t at = 0; at < text.size();) {
        const char c = text[at];
        if (in_string && c == '\\' && at + 1 < text.size()) {
            result += text.substr(at, 2);
            at += 2;
            continue;
        }
        if (c == '"') in_string = !in_string;
        std::string_view found;
        for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
            if (!in_string && found.empty() && text.substr(at, word.size()) == word) found = word;
        }
        if (found.empty()) result += c;
        else result += "null";
        at += found.empty() ? 1 : found.size();
    }
    return result;
}

}  // namespace

ConfigJson parse_config(std::string_view text) { return ConfigJson::parse(without_infinities(text), nullptr, false); }

ModelConfig model_config_from_json(const ConfigJson& json) {
    if (!json.is_object()) bad_field("config", "a JSON object", json);
    ModelConfig config;
    const ConfigJson& part = text_part(json, config);
    const ConfigJson inner = inner_sizes(part);
    const Fields fields(part, &inner);
    config.name = fields.text("model_type");
    if (config.name.empty()) config.name = Fields(json).text("model_type");
    if (config.name.empty()) config.name = "model";
    // The name is shown, so it must not break lines or move a terminal's cursor.
    const auto shown = [](char c) { return c > ' ' && c <= '~'; };
    if (!std::all_of(config.name.begin(), config.name.end(), shown))
        bad_field("model_type", "a name of printable ASCII", config.name);
    if (fields.flag("is_encoder_decoder", false))
        throw Error(
            ErrorCode::unsupported, "is_encoder_decoder",
            fmt::format("expected a model of one stack of layers, {} has an encoder and a decoder", config.name));
    config.hidden = fields.required({"hidden_size", "n_embd", "d_model", "dim"});
    config.layers = fields.required({"num_hidden_layers", "n_layer", "n_layers", "num_layers"});
    config.vocab = fields.size({"vocab_size", "padded_vocab_size"}, 0);
    if (config.vocab == 0) config.assumed.emplace_back("the file has no vocab_size, so the output layer is left out");
    read_tying(fields, Fields(json), config);
    refuse_unread_layers(fields, config);
    read_heads(fields, config);
    const ConfigJson& types = fields.raw({"layer_types", "layers_block_type"});
    const ConfigJson& pairs = fields.raw({"attention_types"});
    if (!pairs.is_null() || config.name == "gpt_neo") read_attention_types(fields, pairs, config);
    else if (types.is_null()) read_layer_pattern(fields, config);
    else read_layer_types(fields, types, config);
    read_mlp(fields, config);
    read_dtype(fields, Fields(json), config);
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
    const ConfigJson json = parse_config(text);
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
