// SPDX-License-Identifier: Apache-2.0
//
// Explains which backend PyTorch's scaled_dot_product_attention takes for a Call, and why not the others.
// PyTorch takes the first backend of an ordered list whose checks all pass. The checks are a table by release (2.4 to
// 2.15), with a second table for ROCm.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "diagnose/call.hpp"
#include "diagnose/fact.hpp"

namespace tessera::diagnose {

/// PyTorch's SDPBackend, without OVERRIDEABLE, which other devices use. `fa3` and `fa4` replace `flash` after
/// activate_flash_attention_impl().
enum class SdpBackend : std::uint8_t { flash, efficient, math, cudnn, fa3, fa4 };
const char* name_of(SdpBackend backend);

/// The oldest release in the table, and the first one after it.
inline constexpr Version kFirstRelease{2, 4, 0};
inline constexpr Version kEndOfReleases{2, 16, 0};

/// One check of one backend. A check whose text or limits changed has a row for each version.
struct Rule {
    const char* name;  ///< "flash-mask"
    SdpBackend backend;
    Version from;   ///< the first release that has it
    Version until;  ///< the first release without it
    Fact (*refuses)(const Call& call);
    const char* text;     ///< the beginning of PyTorch's warning; "": PyTorch prints none
    const char* meaning;  ///< in plain words
    const char* source;
};

/// A call that PyTorch does not compute: it raises before it checks a backend, or in the math path, which is the last
/// one.
struct Raise {
    const char* name;     ///< "heads-do-not-broadcast"
    std::string error;    ///< the text of PyTorch's error
    const char* meaning;  ///< in plain words
    const char* type = "RuntimeError";
};

/// PyTorch's error for this call, if the math path computes it (or, before any backend, if dtypes differ); nothing if
/// there is none or it can't be known.
std::optional<Raise> raise_of(const Call& call, bool by_math);
/// The error of CausalBias' own checks, if the call has causal_lower_right with lengths that differ, or is_causal too.
std::optional<Raise> raise_of_bias(const Call& call);

/// All rules; those of a backend are in the order in which PyTorch checks.
std::span<const Rule> rules();
/// All rules on ROCm; a rule that holds on both platforms stands in both tables.
std::span<const Rule> rocm_rules();

/// Sets the fields that an AMD GPU's name implies ("AMD Instinct MI300X"): its vendor and its architecture.
void recognise_amd(Gpu& gpu);

enum class Standing : std::uint8_t {
    taken,      ///< the first in the order whose checks all pass
    could_run,  ///< its checks pass, but a backend before it in the order takes the call
    refused,
    unknown,  ///< some fields are unknown
};
const char* name_of(Standing standing);

struct Verdict {
    SdpBackend backend{};
    Standing standing{};
    std::vector<const Rule*> refusals{};        ///< all that apply; PyTorch would print the first
    std::vector<std::string> missing_fields{};  ///< unknown fields that would decide it
};

struct Explanation {
    std::vector<SdpBackend> order{};  ///< empty: not known
    std::string order_because{};      ///< the reason for this order, or the fields that would decide it
    std::vector<Verdict> verdicts{};  ///< flash, efficient, math, cudnn in the order, then fa3 and fa4
    /// The backend that is taken; empty if it is unknown, or if there is none (`aborts`).
    std::optional<SdpBackend> taken{};
    bool aborts = false;                 ///< every backend refuses: "No available kernel. Aborting execution."
    std::optional<Raise> raises{};       ///< `taken` is PyTorch's choice, but the call ends in this error
    std::vector<std::string> assumed{};  ///< added by assume_defaults()
    std::vector<std::string> remarks{};
};

/// The verdict on one backend alone, which is never `taken`.
Verdict verdict_of(const Call& call, SdpBackend backend);

/// The call as this backend's kernel gets it: of causal_lower_right either the diagonal, or a bool tensor.
Call as_computed(const Call& call, SdpBackend backend);

/// True if PyTorch computes the call by this backend: by fa3 or fa4 if that implementation is active and flash is
/// taken.
bool takes(const Call& call, SdpBackend backend);

/// True if cuDNN stands before flash in the default order.
Fact prefers_cudnn(const Call& call);

/// Fills unset fields with PyTorch's defaults, and cuDNN and CUDA with the versions that PyPI's wheel of this release
/// requires. Each assumption is added to `assumed` in words. Shapes, dtypes, masks, gradients and the GPU are never
/// assumed. A machine that loads another cuDNN has to name it.
Call assume_defaults(Call call, std::vector<std::string>& assumed);

/// Throws Error(unsupported) for a release of PyTorch that is not in the table.
Explanation explain(const Call& call);

}  // namespace tessera::diagnose
