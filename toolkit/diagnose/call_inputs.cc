// SPDX-License-Identifier: Apache-2.0
#include "diagnose/call_inputs.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "diagnose/kernel_text.hpp"

namespace tessera::diagnose {
namespace {

using Json = nlohmann::json;

/// The position of each input of an operator of PyTorch; -1: it has none.
struct Signature {
    const char* op;
    int q, mask, dropout, causal, scale, gqa;
    bool heads_last;  ///< [batch, len, heads, head_dim]
    int window = -1;  ///< keys to the left; those to the right follow
    int softcap = -1;
    int alibi = -1;
    int cu_seqlens = -1;
};

constexpr Signature kSignatures[] = {
    {"aten::scaled_dot_product_attention", 0, 3, 4, 5, 6, 7, false},
    {"aten::_scaled_dot_product_flash_attention", 0, -1, 3, 4, 6, -1, false},
    {"aten::_scaled_dot_product_efficient_attention", 0, 3, 5, 6, 7, -1, false},
    {"aten::_scaled_dot_product_cudnn_attention", 0, 3, 5, 6, 8, -1, false},
    {"aten::_scaled_dot_product_attention_math", 0, 3, 4, 5, 7, 8, false},
    {"aten::_scaled_dot_product_flash_attention_backward", 1, -1, 10, 11, 14, -1, false},
    {"aten::_scaled_dot_product_efficient_attention_backward", 1, 4, 9, 11, 12, -1, false},
    {"aten::_scaled_dot_product_cudnn_attention_backward", 1, 8, 13, 14, 15, -1, false},
    {"aten::_flash_attention_forward", 0, -1, 7, 8, 10, -1, true, 11, -1, 14, 3},
    {"aten::_efficient_attention_forward", 0, 3, 8, 9, 11, -1, true, -1, -1, -1, 4},
    {"flash_attn::_flash_attn_forward", 0, -1, 3, 5, 4, -1, true, 6, 8, 9},
    // Nodes of autograd record tensors alone, so that FlashAttention-4 and its Python wrappers show no causal flag.
    {"FlashAttnFunc", 0, -1, -1, -1, -1, -1, true},
    {"FlashAttnFuncBackward", 1, -1, -1, -1, -1, -1, true},
    {"flex_attention", 0, -1, -1, -1, -1, -1, false},
    {"aten::bmm", 0, -1, -1, -1, -1, -1, false},
};

std::optional<Sizes> sizes_at(const Json& lists, int index) {
    if (index < 0 || !lists.is_array() || static_cast<std::size_t>(index) >= lists.size()) return std::nullopt;
    const Json& list = lists[static_cast<std::size_t>(index)];
    if (!list.is_array() || list.empty() || list.size() > 8) return std::nullopt;
    Sizes sizes;
    for (const Json& size : list) {
        if (!size.is_number_integer()) return std::nullopt;
        sizes.push_back(size.get<std::int64_t>());
    }
    return sizes;
}

std::string text_at(const Json& list, int index) {
    if (index < 0 || !list.is_array() || static_cast<std::size_t>(index) >= list.size()) return "";
    const Json& value = list[static_cast<std::size_t>(index)];
    return value.is_string() ? value.get<std::string>() : "";
}

std::optional<Element> element_named(const std::string& type) {
    if (type.empty()) return std::nullopt;
    if (type == "c10::BFloat16") return Element::bf16;
    if (type == "c10::Half") return Element::fp16;
    if (type == "float") return Element::fp32;
    if (type == "double") return Element::fp64;
    if (contains(type, "Float8_e4m3")) return Element::fp8_e4m3;
    return Element::other;
}

Operand operand(const Json& json, int index, bool heads_last) {
    Operand result;
    result.shape = sizes_at(json.value("dims", Json()), index);
    result.strides = sizes_at(json.value("strides", Json()), index);
    result.element = element_named(text_at(json.value("types", Json()), index));
    if (!heads_last) return result;
    for (std::optional<Sizes>* sizes : {&result.shape, &result.strides}) {
        if (*sizes && (*sizes)->size() == 4) std::swap((**sizes)[1], (**sizes)[2]);
    }
    return result;
}

std::optional<bool> truth(const std::string& text) {
    if (text == "True" || text == "true") return true;
    if (text == "False" || text == "false") return false;
    return std::nullopt;
}

/// The memory-efficient operator's custom_mask_type: 0 is none, 1 causal from the first key on, 2 up to the last one.
std::optional<bool> causal(const std::string& text) {
    if (text == "0") return false;
    if (text == "1" || text == "2") return true;
    return truth(text);
}

std::optional<double> real(const std::string& text) {
    if (text.empty() || text.find_first_not_of("0123456789.eE+-") != std::string::npos) return std::nullopt;
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    return end == text.c_str() + text.size() ? std::optional(value) : std::nullopt;
}

/// Reads the arguments that PyTorch's SDPA does not have. A window to the right alone, of no keys, is the causal mask.
void read_beyond_sdpa(Call& call, const Signature& signature, const Json& json, const Json& scalars) {
    const double left = real(text_at(scalars, signature.window)).value_or(-1);
    const double right = signature.window < 0 ? -1 : real(text_at(scalars, signature.window + 1)).value_or(-1);
    if (left < 0 && right == 0) call.is_causal = true;
    if (left >= 0 || right > 0) call.beyond_sdpa.emplace_back("a window");
    if (real(text_at(scalars, signature.softcap)).value_or(0) > 0) call.beyond_sdpa.emplace_back("softcap");
    if (sizes_at(json.value("dims", Json()), signature.alibi)) call.beyond_sdpa.emplace_back("ALiBi");
    call.packed = sizes_at(json.value("dims", Json()), signature.cu_seqlens).has_value();
}

/// PyTorch's and flash-attn's flash operators, and the memory-efficient one with custom_mask_type 2, end the diagonal
/// at the last key: with equal lengths that is is_causal, and one query sees all keys.
void read_diagonal(Call& call, std::string_view op, const std::string& causal) {
    const bool of_flash = contains(op, "flash");
    if (call.is_causal != true || call.packed || !(of_flash || causal == "2")) return;
    if (call.q.shape->size() != 4 || call.k.shape->size() != 4) return;
    const std::int64_t queries = (*call.q.shape)[2], keys = (*call.k.shape)[2];
    if (queries == keys) return;
    call.is_causal = false;
    call.causal_lower_right = queries > 1;
}

/// Reads [batch heads, len_q, head_dim] x [batch heads, head_dim, len_kv] as Q and K of one batch.
std::optional<Call> call_of_gemm(const Json& json) {
    const auto a = sizes_at(json.value("dims", Json()), 0);
    const auto b = sizes_at(json.value("dims", Json()), 1);
    if (!a || !b || a->size() != 3 || b->size() != 3) return std::nullopt;
    Call call;
    call.heads_in_batch = true;
    call.q.shape = Sizes{1, (*a)[0], (*a)[1], (*a)[2]};
    call.k.shape = call.v.shape = Sizes{1, (*b)[0], (*b)[2], (*b)[1]};
    call.q.element = call.k.element = call.v.element = element_named(text_at(json.value("types", Json()), 0));
    return call;
}

}  // namespace

std::optional<Call> call_of_inputs(std::string_view op, const std::string& inputs) {
    // Inductor's launch of FlexAttention's template has Q, K and V first: "triton_tem_fused_flex_attention_0".
    const bool flex = op.substr(0, 11) == "triton_tem_" && contains_any(op, {"flex_attention", "flex_decoding"}) &&
                      !contains(op, "backward");
    if (flex) op = "flex_attention";
    const auto* signature = std::find_if(std::begin(kSignatures), std::end(kSignatures),
                                         [&](const Signature& row) { return op == row.op; });
    if (signature == std::end(kSignatures) || inputs.empty()) return std::nullopt;
    const Json json = Json::parse(inputs, nullptr, false);
    if (!json.is_object()) return std::nullopt;
    if (op == "aten::bmm") return call_of_gemm(json);
    Call call;
    call.q = operand(json, signature->q, signature->heads_last);
    call.k = operand(json, signature->q + 1, signature->heads_last);
    call.v = operand(json, signature->q + 2, signature->heads_last);
    if (!call.q.shape || !call.k.shape || call.q.shape->size() < 3) return std::nullopt;
    const Json scalars = json.value("scalars", Json());
    if (signature->mask >= 0) {
        call.mask = operand(json, signature->mask, false);
        const std::string type = text_at(json.value("types", Json()), signature->mask);
        if (!call.mask.shape) call.mask_kind = MaskKind::none;
        else if (!type.empty()) call.mask_kind = type == "bool" ? MaskKind::boolean : MaskKind::floating;
    } else {
        call.mask_kind = MaskKind::none;  // the operator takes none
    }
    if (flex) {
        call.mask_kind.reset();  // a block mask, which the trace does not show
        if (call.q.shape->size() != 4 || call.k.shape->size() != 4) return std::nullopt;
    }
    call.is_causal = causal(text_at(scalars, signature->causal));
    call.dropout = real(text_at(scalars, signature->dropout));
    call.scale = real(text_at(scalars, signature->scale));
    call.enable_gqa = truth(text_at(scalars, signature->gqa));
    if (signature->gqa < 0 && call.q.shape->size() == 4 && call.k.shape->size() == 4)
        // these operators accept grouped heads without a flag
        call.enable_gqa = (*call.q.shape)[1] != (*call.k.shape)[1];
    call.nested = false;
    read_beyond_sdpa(call, *signature, json, scalars);
    read_diagonal(call, op, text_at(scalars, signature->causal));
    return call;
}

Sizes shape_of_input(const std::string& inputs, int index) {
    const Json json = Json::parse(inputs, nullptr, false);
    return json.is_object() ? sizes_at(json.value("dims", Json()), index).value_or(Sizes{}) : Sizes{};
}

Sizes shape_of_largest_input(const std::string& inputs) {
    const Json json = Json::parse(inputs, nullptr, false);
    const Json dims = json.is_object() ? json.value("dims", Json()) : Json();
    Sizes largest;
    double most = 0;
    for (int index = 0; dims.is_array() && index < static_cast<int>(dims.size()); ++index) {
        const Sizes sizes = sizes_at(dims, index).value_or(Sizes{});
        const double count =
            std::accumulate(sizes.begin(), sizes.end(), sizes.empty() ? 0.0 : 1.0,
                            [](double product, std::int64_t size) { return product * static_cast<double>(size); });
        if (count <= most) continue;
        most = count;
        largest = sizes;
    }
    return largest;
}

GemmShapes gemm_shapes_of(std::string_view op, const std::string& inputs) {
    if (op != "aten::bmm" && op != "aten::baddbmm") return {};
    const int left = op == "aten::bmm" ? 0 : 1;  // baddbmm's first input is the addend
    const Sizes a = shape_of_input(inputs, left);
    const Sizes b = shape_of_input(inputs, left + 1);
    if (a.size() != 3 || b.size() != 3) return {};
    return {{a[1], a[2]}, {b[1], b[2]}, {a[1], b[2]}};
}

std::optional<RepeatedHeads> repeat_of_inputs(std::string_view op, const std::string& inputs) {
    const Json json = Json::parse(inputs, nullptr, false);
    if (!json.is_object()) return std::nullopt;
    const auto shape = sizes_at(json.value("dims", Json()), 0);
    const Json scalars = json.value("scalars", Json());
    constexpr std::int64_t kMostHeads = 1 << 20;  // products of sizes stay in 64 bits
    constexpr std::int64_t kMostTimes = 1024;
    if (!shape || shape->size() < 4 || (*shape)[0] > INT32_MAX || (*shape)[1] > kMostHeads) return std::nullopt;
    if (op == "aten::repeat_interleave") {
        const auto times = real(text_at(scalars, 1));
        const std::string dim = text_at(scalars, 2);
        if (shape->size() != 4 || !times || *times < 2 || *times > kMostTimes || (dim != "1" && dim != "-3"))
            return std::nullopt;
        return RepeatedHeads{(*shape)[0], (*shape)[1], static_cast<std::int64_t>(*times), (*shape)[2], (*shape)[3]};
    }
    if (shape->size() != 5 || (*shape)[2] != 1) return std::nullopt;
    const std::string list = text_at(scalars, 1);  // "[2, 8, 4, 4096, 128]"; the reader of lists puts a comma after it
    const Json sizes = Json::parse(list.substr(0, list.rfind(']') + 1), nullptr, false);
    if (!sizes.is_array() || sizes.size() != 5 || !sizes[2].is_number_integer()) return std::nullopt;
    const auto times = sizes[2].get<std::int64_t>();
    if (times < 2 || times > kMostTimes) return std::nullopt;
    return RepeatedHeads{(*shape)[0], (*shape)[1], times, (*shape)[3], (*shape)[4]};
}

std::string text_of(const Call& call) {
    std::string text;
    const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
    if (call.q.shape && call.q.shape->size() == 4) {
        const Sizes& q = *call.q.shape;
        std::string heads = std::to_string(q[1]);
        std::string len = std::to_string(q[2]);
        if (call.k.shape && call.k.shape->size() == 4) {
            const Sizes& k = *call.k.shape;
            if (k[1] != q[1]) heads += "/" + std::to_string(k[1]);
            if (k[2] != q[2]) len += " x " + std::to_string(k[2]);
        }
        add((call.heads_in_batch ? "batch x heads " : "batch " + std::to_string(q[0]) + ", heads ") + heads + ", len " +
            len);
        std::string head_dim = std::to_string(q[3]);
        if (call.v.shape && call.v.shape->size() == 4 && (*call.v.shape)[3] != q[3])
            head_dim += "/" + std::to_string((*call.v.shape)[3]);
        add("head_dim " + head_dim);
    } else if (call.q.shape) {
        std::string sizes;
        for (const std::int64_t size : *call.q.shape) sizes += (sizes.empty() ? "" : " x ") + std::to_string(size);
        add("q of " + sizes);
    }
    constexpr const char* kElements[] = {"fp16", "bf16", "fp32", "fp64", "fp8", "another dtype"};
    if (call.q.element) add(kElements[static_cast<std::size_t>(*call.q.element)]);
    if (call.mask_kind == MaskKind::boolean) add("attn_mask of bool");
    if (call.mask_kind == MaskKind::floating) add("attn_mask of numbers");
    if (call.causal_lower_right) add("causal_lower_right");
    else if (call.is_causal) add(*call.is_causal ? "is_causal" : "not causal");
    if (call.dropout.value_or(0) > 0) add("dropout");
    if (call.enable_gqa.value_or(false)) add("enable_gqa");
    if (call.packed) add("packed documents");
    for (const std::string& what : call.beyond_sdpa) add(what);
    return text;
}

}  // namespace tessera::diagnose
