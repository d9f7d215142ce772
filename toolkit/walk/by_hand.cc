// SPDX-License-Identifier: Apache-2.0
#include "walk/by_hand.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::walk {

// Rows of weights sum to powers of two, or to a number with few factors, which keeps the fractions small.
const HandMatrix kHandQ{{{1, 0}, {0, 1}, {0, 0}, {1, 0}}};
const HandMatrix kHandK{{{0, 1}, {1, 0}, {2, 0}, {0, 2}}};
const HandMatrix kHandV{{{4, 0}, {0, 4}, {2, 2}, {8, -4}}};
const HandMatrix kHandDo{{{1, 0}, {0, 1}, {1, 1}, {0, 1}}};

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::int64_t dot(const HandMatrix& a, std::int64_t row_a, const HandMatrix& b, std::int64_t row_b) {
    std::int64_t sum = 0;
    for (std::size_t x = 0; x < kHandDim; ++x) sum += a[at(row_a)][x] * b[at(row_b)][x];
    return sum;
}

void validate(const char* name, const HandMatrix& matrix, std::size_t rows) {
    if (matrix.empty() || matrix.size() > kMostHandLen) {
        throw Error(ErrorCode::invalid_argument, name,
                    fmt::format("expected 1 to {} rows, got {}", kMostHandLen, matrix.size()));
    }
    if (matrix.size() != rows)
        throw Error(ErrorCode::invalid_argument, name, fmt::format("expected {} rows, got {}", rows, matrix.size()));
    for (const auto& row : matrix) {
        for (const std::int64_t x : row) {
            if (x < -kMostHandValue || x > kMostHandValue) {
                throw Error(ErrorCode::invalid_argument, name,
                            fmt::format("expected numbers from {} to {}, got {}", -kMostHandValue, kMostHandValue, x));
            }
        }
    }
}

/// Returns the coverage of the tile that contains the row; tiles at the end may be cut.
Coverage coverage_of(const HandExample& example, const Band& band, std::int64_t row, Range keys) {
    const std::int64_t begin = row / example.tile.block_q * example.tile.block_q;
    const auto len_q = static_cast<std::int64_t>(example.q.size());
    for (std::int64_t i = begin; i < std::min(begin + example.tile.block_q, len_q); ++i) {
        for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            if (!band.visible(i, j)) return Coverage::partial;
        }
    }
    return Coverage::full;
}

/// One step of the online softmax (FlashAttention paper, Algorithm 1, lines 9 to 13; FlashAttention-2 paper, Algorithm
/// 1, lines 8 to 10).
HandStep step_of(const HandExample& example, const Band& band, std::int64_t row, Range keys, const HandRow& before,
                 bool divided) {
    HandStep step{.row = row, .keys = keys, .coverage = coverage_of(example, band, row, keys)};
    step.old_m = step.m = before.m;
    step.old_l = before.l;
    step.old_o = before.o;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        step.s.push_back(std::nullopt);
        if (!band.visible(row, j)) continue;
        step.s.back() = dot(example.q, row, example.k, j);
        step.m = std::max(step.m.value_or(*step.s.back()), *step.s.back());
    }
    step.rescale = step.old_m ? power_of_two(*step.old_m - *step.m) : Fraction(0);
    step.l = step.rescale * step.old_l;
    for (const auto& s : step.s) {
        step.p.push_back(s ? power_of_two(*s - *step.m) : Fraction(0));
        step.l = step.l + step.p.back();
    }
    for (std::size_t x = 0; x < kHandDim; ++x) {
        for (std::int64_t j = keys.begin; j < keys.end; ++j)
            step.add_o[x] = step.add_o[x] + step.p[at(j - keys.begin)] * example.v[at(j)][x];
        Fraction factor = step.rescale;  // of the old O
        if (divided && !(step.l == 0)) {
            factor = factor * step.old_l / step.l;
            step.add_o[x] = step.add_o[x] / step.l;
        }
        step.o[x] = factor * step.old_o[x] + step.add_o[x];
    }
    return step;
}

void take(HandRow& row, const HandStep& step) {
    row.m = step.m;
    row.l = step.l;
    row.o = step.o;
}

/// Runs the steps of a tile of queries and a tile of keys, unless the mask hides all of it.
void process_tile(Hand& hand, const Band& band, Range queries, Range keys, bool divided) {
    if (band.coverage(queries.begin, queries.end, keys.begin, keys.end) == Coverage::empty) return;
    for (std::int64_t row = queries.begin; row < queries.end; ++row) {
        if (band.coverage(row, row + 1, keys.begin, keys.end) == Coverage::empty) continue;
        hand.steps.push_back(step_of(hand.example, band, row, keys, hand.rows[at(row)], divided));
        take(hand.rows[at(row)], hand.steps.back());
    }
}

/// P = 2^(s - LSE / ln 2), dP = dO V^T, D = dO . O, dS = P (dP - D) (FlashAttention paper, appendix B.2).
void add_score_gradients(Hand& hand, const Band& band) {
    const HandExample& e = hand.example;
    for (std::int64_t i = 0; i < e.len_q(); ++i) {
        HandRow& row = hand.rows[at(i)];
        for (std::size_t x = 0; x < kHandDim; ++x) row.delta = row.delta + row.o[x] * e.d_o[at(i)][x];
        for (std::int64_t j = 0; j < e.len_kv(); ++j) {
            const bool seen = band.visible(i, j);
            row.p.push_back(seen ? power_of_two(dot(e.q, i, e.k, j) - *row.m) / row.l : Fraction(0));
            row.dp.push_back(dot(e.d_o, i, e.v, j));
            row.ds.push_back(row.p.back() * (row.dp.back() - row.delta));
        }
    }
}

/// Adds dS K to dQ, dS^T Q to dK and P^T dO to dV for one tile (FlashAttention paper, appendix B, Algorithm 4).
/// Gradients that contain the scale are in units of ln 2.
void process_backward_tile(Hand& hand, const Band& band, Range queries, Range keys) {
    const HandExample& e = hand.example;
    HandGradientStep step{.queries = queries, .keys = keys};
    step.coverage = band.coverage(queries.begin, queries.end, keys.begin, keys.end);
    if (step.coverage == Coverage::empty) return;
    for (std::int64_t i = queries.begin; i < queries.end; ++i) {
        HandRow& row = hand.rows[at(i)];
        for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            for (std::size_t x = 0; x < kHandDim; ++x) {
                row.dq[x] = row.dq[x] + row.ds[at(j)] * e.k[at(j)][x];
                hand.dk[at(j)][x] = hand.dk[at(j)][x] + row.ds[at(j)] * e.q[at(i)][x];
                hand.dv[at(j)][x] = hand.dv[at(j)][x] + row.p[at(j)] * e.d_o[at(i)][x];
            }
        }
        step.dq.push_back(row.dq);
    }
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        step.dk.push_back(hand.dk[at(j)]);
        step.dv.push_back(hand.dv[at(j)]);
    }
    hand.gradient_steps.push_back(std::move(step));
}

/// Returns ranges of `size`; the last one is cut at `length`.
std::vector<Range> tiles(std::int64_t length, std::int64_t size) {
    std::vector<Range> result;
    for (std::int64_t begin = 0; begin < length; begin += size)
        result.push_back({begin, std::min(begin + size, length)});
    return result;
}

}  // namespace

void HandExample::validate() const {
    walk::validate("q", q, q.size());
    walk::validate("k", k, k.size());
    walk::validate("v", v, k.size());
    walk::validate("do", d_o, q.size());
    if (tile.block_q < 1 || tile.block_kv < 1) {
        throw Error(ErrorCode::invalid_argument, "tile",
                    fmt::format("expected at least 1 x 1, got {} x {}", tile.block_q, tile.block_kv));
    }
}

Hand work_by_hand(const HandExample& example, Schedule schedule, const Mask& mask) {
    example.validate();
    Hand hand{.example = example, .schedule = schedule, .mask = mask};
    hand.rows.resize(example.q.size());
    hand.dk.resize(example.k.size());
    hand.dv.resize(example.k.size());
    const Band band = mask.bind(example.len_q(), example.len_kv());
    const Range all{0, example.len_kv()};
    const std::vector<Range> of_queries = tiles(example.len_q(), example.tile.block_q);
    const std::vector<Range> of_keys = tiles(example.len_kv(), example.tile.block_kv);
    if (schedule == Schedule::standard) {
        for (const Range& queries : of_queries) process_tile(hand, band, queries, all, false);
    } else if (schedule == Schedule::fa1) {
        for (const Range& keys : of_keys) {
            for (const Range& queries : of_queries) process_tile(hand, band, queries, keys, true);
        }
    } else {
        for (const Range& queries : of_queries) {
            for (const Range& keys : of_keys) process_tile(hand, band, queries, keys, false);
        }
    }
    if (schedule != Schedule::fa1) {
        for (HandRow& row : hand.rows) {
            for (Fraction& o : row.o) o = row.l == 0 ? Fraction(0) : o / row.l;
        }
    }
    add_score_gradients(hand, band);
    if (schedule == Schedule::standard) {
        process_backward_tile(hand, band, {0, example.len_q()}, all);
    } else {
        for (const Range& keys : of_keys) {
            for (const Range& queries : of_queries) process_backward_tile(hand, band, queries, keys);
        }
    }
    return hand;
}

Hand work_by_hand(Schedule schedule, const Mask& mask) { return work_by_hand(HandExample{}, schedule, mask); }

}  // namespace tessera::walk
