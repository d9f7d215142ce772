// SPDX-License-Identifier: Apache-2.0
#include "call_options.hpp"

#include <array>
#include <charconv>

#include "device_option.hpp"
#include "diagnose/rules.hpp"
#include "model/machine.hpp"
#include "parse.hpp"

namespace tessera::cli {
namespace {

using diagnose::Call;
using diagnose::Element;
using diagnose::Operand;
using diagnose::Sizes;

/// Parses "9.19.0" as up to three numbers; missing ones are 0. An error shows all of `text`.
std::array<int, 3> parse_dotted(const std::string& option, const std::string& text, const char* expected) {
    std::array<int, 3> numbers{};
    const char* at = text.data();
    const char* end = at + text.size();
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        const auto [next, error] = std::from_chars(at, end, numbers[i]);
        if (error != std::errc{} || numbers[i] < 0 || numbers[i] > 9999) unexpected(option, expected, text);
        at = next;
        if (at == end) return numbers;
        if (*at++ != '.') break;
    }
    unexpected(option, expected, text);
}

/// Parses [batch, heads, len, head_dim], of which one may be missing.
Sizes parse_shape(const std::string& whole, const std::string& text) {
    Sizes sizes;
    for (const std::string& part : parse_list("--shape", text)) sizes.push_back(parse_size("--shape", part));
    if (sizes.size() < 3 || sizes.size() > 4)
        unexpected("--shape", "BATCH,HEADS,LEN,DIM of q, then /k and /v if they differ", whole);
    return sizes;
}

/// Splits "q/k/v", "q/kv" or "qkv" into its three parts.
std::array<std::string, 3> parts_of(const std::string& option, const std::string& text, const char* expected) {
    std::vector<std::string> parts(1);
    for (const char c : text) {
        if (c == '/') parts.emplace_back();
        else parts.back() += c;
    }
    if (parts.size() > 3) unexpected(option, expected, text);
    return {parts.front(), parts.size() > 1 ? parts[1] : parts.front(), parts.back()};
}

void parse_shapes(const std::string& text, Call& call) {
    const auto parts = parts_of("--shape", text, "at most the shapes of q, k and v");
    call.q.shape = parse_shape(text, parts[0]);
    call.k.shape = parse_shape(text, parts[1]);
    call.v.shape = parse_shape(text, parts[2]);
}

/// Sets the shapes from --batch, --len, --heads and --head-dim, whose defaults are those of the other commands.
void set_shapes(const CallOptions& options, Call& call) {
    const auto size_or = [](const char* option, const std::string& text, std::int64_t otherwise) {
        return text.empty() ? otherwise : parse_size(option, text);
    };
    const auto pair_or = [](const char* option, const std::string& text, std::int64_t otherwise) {
        return text.empty() ? std::pair(otherwise, otherwise) : parse_pair(option, text, '/');
    };
    if (!options.len.empty() && !options.len_q.empty() && !options.len_kv.empty())
        throw UsageError("--len", "has no effect beside --len-q and --len-kv; leave it out");
    if (options.len.empty() && (options.len_q.empty() || options.len_kv.empty()))
        throw UsageError("--len", "expected the length of q, k and v, or --len-q and --len-kv, got nothing");
    if (!options.heads.empty()) expect_no_grouped_heads("--heads", options.heads);
    constexpr std::int64_t kHeads = 8, kHeadDim = 64;
    const std::int64_t batch = size_or("--batch", options.batch, 1), len = size_or("--len", options.len, 0);
    const auto [heads_q, heads_kv] = pair_or("--heads", options.heads, kHeads);
    const auto [head_dim, head_dim_v] = pair_or("--head-dim", options.head_dim, kHeadDim);
    const std::int64_t len_kv = size_or("--len-kv", options.len_kv, len);
    call.q.shape = Sizes{batch, heads_q, size_or("--len-q", options.len_q, len), head_dim};
    call.k.shape = Sizes{batch, heads_kv, len_kv, head_dim};
    call.v.shape = Sizes{batch, heads_kv, len_kv, head_dim_v};
}

/// Parses "h200", "NVIDIA H200", "9.0", "sm90"; for AMD, "gfx942", "mi300x" or "AMD Instinct MI300X".
void parse_gpu(const std::string& given, diagnose::Gpu& gpu) {
    std::string text = given;
    if (const std::string name = usual_name(given); name.starts_with("mi") && name.size() > 4) {
        text = "AMD Instinct ";
        for (const char c : name) text += c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    }
    if (text.starts_with("gfx") || text.starts_with("AMD ")) {
        gpu.name = text;
        if (text.starts_with("gfx")) gpu.gfx = text.substr(0, text.find(':'));  // "gfx942:sramecc+:xnack-"
        diagnose::recognise_amd(gpu);
        if (gpu.gfx.empty())
            unexpected("--gpu", "an AMD GPU of MI200, MI300 or MI350, or its architecture (gfx942)", given);
        return;
    }
    const model::Machine* machine = model::find_machine(usual_name(text));
    if (machine == nullptr) machine = model::machine_of_device(text);
    if (machine != nullptr && machine->capability > 0) {
        gpu.name = machine->title;
        gpu.capability = static_cast<int>(machine->capability * 10 + 0.5);
    } else {
        const std::string expected = fmt::format(
            "a compute capability (9.0, sm90), one of AMD's (gfx942), or one of {} (tessera machine describes them)",
            gpu_names());
        const char* kExpected = expected.c_str();
        const bool sm = text.starts_with("sm");
        const std::string digits = sm ? text.substr(2) : text;
        if (digits.find_first_not_of("0123456789.") != std::string::npos)
            throw UsageError("--gpu", fmt::format("expected {}, got \"{}\"{}", expected, text, perhaps_machine(text)));
        const auto numbers = parse_dotted("--gpu", digits, kExpected);
        const int major = sm ? numbers[0] / 10 : numbers[0];
        const int minor = sm ? numbers[0] % 10 : numbers[1];
        if (major < 1 || major > 99 || minor > 9 || numbers[2] != 0) unexpected("--gpu", kExpected, text);
        gpu.capability = major * 10 + minor;
    }
    gpu.rocm = false;
}

/// Parses "none", "causal", "lower-right" (PyTorch's causal_lower_right), or a tensor: "bool" or "float", with its
/// shape after a colon.
void parse_mask(const std::string& text, Call& call) {
    const std::size_t colon = text.find(':');
    const auto kind = text.substr(0, colon);
    call.is_causal = kind == "causal";
    call.causal_lower_right = kind == "lower-right";
    using Kind = diagnose::MaskKind;
    call.mask_kind = parse_choice<Kind>("--mask", kind,
                                        {{"none", Kind::none},
                                         {"causal", Kind::none},
                                         {"lower-right", Kind::none},
                                         {"bool", Kind::boolean},
                                         {"float", Kind::floating}});
    if (colon == std::string::npos) return;
    if (call.mask_kind == Kind::none) unexpected("--mask", "a shape only after bool or float", text);
    Sizes shape;
    for (const std::string& part : parse_list("--mask", text.substr(colon + 1)))
        shape.push_back(parse_size("--mask", part));
    call.mask.shape = shape;
}

diagnose::Enabled parse_off(const std::string& text) {
    diagnose::Enabled enabled;
    using Switch = bool diagnose::Enabled::*;
    const std::vector<std::string> names = parse_list("--off", text);
    expect_each_once("--off", text, names);
    for (const std::string& name : names) {
        enabled.*parse_choice<Switch>("--off", name,
                                      {{"flash", &diagnose::Enabled::flash},
                                       {"efficient", &diagnose::Enabled::efficient},
                                       {"math", &diagnose::Enabled::math},
                                       {"cudnn", &diagnose::Enabled::cudnn}}) = false;
    }
    return enabled;
}

Element parse_element(const std::string& text) {
    return parse_choice<Element>("--dtype", text,
                                 {{"fp16", Element::fp16},
                                  {"bf16", Element::bf16},
                                  {"fp32", Element::fp32},
                                  {"fp64", Element::fp64},
                                  {"fp8", Element::fp8_e4m3}});
}

}  // namespace

void CallOptions::declare(CLI::App& command) {
    constexpr const char* kGroup = "One call, without a trace";
    const auto add = [&](const char* name, std::string& value, const char* type, const char* description) {
        command.add_option(name, value, description)->type_name(type)->group(kGroup);
    };
    add("--torch", torch, "VERSION", "PyTorch's version, 2.4 to 2.15");
    add("--gpu,--device", gpu, "GPU", "h200, a100, ..., a compute capability: 9.0, sm90; or AMD's: gfx942");
    add("--shape", shape, "B,H,L,D", "Shape of q; /k and /v after it if they differ: 2,32,1,128/2,8,4096,128");
    add("--batch", batch, "N", "In place of --shape: sequences; default 1");
    add("--len", len, "N", "In place of --shape: queries and keys per sequence");
    add("--len-q", len_q, "N", "In place of --shape: queries, when they are not as many as keys");
    add("--len-kv", len_kv, "N", "In place of --shape: keys, when they are not as many as queries");
    add("--heads", heads, "Q[/KV]",
        "In place of --shape: query heads, and key heads that groups of them share: 32/8; default 8");
    add("--head-dim", head_dim, "D[/DV]", "In place of --shape: width of q and k, and of v; default 64");
    add("--dtype", dtype, "TYPE", "fp16, bf16, fp32, fp64 or fp8: dtype of q; /k and /v after it if they differ");
    add("--mask", mask, "MASK",
        "none, causal (is_causal), lower-right (causal_lower_right of torch.nn.attention.bias), or a tensor: bool or "
        "float, and its shape: bool:1,1,512,512");
    add("--dropout", dropout, "P", "dropout_p; default 0");
    command.add_flag("--grad", grad, "q, k, v require gradients")->group(kGroup);
    command.add_flag("--gqa", gqa, "enable_gqa=True")->group(kGroup);
    add("--cudnn", cudnn, "VERSION", "cuDNN at run time: 9.19.0; default: what PyPI's wheel requires");
    add("--cuda", cuda, "VERSION", "CUDA that PyTorch was built for: 13.0; default: that of PyPI's wheel");
    add("--off", off, "BACKENDS", "Backends that are switched off: flash, efficient, math, cudnn");
    command.add_flag("--deterministic", deterministic, "torch.use_deterministic_algorithms(True)")->group(kGroup);
}

std::string CallOptions::first_given() const {
    for (const auto& [option, text] : {std::pair{"--torch", &torch},
                                       {"--gpu", &gpu},
                                       {"--shape", &shape},
                                       {"--batch", &batch},
                                       {"--len", &len},
                                       {"--len-q", &len_q},
                                       {"--len-kv", &len_kv},
                                       {"--heads", &heads},
                                       {"--head-dim", &head_dim},
                                       {"--dtype", &dtype},
                                       {"--mask", &mask},
                                       {"--dropout", &dropout},
                                       {"--cudnn", &cudnn},
                                       {"--cuda", &cuda},
                                       {"--off", &off}}) {
        if (!text->empty()) return option;
    }
    return grad ? "--grad" : gqa ? "--gqa" : deterministic ? "--deterministic" : "";
}

std::pair<std::string, std::string> CallOptions::first_size() const {
    for (const auto& [option, text] : {std::pair{"--batch", &batch},
                                       {"--len", &len},
                                       {"--len-q", &len_q},
                                       {"--len-kv", &len_kv},
                                       {"--heads", &heads},
                                       {"--head-dim", &head_dim}}) {
        if (!text->empty()) return {option, *text};
    }
    return {};
}

diagnose::Call CallOptions::call() const {
    Call call;
    if (!torch.empty()) {
        const auto version = parse_dotted("--torch", torch.substr(0, torch.find('+')), "a version like 2.11 or 2.5.1");
        call.torch = diagnose::Version{version[0], version[1], version[2]};
    }
    if (!gpu.empty()) parse_gpu(gpu, call.gpu);
    if (!shape.empty() && !first_size().first.empty())
        throw UsageError(first_size().first, "expected --shape or the sizes one by one, got both");
    if (!shape.empty()) parse_shapes(shape, call);
    else if (!first_size().first.empty()) set_shapes(*this, call);
    if (!mask.empty()) parse_mask(mask, call);
    if (!dropout.empty()) {
        call.dropout = parse_number("--dropout", dropout);
        if (!(*call.dropout >= 0 && *call.dropout < 1)) unexpected("--dropout", "a probability 0 <= P < 1", dropout);
    }
    if (!cudnn.empty()) {
        const auto v = parse_dotted("--cudnn", cudnn, "a version like 9.19.0");
        call.cudnn = v[0] * 10000 + v[1] * 100 + v[2];
    }
    if (!cuda.empty()) {
        const auto v = parse_dotted("--cuda", cuda, "a version like 13.0");
        call.cuda = v[0] * 1000 + v[1] * 10;
    }
    for (const auto& [option, text] : {std::pair{"--cudnn", &cudnn}, {"--cuda", &cuda}}) {
        if (!text->empty() && call.gpu.rocm.value_or(false))
            throw UsageError(option, fmt::format("has no effect with AMD's {}; leave it out", gpu));
    }
    if (!off.empty()) call.enabled = parse_off(off);
    if (!dtype.empty()) {
        const auto parts = parts_of("--dtype", dtype, "at most the dtypes of q, k and v");
        call.q.element = parse_element(parts[0]);
        call.k.element = parse_element(parts[1]);
        call.v.element = parse_element(parts[2]);
    }
    for (Operand* operand : {&call.q, &call.k, &call.v}) operand->requires_grad = grad;
    call.mask.requires_grad = false;
    call.enable_gqa = gqa;
    call.deterministic = deterministic;
    return call;
}

}  // namespace tessera::cli
