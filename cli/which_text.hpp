// SPDX-License-Identifier: Apache-2.0
//
// What tessera which found, for people: a paragraph, a table, details.
#pragma once

#include <string>

#include "diagnose/advice.hpp"
#include "diagnose/diagnosis.hpp"
#include "session.hpp"

namespace tessera::cli {

/// For somebody who never heard of FlashAttention. `said`: what is known besides the trace.
std::string paragraph_of(const diagnose::Diagnosis& diagnosis, const diagnose::Call& said);

/// One line for each kind of call.
std::string kinds_table(const diagnose::Diagnosis& diagnosis, int width);

/// Everything that is known of each kind, with its evidence, and of the kernels that are no attention.
std::string details_text(const diagnose::Diagnosis& diagnosis, const diagnose::Call& said, int width);

/// "Hopper" of 90; empty: unknown.
std::string generation_of(int arch);

Json json_of(const diagnose::NameReading& reading);
Json json_of(const diagnose::Diagnosis& diagnosis, const diagnose::Call& said);

}  // namespace tessera::cli
