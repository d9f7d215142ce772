// SPDX-License-Identifier: Apache-2.0
//
// Decoding: one query per head, and every query head of a group reads the same keys. The query heads of a group can be
// stacked into rows of one head, so that K and V are read once for all of them.
#pragma once

#include "tessera/problem.hpp"

namespace tessera {

/// Is there one query per head, and do the heads differ in their queries alone?
inline bool stackable(const Problem& p) {
    return !p.ragged && p.len_q == 1 && p.heads_q > p.heads_kv && p.heads_kv > 0 && !p.alibi && !p.bias &&
           p.dropout.probability == 0 && p.mask.bind(1, p.len_kv).kv_range(0, 1).size() == p.len_kv;
}

/// A stackable problem as one of `group` queries per kv head, which all see all keys.
inline Problem stacked(const Problem& p) {
    Problem result = p;
    result.len_q = p.group();
    result.heads_q = p.heads_kv;
    result.mask = {};
    return result;
}

}  // namespace tessera
