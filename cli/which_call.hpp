// SPDX-License-Identifier: Apache-2.0
//
// `tessera which` without a trace: why one call is not faster, and the family tree.
#pragma once

#include "call_options.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Prints the backend that PyTorch takes for the call, why it refuses others, and the predicted times of faster ones,
/// as text or as JSON.
void answer_call(const CallOptions& options, const Session& session);

/// Prints the family tree, as text or as JSON.
void answer_family(const Session& session);

}  // namespace tessera::cli
