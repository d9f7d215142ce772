#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rounds the inputs of attention to 8 bits in four ways, and prints how far the scores and O are off (lesson 19).

The inputs are those of the FlashAttention-3 paper, section 4.3: N(0, 1), and one number in a thousand has N(0, 100)
added. Eight heads of 16 queries, 256 keys, head_dim 64. All sums are in fp64, so each error comes from a rounded input. It
needs nothing but Python.

Usage: learn_fp8.py
"""
import math
import random
import statistics
import sys

HEADS, QUERIES, KEYS, DIM, BLOCK = 8, 16, 256, 64, 64
LARGEST = 448.0  # of e4m3
P_SCALE = 256.0  # weights are at most 1; this uses the range of e4m3


def rounded(x, bits, least):
    """x with `bits` bits after the point, ties to even. Numbers below 2^least have the spacing of 2^least."""
    if x == 0.0:
        return 0.0
    spacing = 2.0 ** (max(math.frexp(x)[1] - 1, least) - bits)
    return round(x / spacing) * spacing


def e4m3(x):
    return max(-LARGEST, min(LARGEST, rounded(x, 3, -6)))


def bf16(x):
    return rounded(x, 7, -126)


def scaled(rows, block):
    """Rows in e4m3, with one scale for each block of rows: its largest number becomes 448."""
    result = []
    for begin in range(0, len(rows), block):
        part = rows[begin:begin + block]
        scale = max(abs(x) for row in part for x in row) / LARGEST
        result += [[e4m3(x / scale) * scale for x in row] for row in part]
    return result


def rotated(rows, signs):
    """Each row times a random orthogonal matrix: random signs, then the Hadamard matrix."""
    result = []
    for row in rows:
        x, half = [a * b for a, b in zip(row, signs)], 1
        while half < len(x):
            for i in range(0, len(x), 2 * half):
                for j in range(i, i + half):
                    x[j], x[j + half] = x[j] + x[j + half], x[j] - x[j + half]
            half *= 2
        result.append([a / math.sqrt(len(x)) for a in x])
    return result


def attention(q, k, v, weight):
    """(S, O); `weight` rounds a number of P before the product with V."""
    scores, result = [], []
    for query in q:
        s = [sum(map(float.__mul__, query, key)) / math.sqrt(DIM) for key in k]
        top = max(s)
        p = [math.exp(x - top) for x in s]
        total = sum(p)
        p = [weight(x) for x in p]
        result.append([sum(map(float.__mul__, p, column)) / total for column in zip(*v)])
        scores.append(s)
    return scores, result


def error(got, right):
    """The root mean square of the difference, as a share of that of the right numbers."""
    pairs = [pair for a, b in zip(got, right) for pair in zip(a, b)]
    return math.sqrt(sum((x - y) ** 2 for x, y in pairs) / sum(y * y for _, y in pairs))


def inputs(generator):
    normal = statistics.NormalDist()

    def number():
        x = normal.inv_cdf(generator.random())
        return x + 10 * normal.inv_cdf(generator.random()) if generator.random() < 0.001 else x
    return [[[number() for _ in range(DIM)] for _ in range(rows)] for rows in (QUERIES, KEYS, KEYS)]


def main():
    generator = random.Random(19)
    q, k, v = inputs(generator)
    signs = [generator.choice((-1.0, 1.0)) for _ in range(DIM)]
    right = attention(q, k, v, float)

    def p8(x):
        return e4m3(x * P_SCALE) / P_SCALE
    short = [[[bf16(x) for x in row] for row in rows] for rows in (q, k, v)]
    ways = {
        "bf16": (*short, bf16),
        "e4m3, a scale for each tensor": (*(scaled(rows, KEYS) for rows in (q, k, v)), p8),
        "e4m3, a scale for each block": (*(scaled(rows, BLOCK) for rows in (q, k, v)), p8),
        "the same, q and k rotated": (*(scaled(rotated(rows, signs), BLOCK) for rows in (q, k)), scaled(v, BLOCK), p8),
    }
    print("inputs                         error of S  error of O")
    for name, (a, b, c, weight) in ways.items():
        got = attention(a, b, c, weight)
        print(f"{name:29}  {100 * error(got[0], right[0]):8.2f} %  {100 * error(got[1], right[1]):8.2f} %")


if __name__ == "__main__":
    if len(sys.argv) != 1:
        sys.exit(__doc__)
    main()
