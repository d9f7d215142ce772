// SPDX-License-Identifier: Apache-2.0
//
// Reads FlashAttention-1 and -2. The number of a kernel's switches gives the release of FlashAttention-2 (checked over
// every tag of version 2 of github.com/Dao-AILab/flash-attention).
#include <algorithm>

#include "diagnose/name_readers.hpp"

namespace tessera::diagnose {
namespace {

constexpr int kAmpere = 80;

/// The switches of a kernel, and the releases whose kernels have that many.
struct SwitchRow {
    std::size_t count;
    const char* release;
    const char*
        names;  ///< the switches: d dropout, c causal, w window, a ALiBi, s softcap, k split, + append, . others
};

constexpr SwitchRow kForward[] = {{5, "2.0.0 to 2.2.5", "dc..."},
                                  {6, "2.3.x", "dcw..."},
                                  {7, "2.4.0 to 2.5.9", "dcwa..."},
                                  {8, "2.6.0 or later", "dcwa..s."}};
constexpr SwitchRow kSplit[] = {{3, "2.1.2 to 2.1.x", "c.."},
                                {5, "2.2.x", "c..k+"},
                                {6, "2.3.x", "cw..k+"},
                                {7, "2.4.0 to 2.5.9", "cwa..k+"},
                                {8, "2.6.0 or later", "cwa..sk+"}};
constexpr SwitchRow kBackward[] = {{4, "2.0.0 to 2.2.5", "dc.."},
                                   {5, "2.3.x", "dcw.."},
                                   {6, "2.4.0 to 2.6.1", "dcwa.."},
                                   {7, "2.6.2 or later", "dcwa..s"}};

template <std::size_t N>
const SwitchRow* row_with(const SwitchRow (&rows)[N], std::size_t count) {
    const auto* row =
        std::find_if(std::begin(rows), std::end(rows), [&](const SwitchRow& r) { return r.count == count; });
    return row == std::end(rows) ? nullptr : row;
}

void set_switches(NameReading& reading, const SwitchRow& row, const std::vector<bool>& switches) {
    bool causal = false;
    bool window = false;
    for (std::size_t i = 0; i < switches.size(); ++i) {
        if (!switches[i]) continue;
        switch (row.names[i]) {
            case 'd': reading.features.emplace_back("dropout"); break;
            case 'c': causal = true; break;
            case 'w': window = true; break;
            case 'a': reading.features.emplace_back("ALiBi"); break;
            case 's': reading.features.emplace_back("softcap"); break;
            case 'k': reading.features.emplace_back("keys split"); break;
            case '+': reading.features.emplace_back("appends to the cache"); break;
            default: break;
        }
    }
    reading.mask = window ? "window" : causal ? "causal" : "none";
    reading.release = row.release;
    reading.evidence.push_back("its template has " + std::to_string(switches.size()) + " switches: release " +
                               row.release);
}

/// Reads the sizes in "Flash_fwd_kernel_traits<128,128,64,4,...": head_dim, rows, columns, warps.
void set_traits(NameReading& reading, std::string_view name, std::string_view traits) {
    const auto arguments = template_arguments(name, traits);
    if (!arguments || arguments->empty()) return;
    reading.head_dim = number((*arguments)[0]).value_or(0);
    if (arguments->size() < 3) return;
    reading.tile_q = number((*arguments)[1]).value_or(0);
    reading.tile_kv = number((*arguments)[2]).value_or(0);
}

/// Sets the library of the copy by its namespace, and the release if only the namespace gives it.
void set_library(NameReading& reading, std::string_view name, bool whole) {
    if (contains(name, "pytorch_flash::")) {
        reading.library = "PyTorch's own copy";
        reading.evidence.emplace_back("namespace pytorch_flash: built into PyTorch");
        if (contains(reading.release, "2.6"))
            reading.evidence.emplace_back(
                "torch.nn.attention._get_flash_version() reports 2.5.7 for it, which is out of date");
    } else if (contains(name, "onnxruntime::")) {
        reading.library = "ONNX Runtime's copy";
    } else if (!contains(name, "<") && !contains(name, "::")) {
        reading.library = "PyTorch's copy or the package flash-attn";
        reading.confidence = Confidence::likely;
        reading.evidence.emplace_back("the tool left out the namespace, which distinguishes the two");
    } else {
        reading.library = "package flash-attn, or a copy of it (vLLM, SGLang)";
        if (whole && contains(reading.release, "or later")) {
            const bool inside = contains(name, "flash::flash_");
            if (inside) reading.release = "2.7.4 or later";
            else reading.release.replace(reading.release.find("or later"), 8, "to 2.7.3");
            reading.evidence.push_back(std::string("the kernel is ") + (inside ? "inside" : "outside") +
                                       " namespace flash: release " + reading.release);
        }
    }
}

struct Fa2Kernel {
    const char* name;
    Role role;
    KernelPass pass;
};

constexpr Fa2Kernel kFa2Kernels[] = {
    {"flash_fwd_splitkv_combine_kernel", Role::helper, KernelPass::forward},
    {"flash_fwd_splitkv_kernel", Role::attention, KernelPass::forward},
    {"flash_fwd_kernel", Role::attention, KernelPass::forward},
    {"flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", Role::attention, KernelPass::backward},
    {"flash_bwd_dq_dk_dv_loop_kernel", Role::attention, KernelPass::backward},
    {"flash_fwd_block_kernel", Role::attention, KernelPass::forward},
    {"flash_bwd_block_dq_dk_dv_loop_seqk_parallel_kernel", Role::attention, KernelPass::backward},
    {"flash_bwd_dot_do_o_kernel", Role::helper, KernelPass::backward},
    {"flash_bwd_convert_dq_kernel", Role::helper, KernelPass::backward},
    {"flash_bwd_convert_dkv_kernel", Role::helper, KernelPass::backward},
    {"flash_bwd_clear_dkvaccum_kernel", Role::helper, KernelPass::backward},
};

bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// True if `word` is an identifier of its own in `text`: no letter, digit or underscore touches it.
bool has_word(std::string_view text, std::string_view word) {
    const std::size_t at = text.find(word);
    if (at == std::string_view::npos || (at > 0 && in_word(text[at - 1]))) return false;
    const std::size_t end = at + word.size();
    return end == text.size() || !in_word(text[end]);
}

const Fa2Kernel* fa2_kernel(std::string_view name) {
    for (const Fa2Kernel& kernel : kFa2Kernels) {
        if (has_word(name, kernel.name)) return &kernel;
    }
    // "flash_bwd_dq_dk_dv_loop_seqk_par..."
    for (const Fa2Kernel& kernel : kFa2Kernels) {
        const std::string_view full = kernel.name;
        const std::size_t dots = name.find("...");
        const std::string_view head = name.substr(0, dots);
        const std::size_t at = head.rfind("flash_");
        if (at == std::string_view::npos) continue;
        const std::string_view word = head.substr(at);
        const bool qualified = contains(name, "flash::");
        const bool unambiguous = word.size() >= 24;  // longer than any prefix of other names
        if (word.size() >= 12 && full.substr(0, word.size()) == word &&
            (qualified || unambiguous || dots != std::string_view::npos))
            return &kernel;
    }
    return nullptr;
}

}  // namespace

MaybeReading read_fa1(std::string_view name) {
    if (contains_any(name, {"fmha_fprop_fp16_sm80_loop", "fmha_dgrad_fp16_sm80_", "fmha_dgrad_dot_do_o"})) {
        NameReading reading = attention(Family::fa1, Confidence::certain,
                                        "fmha_fprop_fp16_sm80 / fmha_dgrad_fp16_sm80 / fmha_dgrad_dot_do_o");
        reading.pass = contains(name, "dgrad") ? KernelPass::backward : KernelPass::forward;
        if (contains(name, "dot_do_o")) reading.role = Role::helper;
        reading.release = "0.2.1 or so";
        reading.library = "package flash-attn";
        reading.arch = kAmpere;
        return reading;
    }
    const bool forward = contains(name, "fmha_fwd_loop_kernel");
    const bool helper =
        contains(name, "fmha_bwd_dot_do_o") && !contains(name, "dot_do_o_d");  // CK's names go on: "_d128"
    const bool backward = contains_any(name, {"fmha_bwd_dq_dk_dv_loop", "fmha_bwd_q_dk_dv_loop"}) || helper;
    const bool block = contains_any(name, {"fmha_block_fwd", "fmha_block_bwd", "fmha_block_fprop", "fmha_block_dgrad"});
    if (!forward && !backward && !block) return std::nullopt;
    NameReading reading = attention(Family::fa1, Confidence::certain, "fmha_fwd_loop_kernel / fmha_bwd_ / fmha_block_");
    reading.pass = forward || contains_any(name, {"_fwd", "_fprop"}) ? KernelPass::forward : KernelPass::backward;
    if (helper) reading.role = Role::helper;
    reading.release = "0.2.8 to 1.0.9";
    reading.arch = kAmpere;
    const bool pytorch = contains(name, "pytorch_fmha::");
    reading.library = pytorch ? "PyTorch's own copy (2.0, 2.1)" : "package flash-attn";
    if (block) {
        reading.exactness = Exactness::not_exact;
        reading.features.emplace_back("block-sparse");
    }
    if (const auto traits = template_arguments(name, "FMHA_kernel_traits"); traits && traits->size() > 3) {
        reading.tile_kv = number((*traits)[0]).value_or(0);
        reading.head_dim = number((*traits)[1]).value_or(0);
        reading.tile_q = number((*traits)[2]).value_or(0);
    }
    for (const char* kernel : {"fmha_fwd_loop_kernel", "fmha_bwd_dq_dk_dv_loop_kernel"}) {
        const auto arguments = template_arguments(name, kernel);
        const auto switches = arguments ? bools_from(*arguments, 1) : std::vector<bool>{};
        if (switches.size() < 2) continue;
        if (switches[0]) reading.features.emplace_back("dropout");
        reading.mask = switches[1] ? "causal" : "none";
    }
    return reading;
}

MaybeReading read_fa2(std::string_view name) {
    const Fa2Kernel* kernel = fa2_kernel(name);
    const bool traits = contains_any(name, {"Flash_fwd_kernel_traits", "Flash_bwd_kernel_traits"});
    if (kernel == nullptr && contains(name, "flash_fwd_splitkv_sparse_kernel")) {
        NameReading reading = attention(Family::fa2, Confidence::likely, "flash_fwd_splitkv_sparse_kernel");
        reading.exactness = Exactness::not_exact;
        reading.features.emplace_back("sparse keys");
        reading.arch = kAmpere;
        return reading;
    }
    if (kernel == nullptr) return std::nullopt;
    // A cut name may be another library's, because FlashMLA's kernels begin the same way.
    const bool spelled_out = has_word(name, kernel->name) || contains(name, "pytorch_flash::");
    NameReading reading =
        attention(Family::fa2, spelled_out ? Confidence::certain : Confidence::likely, kernel->name, kernel->pass);
    reading.role = kernel->role;
    reading.arch = kAmpere;
    reading.evidence.emplace_back("FlashAttention-2's code is written for Ampere (sm80), on any GPU");
    set_traits(reading, name, "Flash_fwd_kernel_traits");
    set_traits(reading, name, "Flash_bwd_kernel_traits");
    const bool cut = looks_cut(name);
    if (const auto arguments = template_arguments(name, kernel->name); arguments && !cut) {
        const std::vector<bool> switches = bools_from(*arguments, 1);
        const std::string_view what = kernel->name;
        const SwitchRow* row = nullptr;
        if (what == "flash_fwd_kernel") row = row_with(kForward, switches.size());
        if (what == "flash_fwd_splitkv_kernel") row = row_with(kSplit, switches.size());
        if (what == "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel") row = row_with(kBackward, switches.size());
        if (row != nullptr) set_switches(reading, *row, switches);
    }
    if (contains(kernel->name, "splitkv") && reading.mask.empty()) reading.features.emplace_back("keys split");
    set_library(reading, name, !cut && contains(name, "<"));
    if (contains(kernel->name, "_block_")) {
        reading.library = "Block-Sparse-Attention, made of FlashAttention-2";
        reading.exactness = Exactness::not_exact;
        reading.features.emplace_back("block-sparse");
    }
    const bool own_parameters = contains(name, "(") && !contains_any(name, {"Flash_fwd_params", "Flash_bwd_params"});
    if (!traits && own_parameters && !contains(name, "flash::")) {
        reading.confidence = Confidence::unsure;
        reading.library.clear();
        reading.evidence.emplace_back("it lacks FlashAttention-2's traits and parameters: it may be another library's");
    }
    return reading;
}

}  // namespace tessera::diagnose
