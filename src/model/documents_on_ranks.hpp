// SPDX-License-Identifier: Apache-2.0
//
// Packed documents whose rows are spread over GPUs: the order of the rows, and what each GPU computes and receives. The
// order is that of tessera.torch.balance_documents().
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera::model {

/// Rows of one GPU that follow each other in a document, with the keys that a call gets for them.
struct Run {
    std::int64_t rows = 0, keys = 0;
};

/// The work of one GPU.
struct RankWork {
    std::vector<Run> runs;
    std::int64_t pairs = 0;   ///< of a query and a key
    std::int64_t needed = 0;  ///< rows of K and V that its runs see
    std::int64_t others = 0;  ///< those of them that other GPUs have
    std::int64_t parts = 0;   ///< rows of dK and dV that its calls make for other GPUs
};

struct DocumentsOnRanks {
    std::string order;       ///< "contiguous", "zigzag" or "4 chunks a GPU"
    std::int64_t chunk = 0;  ///< rows that follow each other on a GPU
    std::vector<RankWork> ranks;

    const RankWork& fullest() const;    ///< most pairs
    const RankWork& most_runs() const;  ///< most runs
    double mean_needed() const;
    double mean_parts() const;
    /// The GPUs, at most, that have so many rows of others.
    int peers(std::int64_t rows) const;
};

/// `lengths`: of the documents, whose sum `ranks` divides. `causal`: a row sees the rows of its document up to itself,
/// else all of them.
DocumentsOnRanks spread_documents(const std::vector<std::int64_t>& lengths, int ranks, bool causal);

}  // namespace tessera::model
