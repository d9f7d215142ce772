// SPDX-License-Identifier: Apache-2.0
//
// Words for the ways to another backend: the changes, their conditions, and their gain.
#pragma once

#include <string>

#include "diagnose/ways.hpp"
#include "session.hpp"

namespace tessera::cli {

/// The name of a backend in a sentence: "FlashAttention-2 (PyTorch's flash backend)".
const char* title_of(diagnose::SdpBackend backend);

/// One or two sentences: the cheapest faster way, and a further one that needs more; or that none is known, with the
/// reason.
std::string ways_sentences(const diagnose::Ways& ways);

/// A line for what runs, and a block for each way: "  cuDNN   1. set enable_gqa=True ...".
std::string ways_text(const diagnose::Ways& ways, int width);

Json json_of(const diagnose::Ways& ways);

}  // namespace tessera::cli
