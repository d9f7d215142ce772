// SPDX-License-Identifier: Apache-2.0
#include "measure/model_layers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

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

}  // namespace

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
            refuse_field(name, "a model whose layers behind the first few all have experts", config);
    }
    const ConfigJson& crossed = fields.raw({"cross_attention_layers"});
    if ((crossed.is_array() && !crossed.empty()) || fields.flag("add_cross_attention", false))
        refuse_field(crossed.is_array() ? "cross_attention_layers" : "add_cross_attention",
                     "a model whose layers attend to their own sequence", config, "some that attend to another one");
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

void read_layers(const Fields& fields, ModelConfig& config) {
    const ConfigJson& types = fields.raw({"layer_types", "layers_block_type"});
    const ConfigJson& pairs = fields.raw({"attention_types"});
    if (!pairs.is_null() || config.name == "gpt_neo") read_attention_types(fields, pairs, config);
    else if (types.is_null()) read_layer_pattern(fields, config);
    else read_layer_types(fields, types, config);
}

}  // namespace tessera::measure
