// SPDX-License-Identifier: Apache-2.0
//
// Shows the findings of `tessera which` to people: a paragraph, a table, details.
#pragma once

#include <string>

#include "diagnose/advice.hpp"
#include "diagnose/diagnosis.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Returns a paragraph for readers who do not know FlashAttention. `stated` holds the facts that options give.
std::string paragraph_of(const diagnose::Diagnosis& diagnosis, const diagnose::Call& stated);

/// Returns one line for each kind of call.
std::string kinds_table(const diagnose::Diagnosis& diagnosis, int width);

/// Returns all that is known of each kind, with its evidence, and of the kernels that are not attention.
std::string details_text(const diagnose::Diagnosis& diagnosis, const diagnose::Call& stated, int width);

/// Returns the generation of an architecture, "Hopper" for 90; empty: unknown.
std::string generation_of(int arch);

Json json_of(const diagnose::NameReading& reading);
Json json_of(const diagnose::Diagnosis& diagnosis, const diagnose::Call& stated);

}  // namespace tessera::cli
