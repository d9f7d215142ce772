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

/// The first word that is in the list, or "".
std::string first_of(const Words& words, List list) {
    for (const std::string& word : words) {
        if (std::find(list.begin(), list.end(), word) != list.end()) return word;
    }
    return "";
}

bool has(const Words& words, List list) { return !first_of(words, list).empty(); }

// Words for attention, either by themselves or beside one of the lists that attention_word() names with them.
constexpr std::string_view kAttention[] = {
    "attention", "attn",    "sdpa",          "fmha",           "mha",       "mqa",   "gqa",   "mla",
    "xqa",       "mmha",    "multihead",     "flashattention", "flashattn", "qattn", "fattn", "flashmla",
    "fwdattn",   "bwdattn", "selfattention", "crossattention", "att",       "ffpa"};
constexpr std::string_view kPhase[] = {"prefill", "decode", "decoding", "extend"};
constexpr std::string_view kPass[] = {"fwd", "bwd"};
constexpr std::string_view kCache[] = {"kv", "kvcache", "cache", "kcache", "vcache"};
constexpr std::string_view kPages[] = {"page", "paged", "pages"};
constexpr std::string_view kFlash[] = {"flash"};
constexpr std::string_view kShape[] = {"flash", "sparse", "dense", "ragged"};
constexpr std::string_view kCausal[] = {"causal", "noncausal", "alibi"};
constexpr std::string_view kSparse[] = {"nsa", "dsa"};  // native sparse attention, and DeepSeek's
constexpr std::string_view kPaged[] = {"pa"};           // AMD's short word for paged attention
constexpr std::string_view kElsewhere[] = {"moe",  "gemm",  "gemv",   "matmul",   "expert", "experts", "topk",
                                           "conv", "mamba", "logits", "sampling", "lora",   "huffman"};

// Words for the work of an attention kernel.
constexpr std::string_view kForwardWords[] = {"fwd",      "forward", "fprop", "prefill",   "decode",
                                              "decoding", "extend",  "infer", "inference", "paged",
                                              "append",   "context", "query", "verify"};
constexpr std::string_view kBackwardWords[] = {"bwd", "backward", "bprop", "dgrad", "grad", "gradient",
                                               "dq",  "dk",       "dv",    "dkv",   "dkdv", "dqdkdv"};
constexpr std::string_view kHelper[] = {"preprocess", "postprocess", "prepare",    "combine", "merge",    "reduce",
                                        "reduction",  "convert",     "metadata",   "plan",    "schedule", "scheduler",
                                        "delta",      "odo",         "correction", "correct", "mask",     "quantize",
                                        "descale",    "prep",        "transpose",  "unpad",   "lse",      "sum",
                                        "sums",       "segreduce",   "init",       "info"};
constexpr std::string_view kGradient[] = {"dq", "dk", "dv", "dkv", "dkdv", "dqdkdv"};
constexpr std::string_view kAround[] = {"preprocess", "postprocess"};
constexpr std::string_view kOnTheWay[] = {"delta", "mask"};  // part of kHelper that a backward's main kernel may do too
constexpr std::string_view kBeside[] = {"norm",     "rmsnorm", "layernorm", "proj", "projection",
                                        "residual", "gate",    "gating",    "rope", "absorb"};
// choose the keys of sparse attention
constexpr std::string_view kPicks[] = {"selector",   "select",     "selection", "compress",
                                       "compressed", "compressor", "unfold"};
constexpr std::string_view kPrepares[] = {"concat", "cast",  "copy",     "store",  // prepare Q, K or V for a call
                                          "write",  "quant", "quantize", "pack",  "pad"};

// Words for moving keys and values without computing: always, or unless the name mentions a pass.
constexpr std::string_view kMoves[] = {"write", "rewrite", "store",    "copy",  "reshape", "save",  "assign",
                                       "swap",  "flatten", "transfer", "trans", "migrate", "memcpy"};
constexpr std::string_view kMayMove[] = {
    "append",  "update",  "set",   "scatter",   "gather",  "insert", "concat",  "fill",       "move",
    "dequant", "requant", "quant", "quantize",  "pack",    "unpack", "permute", "dequantize", "pad",
    "unpad",   "cat",     "clear", "transpose", "compact", "build",  "evict"};
constexpr std::string_view kInputs[] = {"qkv", "query", "queries"};
constexpr std::string_view kPartWords[] = {"split"};
constexpr std::string_view kLists[] = {"indices", "index", "indptr",  "table",   "tables", "locs",
                                       "loc",     "lens",  "seqlens", "lengths", "splits", "positions"};

/// The word that identifies attention; "" if there is none. Other kernels mention phases of serving and passes too, so
/// these words count only beside the data they process.
std::string attention_word(const Words& words) {
    if (std::string word = first_of(words, kAttention); !word.empty()) return word;
    const bool elsewhere = has(words, kElsewhere) || has(words, kLists);
    if (!elsewhere && has(words, kSparse)) return first_of(words, kSparse);
    const bool on_keys = has(words, kCache) || has(words, kPaged) || has(words, kShape) || has(words, kPages);
    if (!elsewhere && (on_keys || has(words, kPass)) && has(words, kPhase)) return first_of(words, kPhase);
    const bool on_pairs = has(words, kCache) || has(words, kPaged) || has(words, kCausal) || has(words, kGradient) ||
                          has(words, kAround) || has(words, kFlash);
    if (on_pairs && has(words, kPass)) return first_of(words, kPass);
    if (!words.empty() && words.front() == "pa" && !has(words, kLists)) return words.front();
    return "";
}

/// The role of a kernel whose name mentions attention.
Role role_of(const Words& words) {
    const bool prepares = has(words, kPrepares) && !has(words, kPass) && !has(words, kPhase) && !has(words, kShape);
    if (has(words, kBeside) || prepares) return Role::look_alike;
    const std::string help = first_of(words, kHelper);
    // "compress_attn_fwd" is_attention_op to compressed keys; without a pass, such a kernel may compress or attend.
    if (help.empty() && has(words, kPicks) && !has(words, kPass) && !has(words, kPhase)) return Role::look_alike;
    if (help.empty()) return Role::attention;
    const bool on_the_way =
        has(words, kGradient) && std::find(std::begin(kOnTheWay), std::end(kOnTheWay), help) != std::end(kOnTheWay);
    return on_the_way ? Role::attention : Role::helper;
}

KernelPass pass_of(const Words& words) {
    if (has(words, kBackwardWords)) return KernelPass::backward;
    return has(words, kForwardWords) ? KernelPass::forward : KernelPass::unknown;
}

/// True if the parts of attention over split keys are merged: "merge_state", "correct_out_lse" (a loss has an LSE too).
/// Transformer Engine's kernels in its layout `thd` merge the parts of several GPUs.
bool merges_states(const Words& words) {
    constexpr std::string_view merge[] = {"merge"};
    constexpr std::string_view states[] = {"state", "states"};
    constexpr std::string_view sums[] = {"merge", "combine", "correct", "correction", "reduce"};
    constexpr std::string_view lse[] = {"lse"};
    constexpr std::string_view losses[] = {"ce", "cce", "loss", "entropy", "logits", "vocab", "linear"};
    if (has(words, lse) && has(words, sums)) return !has(words, losses);
    return has(words, merge) && has(words, states);
}

}  // namespace

std::string_view function_of(std::string_view name) {
    std::string_view text = name.substr(0, name.find_first_of("<(.-"));
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
        // "pagedKV" splits before its K, "KVCache" before its C: the last capital of a row begins the next word.
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
    reading.found = attention_word(words);
    if (!reading.found.empty()) {
        reading.role = role_of(words);
        if (reading.role != Role::look_alike) reading.pass = pass_of(words);
    } else if (merges_states(words) || (!words.empty() && words.front() == "thd")) {
        reading.found = words.front();
        reading.role = Role::helper;
        reading.pass = has(words, kBackwardWords) ? KernelPass::backward : KernelPass::unknown;
    }
    return reading;
}

bool mentions_helper(const std::vector<std::string>& words) {
    const std::string help = first_of(words, kHelper);
    return !help.empty() && !(has(words, kGradient) && has(words, kOnTheWay));
}

bool mentions_cache(const std::vector<std::string>& words) { return has(words, kCache); }

bool mentions_serving(const std::vector<std::string>& words) { return has(words, kPhase) || has(words, kPages); }

std::string cache_word(const std::vector<std::string>& words) {
    // "mla" describes the cache only, if the kernel does something else with it.
    const bool keeps_latent = first_of(words, kAttention) == "mla" && has(words, kCache) && has(words, kMoves);
    if ((has(words, kAttention) && !keeps_latent) || has(words, kElsewhere)) return "";
    const bool phase = has(words, kPhase);
    const bool pages = has(words, kPages);
    constexpr std::string_view sparse[] = {"sparse", "swa", "window", "sliding"};
    const bool of_keys = phase || pages || has(words, kCache) || has(words, sparse);
    if (of_keys && has(words, kLists)) return first_of(words, kLists);
    if (has(words, kInputs) && has(words, kPartWords)) return first_of(words, kPartWords);
    if (has(words, kInputs) && !has(words, kPass)) {
        if (const std::string moves = first_of(words, kMayMove); !moves.empty()) return moves;
    }
    const std::string moves = first_of(words, kMoves);
    if (phase && has(words, kCache) && !has(words, kPass)) return moves;
    if (phase || !(pages || has(words, kCache))) return "";
    if (!moves.empty() || has(words, kPass) || has(words, kShape)) return moves;
    return first_of(words, kMayMove);
}

}  // namespace tessera::diagnose
