// SPDX-License-Identifier: Apache-2.0
//
// Reads kernels whose words do not mean softmax attention: linear attention and state-space models, which use some of
// attention's words, and the other parts of a model. The vocabulary was collected from the kernels of FlashInfer,
// flash-linear-attention, AITER, Transformer Engine, Liger, CUTLASS and JAX, by their folders.
#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "diagnose/name_readers.hpp"
#include "diagnose/name_words.hpp"

namespace tessera::diagnose {
namespace {

using Vocabulary = std::span<const std::string_view>;

// Names of linear attentions and state-space models.
constexpr std::string_view kLinearModels[] = {"gla",    "gsa",     "gdn",      "kda",  "dplr",    "iplr",
                                              "hgrn",   "rwkv",    "mamba",    "hgru", "rodimus", "lolcats",
                                              "qkvzba", "rebased", "deltanet", "comba"};
// Short words that other kernels use too; they count only in a name that also has a pass, a chunk, a scan or a state.
constexpr std::string_view kShortNames[] = {"gdr", "wy",  "ttt", "kkt",       "oja",      "mesa",
                                            "ssm", "ssd", "ssu", "lightning", "retention"};
// Words for the work of these kernels, which count with another word or alone.
constexpr std::string_view kChunks[] = {"chunk", "chunkwise", "recurrent", "intra", "inter"};
constexpr std::string_view kScans[] = {"scan", "passing", "selective"};
// Words that indicate softmax attention even beside a chunk; PaTH and DeltaFormer use a softmax.
constexpr std::string_view kSoftmaxAttention[] = {"attention", "attn",  "mla",   "mha",  "gqa",         "fmha",
                                                  "nsa",       "paged", "flash", "path", "deltaformer", "prefill"};

constexpr std::string_view kPassWords[] = {"fwd", "bwd", "forward", "backward"};

struct Field {
    const char* what;
    Role role;
    std::initializer_list<std::string_view> words;
};

const Field kFields[] = {
    {"an activation", Role::other, {"activation", "activate", "sigmoid", "logsigmoid", "swish",  "silu",  "gelu",
                                    "geglu",      "glu",      "swiglu",  "reglu",      "powglu", "relu",  "tanh",
                                    "mish",       "softplus", "dyt",     "sparsemax",  "gated",  "gating"}},
    {"a norm",
     Role::other,
     {"rms", "ln", "norm", "normalize", "batchnorm", "groupnorm", "variance", "welford", "moments"}},
    {"a loss",
     Role::other,
     {"loss", "kl", "kldiv", "jsd", "ce", "entropy", "xentropy", "grpo", "dpo", "nll", "logsumexp", "logprob",
      "logprobs", "distance", "distillation"}},
    {"a step of an optimizer",
     Role::other,
     {"adam", "adamw", "sgd", "lamb", "adagrad", "lion", "momentum", "optimizer", "unscale", "clip", "ema"}},
    {"experts and their routing",
     Role::other,
     {"routing", "router", "route", "routed", "expert", "experts", "moe", "permute", "unpermute", "gate"}},
    {"communication", Role::other, {"nccl",    "rccl",    "nvshmem",   "ipc",       "userbuffers", "kuserbuffers",
                                    "lamport", "barrier", "broadcast", "allreduce", "allgather",   "rsag",
                                    "push",    "publish", "sendrecv",  "recv",      "send",        "signal",
                                    "wait",    "rank",    "a2a",       "alltoall",  "multimem",    "oneshot",
                                    "twoshot", "shot",    "consumer",  "producer"}},
    {"hyper-connections", Role::other, {"mhc", "sinkhorn", "hyper"}},
    {"scales and quantised numbers",
     Role::other,
     {"scale", "scales", "scaling", "scaled", "swizzle", "unswizzle", "amax", "quant", "quantize", "dequant",
      "dequantize", "mxfp", "nvfp", "interleave", "bitlinear"}},
    {"random numbers",
     Role::other,
     {"random", "rand", "philox", "rng", "threefry", "bernoulli", "uniform", "gaussian"}},
    {"sampling of tokens",
     Role::other,
     {"sampling",    "sample",   "greedy",  "rejection",   "penalty", "penalties", "temperature", "gumbel",
      "multinomial", "resample", "sampler", "beam",        "draft",   "eagle",     "speculative", "vocab",
      "token",       "tokens",   "argmax",  "exponential", "bitmask", "logits",    "mtp"}},
    {"linear algebra",
     Role::other,
     {"cholesky", "lu", "qr", "householder", "tridiagonal", "trmm", "syrk", "solve", "tril", "eig", "svd", "larfg",
      "inverse"}},
    {"a convolution or a pooling",
     Role::other,
     {"conv", "pool", "pooling", "winograd", "wgrad", "im", "upsample", "interpolate", "resize", "nchw", "nhwc",
      "bilinear", "bicubic"}},
    {"an order or a count",
     Role::other,
     {"sort",  "radix",  "topk",   "histogram", "unique", "nonzero", "scan",  "cumsum",  "cumprod",      "bincount",
      "count", "counts", "offset", "offsets",   "bucket", "argmin",  "index", "indices", "searchsorted", "filter"}},
    {"a copy or a change of layout",
     Role::elementwise,
     {"copy",    "cast",       "convert", "fill",      "init",   "initialize", "memset", "zero",   "zeros",
      "pad",     "unpad",      "padding", "unpadding", "gather", "scatter",    "pack",   "unpack", "transpose",
      "reorder", "shuffle",    "swap",    "slice",     "concat", "cat",        "split",  "stack",  "repeat",
      "expand",  "contiguous", "reshape", "flip",      "roll",   "arange"}},
    {"a pointwise kernel",
     Role::elementwise,
     {"add",   "addcmul", "mul",     "div",     "sub",         "axpy",    "bias",      "residual",
      "unary", "binary",  "ternary", "trinary", "elementwise", "element", "pointwise", "vectorized",
      "where", "clamp",   "pow",     "exp",     "sqrt",        "square",  "dropout",   "operator"}},
    {"a sum", Role::other, {"sum", "mean", "reduce", "reduction", "max", "min", "aggregate", "average"}},
    {"a matrix multiplication", Role::gemm, {"matmul", "gemm", "gemv", "bmm", "mm", "gett", "mma", "wmma", "mfma"}},
    {"a Fourier transform", Role::other, {"fft", "ifft", "rfft", "irfft", "dft"}},
    {"an embedding", Role::other, {"embedding", "embed", "onehot", "lookup"}},
    {"a trial or a delay",
     Role::other,
     {"dummy", "delay", "probe", "test", "benchmark", "empty", "flush", "timestamp", "sleep", "nop", "noop"}},
};

/// The first of `words` that is in the vocabulary, or "".
std::string first_word_in(const std::vector<std::string>& words, Vocabulary vocabulary) {
    for (const std::string& word : words) {
        if (std::find(vocabulary.begin(), vocabulary.end(), word) != vocabulary.end()) return word;
    }
    return "";
}

NameReading without_attention(Role role, const std::string& word, const char* what) {
    NameReading reading;
    reading.role = role;
    reading.confidence = Confidence::unsure;
    reading.evidence.push_back(fmt::format("\"{}\" in the name, a word for {}", word, what));
    return reading;
}

}  // namespace

MaybeReading read_linear_attention(std::string_view name) {
    const std::vector<std::string> words = words_of(function_of(name));
    constexpr const char* kWhat = "linear attention or a state-space model, which has no softmax";
    if (std::find(words.begin(), words.end(), "softmax") != words.end()) return std::nullopt;
    if (contains_any(name, {"at::native::", "cub::", "rocprim::", "thrust::"})) return std::nullopt;
    if (const std::string model = first_word_in(words, kLinearModels); !model.empty())
        return without_attention(Role::look_alike, model, kWhat);
    constexpr std::string_view kPasses[] = {"fwd",   "bwd",    "forward", "backward",
                                            "state", "states", "update",  "prefill"};
    const bool computes = !first_word_in(words, kPasses).empty() || !first_word_in(words, kChunks).empty() ||
                          !first_word_in(words, kScans).empty();
    if (const std::string model = first_word_in(words, kShortNames); computes && !model.empty())
        return without_attention(Role::look_alike, model, kWhat);
    if (!first_word_in(words, kSoftmaxAttention).empty()) return std::nullopt;
    if (const std::string chunk = first_word_in(words, kChunks);
        !chunk.empty() && !first_word_in(words, kPasses).empty())
        return without_attention(Role::look_alike, chunk, kWhat);
    constexpr std::string_view kStates[] = {"state", "states"};
    const std::string scan = first_word_in(words, kScans);
    if (!scan.empty() && !first_word_in(words, kStates).empty())
        return without_attention(Role::look_alike, scan, kWhat);
    return std::nullopt;
}

MaybeReading read_elsewhere(std::string_view name) {
    const std::vector<std::string> words = words_of(function_of(name));
    // Another name that mentions serving or the cache may be a helper of attention, or attention.
    if (mentions_serving(words) || mentions_cache(words)) return std::nullopt;
    for (const std::string_view word : {"flash", "query", "queries", "qk", "qkv", "softmax"}) {
        if (std::find(words.begin(), words.end(), word) != words.end()) return std::nullopt;
    }
    const bool has_pass = !first_word_in(words, kPassWords).empty();
    for (const Field& field : kFields) {
        const std::string word = first_word_in(words, Vocabulary(field.words.begin(), field.words.size()));
        if (word == "split" && has_pass) continue;  // "split_d_fwd" is a pass over parts
        if (!word.empty()) return without_attention(field.role, word, field.what);
    }
    return std::nullopt;
}

}  // namespace tessera::diagnose
