// SPDX-License-Identifier: Apache-2.0
//
// Your kernel 2: the forward of FlashAttention-2 (lessons 5 to 11), for one head.
//
// Replace each ... by an expression, then: python3 judge.py forward.hpp
#include "memory.hpp"

/// q [len_q, d], k and v [len_kv, d], o [len_q, d] and lse [len_q, 1]. Writes o and lse.
///
/// With causal, query i sees the keys up to i + len_kv - len_q (len_kv >= len_q). Tiles of keys that no query of the
/// block sees are not to be loaded.
inline void forward(const Matrix& q, const Matrix& k, const Matrix& v, Matrix& o, Matrix& lse, long block_q,
                    long block_kv, double scale, bool causal) {
    const long shift = k.rows() - q.rows();
    for (long i = 0; i < q.rows(); i += block_q) {
        const Tile queries = q.load(i, i + block_q);
        const long rows = queries.rows();
        Tile m(rows, 1, -infinity), l(rows, 1), sums(rows, v.width());
        const long end = ...;  // one past the last key that a query of this block sees
        for (long j = 0; j < end; j += block_kv) {
            const Tile keys = k.load(j, j + block_kv);
            const Tile values = v.load(j, j + block_kv);
            for (long r = 0; r < rows; ++r) {  // query i + r
                Tile s(1, keys.rows());        // its scores
                double m_new = m(r, 0);
                for (long c = 0; c < keys.rows(); ++c) {  // key j + c
                    const bool hidden = causal && ...;
                    s(0, c) = hidden ? -infinity : ...;
                    m_new = ...;
                }
                const double rescale = ...;
                l(r, 0) = ...;  // the old sum, relative to m_new
                for (long x = 0; x < v.width(); ++x) sums(r, x) = ...;
                for (long c = 0; c < keys.rows(); ++c) {
                    const double p = ...;
                    l(r, 0) += p;
                    for (long x = 0; x < v.width(); ++x) sums(r, x) += ...;
                }
                m(r, 0) = m_new;
            }
        }
        Tile lses(rows, 1);
        for (long r = 0; r < rows; ++r) {
            for (long x = 0; x < v.width(); ++x) sums(r, x) = ...;
            lses(r, 0) = ...;
        }
        o.store(i, sums);
        lse.store(i, lses);
    }
}
