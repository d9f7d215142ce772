// SPDX-License-Identifier: Apache-2.0
//
// Formats the result of `tessera which` for people: a paragraph, a table, details.
#pragma once

#include <string>

#include "diagnose/advice.hpp"
#include "diagnose/diagnosis.hpp"
#include "session.hpp"

namespace tessera::cli {

/// A paragraph for readers who do not know FlashAttention. `said` gives facts that the trace does not have.
std::string paragraph_of(const diagnose::Diagnosis& diagnosis, const diagnose::Call& said);

/// One line for each kind of call.
std::string kinds_table(const diagnose::Diagnosis& diagnosis, int width);

/// All facts about each kind, with the evidence, and about kernels that are no attention.
std::string details_text(const diagnose::Diagnosis& diagnosis, const diagnose::Call& said, int width);

/// The name of a GPU generation, "Hopper" for 90; empty: unknown.
std::string generation_of(int arch);

Json json_of(const diagnose::NameReading& reading);
Json json_of(const diagnose::Diagnosis& diagnosis, const diagnose::Call& said);

}  // namespace tessera::cli
