// SPDX-License-Identifier: Apache-2.0
//
// `tessera which` without a trace: explains why one call is not faster, and shows the family tree.
#pragma once

#include "call_options.hpp"
#include "session.hpp"

namespace tessera::cli {

/// Prints, as text or JSON, the backend that PyTorch takes for the call of the options, the reasons against each other
/// backend, and the predicted times of the faster ones.
void answer_call(const CallOptions& options, const Session& session);

/// Prints the family tree as text or as JSON.
void answer_family(const Session& session);

}  // namespace tessera::cli
