# SPDX-License-Identifier: Apache-2.0
"""Your kernel 3: the backward of lessons 8 and 9, for one head. The weights are made again from the LSE.

Replace each ... by an expression, then: python3 judge.py backward.py"""
import numpy


def backward(q, k, v, o, lse, do, dq, dk, dv, block_q, block_kv, scale, causal):
    """q, o, do, dq [len_q, d], k, v, dk, dv [len_kv, d] and lse [len_q, 1] are Matrix; dq holds zeros. Writes dq, dk
    and dv. A block of keys keeps its dK and dV, and adds to dQ. With causal, query i sees the keys up to i + len_kv -
    len_q (len_kv >= len_q)."""
    shift = len(k) - len(q)
    for j in range(0, len(k), block_kv):
        keys, values = k.load(j, j + block_kv), v.load(j, j + block_kv)
        dk_sum, dv_sum = numpy.zeros(keys.shape), numpy.zeros(values.shape)
        first = max(0, j - shift) // block_q * block_q if causal else 0  # blocks before it see none of these keys
        for i in range(first, len(q), block_q):
            queries, d_o = q.load(i, i + block_q), do.load(i, i + block_q)
            delta = ...                          # [rows, 1]: dO . O of each query; o may be loaded
            s = scale * queries @ keys.T
            p = ...                              # the weights, from s and lse
            if causal:
                query, key = i + numpy.arange(len(queries))[:, None], j + numpy.arange(len(keys))
                p = numpy.where(key > query + shift, 0.0, p)
            dp = ...
            ds = ...
            dv_sum += ...
            dk_sum += ...
            dq.add(i, ...)
        dk.store(j, dk_sum)
        dv.store(j, dv_sum)
