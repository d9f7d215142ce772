// SPDX-License-Identifier: Apache-2.0
//
// The layout of a call: which runs of rows each rank computes against which keys, which rows of K and V go where before
// that, and which rows of dK and dV after it. It follows from lengths alone, so every rank computes it for all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "context_parallel/order.hpp"
#include "tessera/mask.hpp"

namespace tessera::ranks {

/// Consecutive rows of one rank and one document, with the keys that they see: a sequence of a call. Its keys begin
/// where the document begins, so that tiles of keys are cut as in a call on the whole document.
struct Segment {
    int rank = 0;
    std::int64_t row = 0;  ///< the first one, counted in the rank
    std::int64_t rows = 0;
    std::int64_t start = 0;    ///< the position of the first row
    Range keys{};              ///< positions; empty past the last document
    std::int64_t visible = 0;  ///< the first key that a row sees: earlier ones are not sent
    std::int64_t shift = 0;    ///< how far the keys go beyond the last row: the diagonal is as far from the corner

    Range seen() const { return {visible, keys.end}; }
};

/// One call of the kernels: segments of one rank whose rows follow each other and whose keys ascend without overlap.
/// Keys between those of two segments belong to a sequence without queries, so nothing is copied.
struct SegmentCall {
    std::vector<Segment> segments;

    std::int64_t row() const { return segments.front().row; }
    std::int64_t rows() const { return segments.back().row + segments.back().rows - row(); }
    Range keys() const;  ///< from the first key to the last
    std::int64_t shift() const { return segments.front().shift; }
};

/// Rows that go from one rank to another, consecutive in the sequence and in both ranks.
struct KeyTransfer {
    int from = 0;
    int to = 0;
    std::int64_t start = 0;  ///< position of the first row
    std::int64_t length = 0;
};

/// Rows of dK and dV that a call of `from` made for keys of `to`.
struct GradientTransfer {
    int from = 0;
    int to = 0;
    std::int64_t start = 0;  ///< position of the first key
    std::int64_t length = 0;
    std::int64_t row = 0;      ///< the row of the first key in `to`
    std::int64_t segment = 0;  ///< position of the first query of its segment: sums are in this order
    std::size_t call = 0;      ///< index of the call among those of `from`
};

/// The arguments of a layout besides the order.
struct LayoutOptions {
    std::int64_t total = 0;
    std::vector<std::int64_t> offsets;  ///< of documents; {0, total} without documents
    Mask mask{};
    std::int64_t blocks = 0;  ///< 0: rows are cut at the ends of pieces and documents only
    /// Without documents each call has one segment, and without a mask one call has all rows of a rank.
    bool documents = false;
};

/// The calls of all ranks, by rank and row. Throws Error(invalid_argument) naming "gradient_blocks" when it is no
/// divisor of the rows.
std::vector<SegmentCall> calls_of(const std::vector<Piece>& pieces, const LayoutOptions& options);

/// The calls of one rank, out of those of all.
std::vector<SegmentCall> calls_of_rank(const std::vector<SegmentCall>& calls, int rank);

/// The transfers of K and V before the calls, by sender, receiver and position.
std::vector<KeyTransfer> key_transfers(const std::vector<Piece>& pieces, const std::vector<SegmentCall>& calls);

/// The transfers of dK and dV after the calls, and the parts that a rank adds of its own, by sender, receiver, segment
/// and position.
std::vector<GradientTransfer> gradient_transfers(const std::vector<Piece>& pieces,
                                                 const std::vector<SegmentCall>& calls);

}  // namespace tessera::ranks
