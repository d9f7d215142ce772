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
#include "measure/compared_models.hpp"
#include "measure/config_fields.hpp"
#include "measure/config_mlp.hpp"
#include "measure/model_layers.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

/// The part of a multi-modal config that describes the language model. It may be nested as deep as the file chooses.
const ConfigJson& text_part(const ConfigJson& json, ModelConfig& config) {
    const auto inner_of = [&](const ConfigJson& outer) -> const ConfigJson* {
        for (const char* name : {"text_config", "llm_config", "language_config", "thinker_config"}) {
            const auto found = outer.find(name);
            if (found == outer.end() || !found->is_object()) continue;
            config.assumed.push_back(
                fmt::format("the sizes are those of {}; other parts, such as vision, are left out", name));
            return &*found;
        }
        return nullptr;
    };
    const ConfigJson* part = &json;
    while (const ConfigJson* inner = inner_of(*part)) part = inner;
    return *part;
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

/// True unless the config is of an encoder: by its own fields, by the class that it was saved from, or by its type.
bool is_causal(const Fields& fields, const ConfigJson& json, const ModelConfig& config) {
    if (!fields.flag("is_causal", true) || fields.flag("use_bidirectional_attention", false)) return false;
    if (fields.flag("is_decoder", false)) return true;
    const ConfigJson& classes = Fields(json).raw({"architectures"});
    if (classes.is_array() && !classes.empty() && classes[0].is_string()) {
        const auto name = classes[0].get<std::string>();
        for (const char* of_encoder :
             {"ForMaskedLM", "ForPreTraining", "ForMaskedImageModeling", "ForImageClassification"})
            if (name.ends_with(of_encoder)) return false;
        if (name.ends_with("ForCausalLM") || name.ends_with("LMHeadModel")) return true;
    }
    return !is_one_of(config.name, {"albert",
                                    "bert",
                                    "big_bird",
                                    "camembert",
                                    "clip_vision_model",
                                    "convbert",
                                    "data2vec-text",
                                    "deberta",
                                    "deberta-v2",
                                    "deit",
                                    "dinov2",
                                    "dinov2_with_registers",
                                    "dinov3_vit",
                                    "distilbert",
                                    "electra",
                                    "ernie",
                                    "esm",
                                    "eurobert",
                                    "gte",
                                    "ibert",
                                    "jina_embeddings_v3",
                                    "layoutlm",
                                    "megatron-bert",
                                    "modernbert",
                                    "mpnet",
                                    "nomic_bert",
                                    "nystromformer",
                                    "pixtral",
                                    "roberta",
                                    "roberta-prelayernorm",
                                    "roformer",
                                    "siglip_vision_model",
                                    "siglip2_vision_model",
                                    "tapas",
                                    "vit",
                                    "vit_mae",
                                    "vit_msn",
                                    "xlm-roberta",
                                    "xlm-roberta-xl",
                                    "yoso"});
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
    read_layers(fields, config);
    read_mlp(fields, config);
    read_dtype(fields, Fields(json), config);
    config.softcap = fields.number({"attn_logit_softcapping"});
    config.sinks = config.name == "gpt_oss";
    config.causal = is_causal(fields, json, config);
    config.assumed.emplace_back(config.causal ? "attention is causal" : "attention is not causal");
    if (!parameters_were_compared(config.name))
        config.assumed.push_back(
            fmt::format("a {} has the layers that its fields say: its parameters were not compared "
                        "with those of transformers, or differ by more than 5 %",
                        config.name));
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
