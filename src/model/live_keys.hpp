// SPDX-License-Identifier: Apache-2.0
//
// A cache of keys as the model sees it: its sequences have the work and the traffic of their own keys, and free slots
// and pages are not read.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/problem.hpp"

namespace tessera::model {

/// The Problem without its cache: sequences of these (queries, keys), or if there are none, of as many keys as the
/// cache holds. Sequences of as many queries each become a dense batch of their mean number of keys, since its kernels
/// are chosen as for a dense one.
inline Problem on_live_keys(Problem p, const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences) {
    if (!p.kv_lengths) return p;
    p.kv_lengths = p.cache_batch_index = p.left_padding = false;
    p.page_size = 0;
    std::int64_t keys = p.batch * p.len_kv;
    if (!sequences.empty()) {
        keys = 0;
        for (const auto& [queries, of_sequence] : sequences) keys += of_sequence;
    }
    if (p.ragged) {
        p.total_kv = keys;
    } else if (p.batch > 0) {
        p.len_kv = (keys + p.batch - 1) / p.batch;
    }
    return p;
}

/// The bytes of the slots of a cache that hold no keys of its sequences. live: on_live_keys()
inline std::int64_t bytes_of_free_slots(const Problem& p, const Problem& live) {
    return (p.rows_kv() - live.rows_kv()) * p.heads_kv * (p.head_dim + p.head_dim_v) * size_of(p.dtype);
}

}  // namespace tessera::model
