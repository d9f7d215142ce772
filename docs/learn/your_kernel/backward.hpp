// SPDX-License-Identifier: Apache-2.0
//
// Your kernel 3: the backward of lessons 8 and 9, for one head. The weights are made again from the LSE.
//
// Replace each ... by an expression, then: python3 judge.py backward.hpp
#include "memory.hpp"

/// q, o, d_o, dq [len_q, d], k, v, dk, dv [len_kv, d] and lse [len_q, 1]; dq holds zeros. Writes dq, dk and dv. A block
/// of keys keeps its dK and dV, and adds to dQ. With causal, query i sees the keys up to i + len_kv - len_q (len_kv >=
/// len_q).
inline void backward(const Matrix& q, const Matrix& k, const Matrix& v, const Matrix& o, const Matrix& lse,
                     const Matrix& d_o, Matrix& dq, Matrix& dk, Matrix& dv, long block_q, long block_kv, double scale,
                     bool causal) {
    const long shift = k.rows() - q.rows();
    for (long j = 0; j < k.rows(); j += block_kv) {
        const Tile keys = k.load(j, j + block_kv), values = v.load(j, j + block_kv);
        Tile dk_sum(keys.rows(), k.width()), dv_sum(keys.rows(), v.width());
        const long first =
            causal ? std::max(0L, j - shift) / block_q * block_q : 0;  // blocks before it see no key here
        for (long i = first; i < q.rows(); i += block_q) {
            const Tile queries = q.load(i, i + block_q), grad = d_o.load(i, i + block_q);
            const Tile out = o.load(i, i + block_q), lses = lse.load(i, i + block_q);
            Tile dq_part(queries.rows(), q.width());
            for (long r = 0; r < queries.rows(); ++r) {   // query i + r
                const double delta = ...;                 // dO . O
                for (long c = 0; c < keys.rows(); ++c) {  // key j + c
                    if (causal && j + c > i + r + shift) continue;
                    const double s = scale * dot(queries.row(r), keys.row(c));
                    const double p = ...;   // the weight, from s and the LSE
                    const double dp = ...;  // dO . v
                    const double ds = ...;
                    for (long x = 0; x < v.width(); ++x) dv_sum(c, x) += ...;
                    for (long x = 0; x < q.width(); ++x) {
                        dk_sum(c, x) += ...;
                        dq_part(r, x) += ...;
                    }
                }
            }
            dq.add(i, dq_part);
        }
        dk.store(j, dk_sum);
        dv.store(j, dv_sum);
    }
}
