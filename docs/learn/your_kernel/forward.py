# SPDX-License-Identifier: Apache-2.0
"""Your kernel 2: the forward of FlashAttention-2 (lessons 5 to 11), for one head.

Replace each ... by an expression, then: python3 judge.py forward.py"""
import numpy


def forward(q, k, v, o, lse, block_q, block_kv, scale, causal):
    """q [len_q, d], k and v [len_kv, d], o [len_q, d] and lse [len_q, 1] are Matrix. Writes o and lse.

    With causal, query i sees the keys up to i + len_kv - len_q (len_kv >= len_q). Tiles of keys that no query of the
    block sees are not to be loaded."""
    shift = len(k) - len(q)
    for i in range(0, len(q), block_q):
        queries = q.load(i, i + block_q)
        rows = len(queries)
        m = numpy.full(rows, -numpy.inf)
        l = numpy.zeros(rows)
        sums = numpy.zeros((rows, v.width))
        end = ...                                # one past the last key that a query of this block sees
        for j in range(0, end, block_kv):
            keys = k.load(j, j + block_kv)
            values = v.load(j, j + block_kv)
            s = ...                              # the scores [rows, keys of the tile]
            if causal:
                hidden = ...                     # bool, the shape of s: keys that the query does not see
                s = numpy.where(hidden, -numpy.inf, s)
            m_new = ...
            rescale = ...
            p = ...
            l = ...
            sums = ...
            m = m_new
        o.store(i, ...)
        lse.store(i, ...)                        # [rows, 1]
