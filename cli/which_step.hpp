// SPDX-License-Identifier: Apache-2.0
//
// The whole step in words: how busy the GPU is, what attention is of it, stalls, first calls, repeated K and V.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "diagnose/diagnosis.hpp"

namespace tessera::cli {

/// Sentences for the paragraph, each with a space before it; empty: nothing about the step is worth a sentence.
/// `stated` holds the facts that options give.
std::string step_sentences(const diagnose::Diagnosis& d, const diagnose::Call& stated);

/// Lines for the details of a kind: names of facts and their values.
std::vector<std::pair<std::string, std::string>> step_facts(const diagnose::AttentionKind& kind);

/// Lines about the whole trace; empty if it has no order of time.
std::vector<std::pair<std::string, std::string>> step_facts(const diagnose::Diagnosis& d);

}  // namespace tessera::cli
