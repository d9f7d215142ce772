// SPDX-License-Identifier: Apache-2.0
#include "diagnose/change.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "diagnose/rules_tables.hpp"

namespace tessera::diagnose {
namespace {

using enum SdpBackend;

// Efforts. An argument of the call costs less than a copy of its tensors, that less than another result, and an
// installation the most.
constexpr int kArgument = 1, kContext = 2, kView = 3, kCast = 4, kOtherMask = 5, kCopy = 6, kOtherTraining = 10,
              kInference = 12, kLibrary = 14, kPackage = 15, kRelease = 20;

constexpr std::int64_t kWidestHead = 256;     // head_dim of flash and cuDNN
constexpr std::int64_t kMostMembers = 65535;  // batch, or heads
constexpr std::int64_t kHalfRow = 8;          // elements of 16 bytes in 16 bits
constexpr double kDropoutSteps = 16;

constexpr const char* kCopies = "a copy, whose time is not predicted";

std::array<Operand*, 3> tensors(Call& c) { return {&c.q, &c.k, &c.v}; }

bool four_each(const Call& c) {
    return c.q.shape && c.k.shape && c.v.shape && c.q.shape->size() == 4 && c.k.shape->size() == 4 &&
           c.v.shape->size() == 4;
}

/// A new tensor of another size, which is packed.
void copy_with_size(Operand& tensor, std::size_t dim, std::int64_t size) {
    (*tensor.shape)[dim] = size;
    tensor.strides = packed_strides(*tensor.shape);
    tensor.storage_offset = 0;
}

/// A view of the same elements: expanded from one, or the first of them.
void view_with_size(Operand& tensor, std::size_t dim, std::int64_t size) {
    if (tensor.strides && (*tensor.shape)[dim] == 1) (*tensor.strides)[dim] = 0;
    (*tensor.shape)[dim] = size;
}

const char* name_of(Element element) {
    switch (element) {
        case Element::fp16: return "fp16";
        case Element::bf16: return "bf16";
        case Element::fp32: return "fp32";
        case Element::fp64: return "fp64";
        case Element::fp8_e4m3: return "float8_e4m3fn";
        case Element::other: return "another dtype";
    }
    return "?";
}

/// Collects the changes of one call.
class Changes {
 public:
    Changes(const Call& call, SdpBackend wanted) : call_(call), wanted_(wanted) {}

    std::vector<Change> all() {
        switches();
        if (call_.nested != true) {
            if (!four_each(call_)) ranks();
            layout();
            mask();
            if (four_each(call_)) batch(), heads(), head_dims(), diagonal();
        }
        dtype();
        training();
        if (call_.gpu.rocm != true) installations();
        return std::move(found_);
    }

 private:
    template <class Edit>
    void add(const std::string& name, int effort, const std::string& text, const std::string& caveat, Edit&& edit) {
        Change change{name, text, caveat, effort, call_};
        edit(change.after);
        found_.push_back(std::move(change));
    }

    void switches();
    void ranks();
    void layout();
    void mask();
    void batch();
    void heads();
    void head_dims();
    void diagonal();
    void dtype();
    void training();
    void installations();
    void pad(const char* name, std::int64_t qk, std::int64_t v, int extra_effort = 0);

    const Call& call_;
    SdpBackend wanted_;
    std::vector<Change> found_;
};

void Changes::switches() {
    const Enabled now = call_.enabled.value_or(Enabled{});
    if (now != Enabled{})
        add("leave-context", kArgument, "leave sdpa_kernel(...), and remove enable_..._sdp(False)", "",
            [](Call& c) { c.enabled = Enabled{}; });
    Enabled only{.flash = false, .efficient = false, .math = false, .cudnn = false};
    const char* backend = "FLASH_ATTENTION";
    switch (wanted_) {
        case flash:
        case fa3:
        case fa4: only.flash = true; break;
        case efficient: only.efficient = true, backend = "EFFICIENT_ATTENTION"; break;
        case cudnn: only.cudnn = true, backend = "CUDNN_ATTENTION"; break;
        case math: only.math = true, backend = "MATH"; break;
    }
    if (now != only)
        add("select", kContext, fmt::format("call it inside sdpa_kernel([SDPBackend.{}])", backend),
            "other calls inside that it refuses raise an error", [&](Call& c) { c.enabled = only; });
    if (call_.deterministic == true)
        add("not-deterministic", kOtherMask, "use_deterministic_algorithms(True, warn_only=True)",
            "gradients may differ in their last bits from run to run", [](Call& c) { c.deterministic = false; });
}

void Changes::ranks() {
    const auto unsqueezed = [](Operand& t) {
        while (t.shape && t.shape->size() < 4) unsqueeze(t);
    };
    for (const Operand* t : {&call_.q, &call_.k, &call_.v}) {
        if (!t->shape || t->shape->size() < 2 || t->shape->size() > 4) return;
    }
    add("unsqueeze", kView, "unsqueeze q, k, v to [batch, heads, len, head_dim]", "", [&](Call& c) {
        for (Operand* t : tensors(c)) unsqueezed(*t);
        if (c.mask.shape && c.mask.shape->size() > 2) unsqueezed(c.mask);
    });
}

void Changes::layout() {
    const auto strided = [](const Operand& t) { return t.strides && !t.strides->empty() && t.strides->back() != 1; };
    const bool masked = call_.mask_kind && *call_.mask_kind != MaskKind::none;
    std::string names;
    for (const auto& [tensor, name] :
         {std::pair{&call_.q, "q"}, {&call_.k, "k"}, {&call_.v, "v"}, {&call_.mask, "attn_mask"}}) {
        if (strided(*tensor) && (tensor != &call_.mask || masked))
            names += (names.empty() ? "" : ", ") + std::string(name);
    }
    if (!names.empty())
        add("contiguous", kView, fmt::format("call .contiguous() on {}", names), kCopies, [&](Call& c) {
            for (Operand* t : {&c.q, &c.k, &c.v, &c.mask}) {
                if (strided(*t) && t->shape) t->strides = packed_strides(*t->shape), t->storage_offset = 0;
            }
        });
    const auto shifted = [](const Operand* t) { return t->storage_offset.value_or(0) != 0; };
    if (shifted(&call_.q) || shifted(&call_.k) || shifted(&call_.v))
        add("clone", kView, "clone q, k or v, which is a view that begins inside of another tensor", kCopies,
            [&](Call& c) {
                for (Operand* t : tensors(c)) {
                    if (shifted(t) && t->shape) t->strides = packed_strides(*t->shape), t->storage_offset = 0;
                }
            });
}

void Changes::mask() {
    if (!call_.mask_kind || *call_.mask_kind == MaskKind::none) return;
    const bool square = len_q(call_).value && len_q(call_).value == len_kv(call_).value;
    add("drop-mask", kOtherMask,
        square ? "drop attn_mask, with is_causal=True in its place if it is the causal one"
               : "drop attn_mask, or give causal_lower_right(len_q, len_kv) if it is that one",
        "right only for a mask that is causal or hides nothing; padding needs varlen or FlexAttention", [](Call& c) {
            c.mask_kind = MaskKind::none;
            c.mask = Operand{.requires_grad = false};
            c.is_causal = false;
        });
    if (call_.mask.requires_grad == true)
        add("detach-mask", kView, "detach attn_mask", "the mask is not trained",
            [](Call& c) { c.mask.requires_grad = false; });
    const std::size_t rank = call_.mask.shape ? call_.mask.shape->size() : 4;
    if (rank == 1 || rank == 3)
        add("unsqueeze-mask", kView, "unsqueeze attn_mask to two or four dimensions", "",
            [](Call& c) { unsqueeze(c.mask); });
    if (call_.mask_kind == MaskKind::floating && call_.mask.element && call_.q.element &&
        call_.mask.element != call_.q.element)
        add("cast-mask", kCast, fmt::format("cast attn_mask to {}", name_of(*call_.q.element)), "",
            [](Call& c) { c.mask.element = c.q.element; });
}

void Changes::batch() {
    const std::int64_t q = (*call_.q.shape)[0], k = (*call_.k.shape)[0], v = (*call_.v.shape)[0];
    const std::int64_t most = std::max({q, k, v});
    const auto expands = [&](std::int64_t size) { return size == 1 || size == most; };
    if ((q != k || q != v) && expands(q) && expands(k) && expands(v))
        add("expand-batch", kView, fmt::format("expand q, k and v to the batch of {}", most), "", [&](Call& c) {
            for (Operand* t : tensors(c)) view_with_size(*t, 0, most);
        });
    if (q == k && q == v && q > kMostMembers && !call_.mask.shape)
        add("split-batch", kView, fmt::format("cut the batch into calls of at most {}", kMostMembers), "", [](Call& c) {
            for (Operand* t : tensors(c)) view_with_size(*t, 0, kMostMembers);
        });
}

void Changes::heads() {
    const std::int64_t q = (*call_.q.shape)[1], k = (*call_.k.shape)[1], v = (*call_.v.shape)[1];
    if (q == k && q == v) return;
    if (k < 1 || v < 1 || q % k != 0 || q % v != 0) return;
    if (k == v && call_.enable_gqa != true)
        add("enable-gqa", kArgument, "set enable_gqa=True", "", [](Call& c) { c.enable_gqa = true; });
    add("repeat-heads", kCopy, "repeat the heads of k and v (repeat_interleave), without enable_gqa",
        fmt::format("k and v take {} times the memory; {}", q / std::min(k, v), kCopies), [&](Call& c) {
            if (k != q) copy_with_size(c.k, 1, q);
            if (v != q) copy_with_size(c.v, 1, q);
            c.enable_gqa = false;
        });
}

void Changes::pad(const char* name, std::int64_t qk, std::int64_t v, int extra_effort) {
    const std::int64_t d = (*call_.q.shape)[3], dv = (*call_.v.shape)[3];
    if (qk == d && v == dv) return;
    const std::string what = qk == d ? "v" : v == dv ? "q and k" : "q, k and v";
    const std::string width = qk == v || qk == d ? fmt::format("{}", v)
                              : v == dv          ? fmt::format("{}", qk)
                                                 : fmt::format("{} and {}", qk, v);
    std::string text = fmt::format("pad {} with zeros to head_dim {}", what, width);
    if (qk != d && !call_.scale) text += fmt::format(", scale=1/sqrt({})", d);
    add(name, kCopy + extra_effort, text,
        v == dv ? kCopies : fmt::format("{}; the result's first {} columns count", kCopies, dv), [&](Call& c) {
            if (!c.scale && d > 0) c.scale = 1 / std::sqrt(static_cast<double>(d));
            if (qk != d) copy_with_size(c.q, 3, qk), copy_with_size(c.k, 3, qk);
            if (v != dv) copy_with_size(c.v, 3, v);
        });
}

void Changes::head_dims() {
    const std::int64_t d = (*call_.q.shape)[3], dv = (*call_.v.shape)[3];
    if (d != (*call_.k.shape)[3] || d < 1 || dv < 1) return;
    const auto up = [](std::int64_t size) { return (size + kHalfRow - 1) / kHalfRow * kHalfRow; };
    pad("pad-to-8", up(d), up(dv));
    if (d != dv) pad("pad-alike", up(std::max(d, dv)), up(std::max(d, dv)));
    if (std::max(d, dv) < kWidestHead) pad("pad-to-256", kWidestHead, kWidestHead, 1);
}

/// is_causal aligns the diagonal at the first key; flash only has the one at the last key.
void Changes::diagonal() {
    if (call_.causal_lower_right) {
        if (call_.is_causal == true)
            add("not-causal", kArgument, "leave is_causal out", "", [](Call& c) { c.is_causal = false; });
        return;
    }
    if (call_.is_causal != true || (*call_.q.shape)[2] == (*call_.k.shape)[2]) return;
    if ((*call_.q.shape)[2] == 1)
        return add("not-causal", kContext, "leave is_causal out",
                   "the one query then sees all keys; with is_causal it sees the first key only",
                   [](Call& c) { c.is_causal = false; });
    if (wanted_ != flash && wanted_ != fa3 && wanted_ != fa4) return;
    add("lower-right", kOtherMask, "give torch.nn.attention.bias.causal_lower_right(len_q, len_kv) as attn_mask",
        "the last query then sees all keys; with is_causal the first one sees the first key only", [](Call& c) {
            c.is_causal = false;
            c.causal_lower_right = true;
        });
}

void Changes::dtype() {
    if (!call_.q.element || !call_.k.element || !call_.v.element) return;
    const bool new_gpu = call_.gpu.rocm == true || call_.gpu.capability.value_or(0) >= 80;
    const Element q = *call_.q.element;
    const bool keeps_q =
        q == Element::fp16 || (q == Element::bf16 && new_gpu) || (q == Element::fp32 && wanted_ == efficient);
    const Element to = keeps_q ? q : new_gpu ? Element::bf16 : Element::fp16;
    if (call_.q.element == to && call_.k.element == to && call_.v.element == to) return;
    const bool rounds = to == Element::bf16 || to == Element::fp16;
    const bool mask_too = call_.mask_kind == MaskKind::floating;
    add("cast", kCast,
        fmt::format("cast {}{} to {}", keeps_q ? "k and v" : "q, k and v", mask_too ? " (and attn_mask)" : "",
                    name_of(to)),
        rounds ? fmt::format("inputs and result are rounded to {}; {}; under autocast look for a k or v cached in fp32",
                             name_of(to), kCopies)
               : "",
        [&](Call& c) {
            for (Operand* t : tensors(c)) t->element = to;
            if (mask_too) c.mask.element = to;
        });
}

void Changes::training() {
    const double p = call_.dropout.value_or(0);
    if (p > 0) {
        const double step = std::clamp(std::round(p * kDropoutSteps), 1.0, kDropoutSteps - 1) / kDropoutSteps;
        if (step != p)
            add("dropout-in-16ths", kCopy, fmt::format("set dropout_p={}, a multiple of 1/16", step),
                "it trains with another dropout", [&](Call& c) { c.dropout = step; });
        add("no-dropout", kOtherTraining, "set dropout_p=0", "it trains without dropout in the attention",
            [](Call& c) { c.dropout = 0; });
    }
    const auto grad = [](const Operand& t) { return t.requires_grad == true; };
    if (grad(call_.q) || grad(call_.k) || grad(call_.v))
        add("no-grad", kInference, "run it under torch.no_grad()", "for inference alone", [](Call& c) {
            for (Operand* t : tensors(c)) t->requires_grad = false;
        });
}

void Changes::installations() {
    const FlashImplementation active = call_.flash_implementation.value_or(FlashImplementation::own);
    if (wanted_ == flash && active != FlashImplementation::own)
        add("restore-flash", kArgument, "call torch.nn.attention.restore_flash_attention_impl()", "",
            [](Call& c) { c.flash_implementation = FlashImplementation::own; });
    const FlashImplementation own_of_wanted = wanted_ == fa3 ? FlashImplementation::fa3 : FlashImplementation::fa4;
    if ((wanted_ == fa3 || wanted_ == fa4) && active != own_of_wanted) {
        const bool third = wanted_ == fa3;
        add(third ? "activate-fa3" : "activate-fa4", kPackage,
            fmt::format("install {} and call torch.nn.attention.activate_flash_attention_impl(\"{}\")",
                        third ? "flash_attn_3 (module flash_attn_interface)" : "flash-attn-4", third ? "FA3" : "FA4"),
            "", [&](Call& c) { c.flash_implementation = third ? FlashImplementation::fa3 : FlashImplementation::fa4; });
    }
    // The releases with which a check of cuDNN, or the order, changes.
    constexpr int kCudnnReleases[] = {90501, 91000, 91100, 91400, 91501, 92300, 92401, 92501, 92600};
    if (call_.cudnn) {
        for (const int release : kCudnnReleases) {
            if (release <= *call_.cudnn) continue;
            const std::string version = fmt::format("{}.{}.{}", release / 10000, release / 100 % 100, release % 100);
            add("cudnn-" + version, kLibrary, "install cuDNN " + version + " or later", "",
                [&](Call& c) { c.cudnn = release; });
        }
    }
    if (!call_.torch) return;
    for (Version release{call_.torch->major, call_.torch->minor + 1, 0}; release < kEndOfReleases; ++release.minor) {
        Call bare = call_;
        bare.torch = release;
        bare.cudnn.reset(), bare.cuda.reset();
        std::vector<std::string> assumed;
        const Call with_wheel = assume_defaults(bare, assumed);
        add(fmt::format("torch-{}.{}", release.major, release.minor), kRelease,
            fmt::format("install PyTorch {}.{}, with its wheel's cuDNN", release.major, release.minor), "",
            [&](Call& c) { c = with_wheel; });
    }
}

}  // namespace

std::vector<Change> changes_of(const Call& call, SdpBackend wanted) { return Changes(call, wanted).all(); }

}  // namespace tessera::diagnose
