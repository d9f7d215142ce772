// SPDX-License-Identifier: Apache-2.0
#include "walk/by_hand.hpp"

#include <algorithm>

namespace tessera::walk {

const HandMatrix kHandQ{{{1, 0}, {0, 1}, {1, 1}, {2, -1}}};
const HandMatrix kHandK{{{1, 1}, {0, 2}, {2, 1}, {1, -1}}};
const HandMatrix kHandV{{{4, 0}, {0, 4}, {2, 2}, {8, -4}}};
const HandMatrix kHandDo{{{1, 0}, {0, 1}, {1, -1}, {2, 1}}};

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::int64_t dot(const HandMatrix& a, std::int64_t row_a, const HandMatrix& b, std::int64_t row_b) {
    std::int64_t sum = 0;
    for (std::size_t x = 0; x < kHandDim; ++x) sum += a[at(row_a)][x] * b[at(row_b)][x];
    return sum;
}

/// One step of the online softmax (FlashAttention paper, Algorithm 1, lines 9 to 13; FlashAttention-2 paper, Algorithm
/// 1, lines 8 to 10).
HandStep step_of(const Band& band, std::int64_t row, Range keys, const HandRow& before, bool divided) {
    HandStep step{.row = row, .keys = keys, .coverage = Coverage::full};
    step.old_m = step.m = before.m;
    step.old_l = before.l;
    step.old_o = before.o;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        step.s.push_back(std::nullopt);
        if (!band.visible(row, j)) {
            step.coverage = Coverage::partial;
            continue;
        }
        step.s.back() = dot(kHandQ, row, kHandK, j);
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
            step.add_o[x] = step.add_o[x] + step.p[at(j - keys.begin)] * kHandV[at(j)][x];
        Fraction share = step.rescale;
        if (divided && !(step.l == 0)) {
            share = share * step.old_l / step.l;
            step.add_o[x] = step.add_o[x] / step.l;
        }
        step.o[x] = share * step.old_o[x] + step.add_o[x];
    }
    return step;
}

void take(HandRow& row, const HandStep& step) {
    row.m = step.m;
    row.l = step.l;
    row.o = step.o;
}

/// Runs the steps of the queries of one tile against one tile of keys, unless the mask empties it.
void meet(Hand& hand, const Band& band, Range queries, Range keys, bool divided) {
    if (band.coverage(queries.begin, queries.end, keys.begin, keys.end) == Coverage::empty) return;
    for (std::int64_t row = queries.begin; row < queries.end; ++row) {
        if (band.coverage(row, row + 1, keys.begin, keys.end) == Coverage::empty) continue;
        hand.steps.push_back(step_of(band, row, keys, hand.rows[at(row)], divided));
        take(hand.rows[at(row)], hand.steps.back());
    }
}

/// P = 2^(s - LSE / ln 2), dP = dO V^T, D = dO . O, dS = P (dP - D), dQ = ln 2 dS K, dK = ln 2 dS^T Q, dV = P^T dO
/// (FlashAttention paper, appendix B.2).
void add_gradients(Hand& hand, const Band& band) {
    for (std::int64_t i = 0; i < kHandLen; ++i) {
        HandRow& row = hand.rows[at(i)];
        for (std::size_t x = 0; x < kHandDim; ++x) row.delta = row.delta + row.o[x] * kHandDo[at(i)][x];
        for (std::int64_t j = 0; j < kHandLen; ++j) {
            const bool seen = band.visible(i, j);
            row.p.push_back(seen ? power_of_two(dot(kHandQ, i, kHandK, j) - *row.m) / row.l : Fraction(0));
            row.dp.push_back(dot(kHandDo, i, kHandV, j));
            row.ds.push_back(row.p.back() * (row.dp.back() - row.delta));
            for (std::size_t x = 0; x < kHandDim; ++x) {
                row.dq[x] = row.dq[x] + row.ds.back() * kHandK[at(j)][x];
                hand.dk[at(j)][x] = hand.dk[at(j)][x] + row.ds.back() * kHandQ[at(i)][x];
                hand.dv[at(j)][x] = hand.dv[at(j)][x] + row.p.back() * kHandDo[at(i)][x];
            }
        }
    }
}

}  // namespace

Hand work_by_hand(Schedule schedule, const Mask& mask) {
    Hand hand{.schedule = schedule, .mask = mask};
    const Band band = mask.bind(kHandLen, kHandLen);
    const auto tile = [](std::int64_t index) { return Range{index * kHandBlock, (index + 1) * kHandBlock}; };
    constexpr std::int64_t kTiles = kHandLen / kHandBlock;
    for (std::int64_t outer = 0; outer < kTiles; ++outer) {
        if (schedule == Schedule::standard) {
            meet(hand, band, tile(outer), {0, kHandLen}, false);
            continue;
        }
        for (std::int64_t inner = 0; inner < kTiles; ++inner) {
            const bool keys_outer = schedule == Schedule::fa1;
            meet(hand, band, tile(keys_outer ? inner : outer), tile(keys_outer ? outer : inner), keys_outer);
        }
    }
    if (schedule != Schedule::fa1) {
        for (HandRow& row : hand.rows) {
            for (Fraction& o : row.o) o = row.l == 0 ? Fraction(0) : o / row.l;
        }
    }
    add_gradients(hand, band);
    return hand;
}

}  // namespace tessera::walk
