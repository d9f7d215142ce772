// SPDX-License-Identifier: Apache-2.0
//
// `tessera which` without a trace: why one call is not faster, and the family tree.
#pragma once

#include "call_options.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Prints which backend PyTorch takes for the call of the options, why no other, and what the faster ones are predicted
/// to take; as text or as JSON.
void answer_call(const CallOptions& options, const Session& session);

/// Prints the family tree; as text or as JSON.
void answer_family(const Session& session);

}  // namespace tessera::cli
