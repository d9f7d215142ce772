# SPDX-License-Identifier: Apache-2.0
"""Your kernel 1: the online softmax of lesson 6, for one query.

Replace each ... by an expression, then: python3 judge.py online_softmax.py"""
import numpy


def online_softmax(scores, values, tile):
    """scores: Matrix [keys, 1]; values: Matrix [keys, d]. Returns (o, lse): o [d] = sum of exp(s) v / sum of exp(s),
    and lse = log of the sum of exp(s). Each row may be loaded once, `tile` rows at a time."""
    m = -numpy.inf                   # the largest score so far
    l = 0.0                          # the sum of exp(s - m) so far
    o = numpy.zeros(values.width)    # the sum of exp(s - m) v so far
    for begin in range(0, len(scores), tile):
        s = scores.load(begin, begin + tile)[:, 0]
        v = values.load(begin, begin + tile)
        m_new = ...                  # the largest score, with those of this tile
        rescale = ...                # what the sums so far are multiplied by
        p = ...                      # the weights of this tile, relative to m_new
        l = ...
        o = ...
        m = m_new
    return ..., ...                  # o and lse
