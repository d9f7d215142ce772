// SPDX-License-Identifier: Apache-2.0
#include "diagnose/name_words.hpp"

#include <algorithm>
#include <cctype>
#include <span>

namespace tessera::diagnose {
namespace {

using Words = std::vector<std::string>;
using List = std::span<const std::string_view>;

bool is_decimal(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
bool is_upper(char c) { return std::isupper(static_cast<unsigned char>(c)) != 0; }
bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

/// The first of them that is in the list, else "".
std::string first_of(const Words& words, List list) {
    for (const std::string& word : words) {
        if (std::find(list.begin(), list.end(), word) != list.end()) return word;
    }
    return "";
}

bool has(const Words& words, List list) { return !first_of(words, list).empty(); }

constexpr std::string_view kAttention[] = {
    "attention", "attn",          "sdpa",           "fmha",      "mha",   "mqa",   "mla",      "xqa",
    "mmha",      "multihead",     "flashattention", "flashattn", "qattn", "fattn", "flashmla", "fwdattn",
    "bwdattn",   "selfattention", "crossattention", "att"};
constexpr std::string_view kPhase[] = {"prefill", "decode", "decoding", "extend"};
constexpr std::string_view kCache[] = {"kv", "kvcache", "cache", "kcache", "vcache"};
constexpr std::string_view kFlash[] = {"flash"};
constexpr std::string_view kPass[] = {"fwd", "bwd"};
constexpr std::string_view kCausal[] = {"causal", "noncausal"};
constexpr std::string_view kPaged[] = {"pa"};  // AMD's short word for paged attention
constexpr std::string_view kForwardWords[] = {"fwd",   "forward",   "fprop", "prefill", "decode",  "decoding", "extend",
                                              "infer", "inference", "paged", "append",  "context", "query"};
constexpr std::string_view kBackwardWords[] = {"bwd", "backward", "bprop", "dgrad", "grad", "gradient",
                                               "dq",  "dk",       "dv",    "dkv",   "dkdv", "dqdkdv"};
constexpr std::string_view kHelper[] = {"preprocess", "postprocess", "prepare",    "combine", "merge",    "reduce",
                                        "reduction",  "convert",     "metadata",   "plan",    "schedule", "scheduler",
                                        "delta",      "odo",         "correction", "mask",    "quantize", "descale",
                                        "transpose",  "unpad",       "lse",        "sum",     "sums"};
constexpr std::string_view kBeside[] = {"norm",     "rmsnorm", "layernorm", "proj", "projection",
                                        "residual", "gate",    "gating",    "rope", "absorb"};
constexpr std::string_view kPrepares[] = {"concat", "cast", "copy", "store", "write"};  // Q, K or V before a call
constexpr std::string_view kGradient[] = {"dq", "dk", "dv", "dkv", "dkdv", "dqdkdv"};
constexpr std::string_view kMain[] = {"delta", "mask"};  // which the main kernel of a backward does on the way, too
// Which a kernel of attention does on the way, too, and which none does.
constexpr std::string_view kMayMove[] = {"append", "update", "set",  "scatter",  "gather", "insert",
                                         "concat", "fill",   "move", "transfer", "dequant"};
constexpr std::string_view kMoves[] = {"write", "rewrite", "store", "copy", "reshape", "save", "assign", "swap"};

}  // namespace

std::string_view function_of(std::string_view name) {
    std::string_view text = name.substr(0, name.find_first_of("<(."));
    for (const char* arguments : {"_object_at_", "_tensorptr", "_tensor0", "_TiledMMA_", "_CopyAtom_"}) {
        if (text.find("kernel_cutlass") == 0) text = text.substr(0, text.find(arguments));  // CuTe DSL
    }
    const std::size_t scope = text.rfind("::");
    if (scope != std::string_view::npos) text.remove_prefix(scope + 2);
    for (std::size_t at = text.find('_', 1); at != std::string_view::npos; at = text.find('_', at + 1)) {
        const std::string_view rest = text.substr(at + 1);
        if (rest.size() < 4 || !is_decimal(rest[0])) continue;
        if (rest.find_first_not_of("0123456789dec") == std::string_view::npos) return text.substr(0, at);
    }
    return text;
}

std::vector<std::string> words_of(std::string_view identifier) {
    Words words;
    std::string word;
    const auto end = [&] {
        if (!word.empty()) words.push_back(word);
        word.clear();
    };
    for (std::size_t at = 0; at < identifier.size(); ++at) {
        const char c = identifier[at];
        if (!is_letter(c)) {
            end();
            continue;
        }
        // "pagedKV" parts before its K, "KVCache" before its C: the last capital of a row begins the next word.
        const bool after_small = at > 0 && is_letter(identifier[at - 1]) && !is_upper(identifier[at - 1]);
        const bool before_small =
            at + 1 < identifier.size() && is_letter(identifier[at + 1]) && !is_upper(identifier[at + 1]);
        if (is_upper(c) && (after_small || before_small)) end();
        word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    end();
    return words;
}

WordReading read_words(const std::vector<std::string>& words) {
    WordReading reading;
    reading.found = first_of(words, kAttention);
    const auto look = [&](bool both, std::span<const std::string_view> list) {
        if (reading.found.empty() && both) reading.found = first_of(words, list);
    };
    look(has(words, kCache) || has(words, kPaged) || has(words, kFlash), kPhase);
    look(has(words, kCache) || has(words, kPaged) || has(words, kFlash) || has(words, kCausal), kPass);
    look(!words.empty() && words.front() == "pa", kPaged);
    if (reading.found.empty()) return reading;
    const std::string help = first_of(words, kHelper);
    const bool on_the_way =
        has(words, kGradient) && std::find(std::begin(kMain), std::end(kMain), help) != std::end(kMain);
    const bool prepares = has(words, kPrepares) && !has(words, kPass) && !has(words, kPhase);
    reading.role = has(words, kBeside) || prepares ? Role::look_alike
                   : help.empty() || on_the_way    ? Role::attention
                                                   : Role::helper;
    if (reading.role == Role::look_alike) return reading;
    if (has(words, kBackwardWords)) reading.pass = KernelPass::backward;
    else if (has(words, kForwardWords)) reading.pass = KernelPass::forward;
    return reading;
}

std::string cache_word(const std::vector<std::string>& words) {
    if (!has(words, kCache) || has(words, kAttention) || has(words, kPhase)) return "";
    const std::string moves = first_of(words, kMoves);
    if (!moves.empty() || has(words, kPass) || has(words, kFlash)) return moves;
    return first_of(words, kMayMove);
}

}  // namespace tessera::diagnose
