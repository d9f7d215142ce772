// SPDX-License-Identifier: Apache-2.0
//
// Why not a faster one: which backend PyTorch's scaled_dot_product_attention takes for a Call, and what keeps it from
// the others. PyTorch goes through an ordered list of backends and takes the first whose checks all pass; the checks
// are a table here, by release (2.4 to 2.15), with a second one for a PyTorch that is built for ROCm.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "diagnose/call.hpp"
#include "diagnose/fact.hpp"

namespace tessera::diagnose {

/// In PyTorch's words SDPBackend, without the one that other devices override. `fa3` and `fa4` are what
/// activate_flash_attention_impl() puts in the place of `flash`.
enum class SdpBackend : std::uint8_t { flash, efficient, math, cudnn, fa3, fa4 };
const char* name_of(SdpBackend backend);

/// The oldest release that the table knows, and the first one that it does not.
inline constexpr Version kFirstRelease{2, 4, 0};
inline constexpr Version kEndOfReleases{2, 16, 0};

/// One check of one backend. A check whose text or limits changed has a row for each.
struct Rule {
    const char* name;  ///< "flash-mask"
    SdpBackend backend;
    Version from;   ///< the first release that has it
    Version until;  ///< the first that has it no more
    Fact (*refuses)(const Call& call);
    const char* text;     ///< how PyTorch's warning begins; "": it gives none
    const char* meaning;  ///< in plain words
    const char* cure;     ///< the change that would unblock the backend
    const char* source;
};

/// Every rule; those of a backend in the order in which PyTorch checks.
std::span<const Rule> rules();
/// The same on ROCm; what is the same on both stands in both.
std::span<const Rule> rocm_rules();

/// Sets what the name of one of AMD's GPUs tells ("AMD Instinct MI300X"): that it is one, and its architecture.
void recognise_amd(Gpu& gpu);

enum class Standing : std::uint8_t {
    taken,      ///< the first in the order whose checks all pass
    could_run,  ///< its checks pass, but another one comes before it
    refused,
    unknown,  ///< for want of fields
};
const char* name_of(Standing standing);

struct Verdict {
    SdpBackend backend{};
    Standing standing{};
    std::vector<const Rule*> refusals{};  ///< all of them; PyTorch would print the first
    std::vector<std::string> wanting{};   ///< fields that would decide it
};

struct Explanation {
    std::vector<SdpBackend> order{};  ///< empty: not known
    std::string order_because{};      ///< why this order, or what would have to be known
    std::vector<Verdict> verdicts{};  ///< of flash, efficient, math, cudnn in the order, then of fa3 and fa4
    /// The backend that is taken; nothing: not known, or none (`aborts`).
    std::optional<SdpBackend> taken{};
    bool aborts = false;                 ///< every backend refuses: "No available kernel. Aborting execution."
    std::vector<std::string> assumed{};  ///< by assume_defaults()
    std::vector<std::string> remarks{};
};

/// Whether cuDNN stands before flash in the default order.
Fact prefers_cudnn(const Call& call);

/// Sets what nobody said to PyTorch's defaults, cuDNN and CUDA to what PyPI's wheel of this release requires, and adds
/// each to `assumed` in words. Shapes, dtypes, masks, gradients and the GPU are never assumed. A cuDNN that
/// the machine loads from elsewhere is another one.
Call assume_defaults(Call call, std::vector<std::string>& assumed);

/// Throws Error(unsupported) for a PyTorch that is not in the table.
Explanation explain(const Call& call);

}  // namespace tessera::diagnose
