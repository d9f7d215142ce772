// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace llama {

/// The rows that one step of the model computes: some new tokens of each of several sequences, packed without
/// padding. A sequence in its prompt brings many tokens, a decoding one brings one, and a step may mix them.
struct Batch {
    // One entry for each row.
    std::vector<std::int32_t> tokens;
    std::vector<std::int32_t> positions;  ///< in the row's own sequence, from 0
    std::vector<std::int64_t> slots;      ///< page * page_size + row in the page: where its K and V go

    // Entries for each sequence, as tessera::forward() takes them.
    std::vector<std::int32_t> first_rows{0};  ///< [sequences + 1]: cu_seqlens_q
    std::vector<std::int32_t> lengths;        ///< [sequences]: kv_lengths, the new tokens included
    std::vector<std::int32_t> page_table;     ///< [sequences, pages_each]; -1 after the pages of a sequence
    std::int64_t pages_each = 0;

    std::vector<std::int64_t> wanted_rows;  ///< rows whose logits are wanted

    std::int64_t rows() const { return static_cast<std::int64_t>(tokens.size()); }
    std::int64_t sequences() const { return static_cast<std::int64_t>(lengths.size()); }
};

}  // namespace llama
