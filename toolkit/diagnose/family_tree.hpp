// SPDX-License-Identifier: Apache-2.0
//
// The family tree of attention kernels: who descends from whom, and which library can end in which of them.
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
    const char* by;      ///< where it lives
    const char* step;    ///< what it does otherwise than its parent
    const char* kernel;  ///< the name of a kernel, as profilers print it; it may be cut
    Family family;       ///< what read_name() says of it; of the standard way, whose kernel is a softmax: `eager`
};

/// Parents stand before their children.
std::span<const Relative> relatives();

/// A library that chooses among kernels.
struct Chooser {
    const char* name;
    const char* since;    ///< of the facts in this row
    const char* ends_in;  ///< names of relatives, ", " between them
    const char* how;      ///< the order, and what overrides it
    const char* source;
};

std::span<const Chooser> choosers();

/// The tree, the kernels' names, and the choosers: lines of at most 80 columns.
std::string family_text();

/// The same as a page: docs/family.md is this text.
std::string family_markdown();

}  // namespace tessera::diagnose
