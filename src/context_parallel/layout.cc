// SPDX-License-Identifier: Apache-2.0
#include "context_parallel/layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

#include "tessera/error.hpp"

namespace tessera::ranks {
namespace {

/// The document that a position belongs to, or an empty range past the last one.
Range document_of(const std::vector<std::int64_t>& offsets, std::int64_t position) {
    const auto next = std::upper_bound(offsets.begin(), offsets.end(), position);
    if (next == offsets.end()) return {position, position};
    return {*std::prev(next), *next};
}

/// The positions at which rows are cut beside the ends of pieces.
std::set<std::int64_t> cuts_of(const LayoutOptions& options) {
    std::set<std::int64_t> cuts(options.offsets.begin(), options.offsets.end());
    if (options.blocks > 0) {
        if (options.total % options.blocks != 0)
            throw Error(ErrorCode::invalid_argument, "gradient_blocks",
                        fmt::format("expected a divisor of the {} rows, got {}", options.total, options.blocks));
        const std::int64_t rows = options.total / options.blocks;
        for (std::int64_t at = 0; at < options.total; at += rows) cuts.insert(at);
    }
    return cuts;
}

bool is_masked(const Mask& mask) {
    return mask.causal != Causal::none || mask.window_left != unbounded || mask.window_right != unbounded;
}

Segment segment_of(const Piece& piece, Range rows, const LayoutOptions& options) {
    const Range document = document_of(options.offsets, rows.begin);
    Segment segment{.rank = piece.rank,
                    .row = piece.row + rows.begin - piece.start,
                    .rows = rows.size(),
                    .start = rows.begin,
                    .keys = document,
                    .visible = document.begin};
    if (document.empty()) return segment;
    const std::int64_t right = options.mask.causal != Causal::none ? 0 : options.mask.window_right;
    if (right < document.end - rows.end) segment.keys.end = rows.end + right;
    const std::int64_t left = options.mask.window_left;
    if (left < rows.begin - document.begin) segment.visible = rows.begin - left;
    segment.shift = segment.keys.end - rows.end;
    return segment;
}

/// Whether a segment can be a sequence of a call after the last one of the call.
bool follows(const Segment& next, const SegmentCall& call, bool windowed) {
    const Segment& last = call.segments.back();
    return next.rank == last.rank && next.row == last.row + last.rows && next.keys.begin >= last.keys.end &&
           (!windowed || next.shift == last.shift);
}

}  // namespace

Range SegmentCall::keys() const { return {segments.front().keys.begin, segments.back().keys.end}; }

std::vector<SegmentCall> calls_of(const std::vector<Piece>& pieces, const LayoutOptions& options) {
    const std::set<std::int64_t> cuts = cuts_of(options);
    const bool masked = is_masked(options.mask);
    const bool windowed = options.mask.causal == Causal::none && masked;
    std::vector<SegmentCall> calls;
    for (const Piece& piece : pieces) {
        for (std::int64_t begin = piece.start; begin < piece.end();) {
            const auto cut = cuts.upper_bound(begin);
            const std::int64_t end = cut == cuts.end() ? piece.end() : std::min(*cut, piece.end());
            const Segment segment = segment_of(piece, {begin, end}, options);
            begin = end;
            const bool same_rank = !calls.empty() && calls.back().segments.back().rank == piece.rank;
            if (same_rank && !masked && options.blocks == 0 && !options.documents) {
                Segment& all = calls.back().segments.back();  // every row sees all keys
                all.rows += segment.rows;
                all.start = std::min(all.start, segment.start);
            } else if (same_rank && options.documents && follows(segment, calls.back(), windowed)) {
                calls.back().segments.push_back(segment);
            } else {
                calls.push_back({{segment}});
            }
        }
    }
    return calls;
}

std::vector<SegmentCall> calls_of_rank(const std::vector<SegmentCall>& calls, int rank) {
    std::vector<SegmentCall> own;
    std::copy_if(calls.begin(), calls.end(), std::back_inserter(own),
                 [&](const SegmentCall& call) { return call.segments.front().rank == rank; });
    return own;
}

std::vector<KeyTransfer> key_transfers(const std::vector<Piece>& pieces, const std::vector<SegmentCall>& calls) {
    std::vector<KeyTransfer> transfers;
    for (const Piece& piece : pieces) {
        for (const SegmentCall& call : calls) {
            for (const Segment& segment : call.segments) {
                const Range seen = segment.seen();
                const std::int64_t begin = std::max(seen.begin, piece.start), end = std::min(seen.end, piece.end());
                if (begin < end && segment.rank != piece.rank)
                    transfers.push_back({piece.rank, segment.rank, begin, end - begin});
            }
        }
    }
    std::sort(transfers.begin(), transfers.end(), [](const KeyTransfer& a, const KeyTransfer& b) {
        return std::tie(a.from, a.to, a.start, a.length) < std::tie(b.from, b.to, b.start, b.length);
    });
    // Keys that several segments of a rank see are sent once. Neighbouring rows of the sequence can belong to two
    // pieces with a gap between them in the sender's memory, so a transfer ends where its piece does.
    std::vector<std::int64_t> ends;
    for (const Piece& piece : pieces) ends.push_back(piece.end());
    std::sort(ends.begin(), ends.end());
    std::vector<KeyTransfer> joined;
    for (const KeyTransfer& next : transfers) {
        if (!joined.empty()) {
            KeyTransfer& last = joined.back();
            const std::int64_t end = last.start + last.length;
            const bool new_piece = next.start == end && std::binary_search(ends.begin(), ends.end(), end);
            if (last.from == next.from && last.to == next.to && next.start <= end && !new_piece) {
                last.length = std::max(end, next.start + next.length) - last.start;
                continue;
            }
        }
        joined.push_back(next);
    }
    return joined;
}

std::vector<GradientTransfer> gradient_transfers(const std::vector<Piece>& pieces,
                                                 const std::vector<SegmentCall>& calls) {
    std::vector<GradientTransfer> transfers;
    int rank = -1;
    std::size_t index = 0;  // of a call among those of its rank
    for (const SegmentCall& call : calls) {
        index = call.segments.front().rank == rank ? index + 1 : 0;
        rank = call.segments.front().rank;
        for (const Segment& segment : call.segments) {
            const Range seen = segment.seen();
            for (const Piece& piece : pieces) {
                const std::int64_t begin = std::max(seen.begin, piece.start), end = std::min(seen.end, piece.end());
                if (begin >= end) continue;
                transfers.push_back({.from = rank,
                                     .to = piece.rank,
                                     .start = begin,
                                     .length = end - begin,
                                     .row = piece.row + begin - piece.start,
                                     .segment = segment.start,
                                     .call = index});
            }
        }
    }
    std::sort(transfers.begin(), transfers.end(), [](const GradientTransfer& a, const GradientTransfer& b) {
        return std::tie(a.from, a.to, a.segment, a.start) < std::tie(b.from, b.to, b.segment, b.start);
    });
    return transfers;
}

}  // namespace tessera::ranks
