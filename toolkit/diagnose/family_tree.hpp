// SPDX-License-Identifier: Apache-2.0
//
// The family tree of attention kernels, and the kernels that each library can choose.
#pragma once

#include <span>
#include <string>

#include "diagnose/name.hpp"

namespace tessera::diagnose {

struct Relative {
    const char* name;    ///< "fa2"
    const char* parent;  ///< a name; "" for the root
    const char* title;   ///< "FlashAttention-2"
    const char* since;   ///< "2023-07": first paper or release
    const char* by;      ///< the project that holds it
    const char* step;    ///< the difference from its parent
    const char* kernel;  ///< a kernel's name as profilers print it; it may be cut
    /// the family that read_name() returns; `eager` for the standard way, whose kernel is a softmax
    Family family;
};

/// Parents stand before their children.
std::span<const Relative> relatives();

/// A library that chooses among kernels.
struct Chooser {
    const char* name;
    const char* since;    ///< the month or release that the facts in this row describe
    const char* ends_in;  ///< names of relatives, joined by ", "
    const char* how;      ///< the order of choice, and what overrides it
    const char* source;
};

std::span<const Chooser> choosers();

/// The tree, the kernels' names and the choosers, in lines of at most 80 columns.
std::string family_text();

/// Formats the tree as Markdown; docs/family.md is this text.
std::string family_markdown();

}  // namespace tessera::diagnose
