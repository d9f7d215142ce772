// SPDX-License-Identifier: Apache-2.0
//
// Your kernel 1: the online softmax of lesson 6, for one query.
//
// Replace each ... by an expression, then: python3 judge.py online_softmax.hpp
#include "memory.hpp"

/// scores [keys, 1]; values [keys, d]; o [1, d]. Writes o = sum of exp(s) v / sum of exp(s), and returns the log of the
/// sum of exp(s). Each row may be loaded once, `tile` rows at a time.
inline double online_softmax(const Matrix& scores, const Matrix& values, Tile& o, int tile) {
    double m = -infinity;  // the largest score so far
    double l = 0;          // the sum of exp(s - m) so far
    for (long begin = 0; begin < scores.rows(); begin += tile) {
        const Tile s = scores.load(begin, begin + tile);
        const Tile v = values.load(begin, begin + tile);
        double m_new = m;  // the largest score, with those of this tile
        for (long j = 0; j < s.rows(); ++j) m_new = ...;
        const double rescale = ...;  // what the sums so far are multiplied by
        l = ...;                     // the old sum, relative to m_new
        for (long c = 0; c < o.width(); ++c) o(0, c) = ...;
        for (long j = 0; j < s.rows(); ++j) {
            const double p = ...;  // the weight of this key, relative to m_new
            l += p;
            for (long c = 0; c < o.width(); ++c) o(0, c) += ...;
        }
        m = m_new;
    }
    for (long c = 0; c < o.width(); ++c) o(0, c) = ...;
    return ...;  // the LSE
}
