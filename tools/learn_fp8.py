#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rounds the inputs of attention to 8 bits in three ways, and prints how far the scores and O are off (lesson 19).

There are two inputs, each 32 queries and 512 keys of head_dim 64: a head of a real model (examples/data), and normal
numbers of which two channels of q and k are six times as large, as a few channels of large models are. All sums are in
fp64, so each error comes from a rounded input. It needs nothing but Python.

Usage: learn_fp8.py
"""
import json
import math
import pathlib
import random
import statistics
import struct
import sys

SAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples/data/kjv-layer2.safetensors"
QUERIES, KEYS, DIM, BLOCK = 32, 512, 64, 64
LARGE_CHANNELS, TIMES = (5, 40), 6
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


def of_a_model():
    """(q, k, v) of head 0: the first keys, and the last queries that see all of them."""
    data = SAMPLE.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    q, k, v = (struct.unpack_from(f"<{KEYS * DIM}f", data, 8 + size + header[name]["data_offsets"][0])
               for name in "qkv")
    q, k, v = ([list(x[i:i + DIM]) for i in range(0, len(x), DIM)] for x in (q, k, v))
    return q[-QUERIES:], k, v


def with_large_channels(generator):
    normal = statistics.NormalDist()
    q, k, v = ([[normal.inv_cdf(generator.random()) for _ in range(DIM)] for _ in range(rows)]
               for rows in (QUERIES, KEYS, KEYS))
    for row in q + k:
        for channel in LARGE_CHANNELS:
            row[channel] *= TIMES
    return q, k, v


def main():
    generator = random.Random(19)
    signs = [generator.choice((-1.0, 1.0)) for _ in range(DIM)]

    def p8(x):
        return e4m3(x * P_SCALE) / P_SCALE
    for title, (q, k, v) in (("a real model", of_a_model()), ("two large channels", with_large_channels(generator))):
        turned = [rotated(rows, signs) for rows in (q, k)]
        ways = {
            "bf16": (*([[bf16(x) for x in row] for row in rows] for rows in (q, k, v)), bf16),
            "e4m3, a scale for each tensor": (*(scaled(rows, KEYS) for rows in (q, k, v)), p8),
            "e4m3, a scale for each block": (*(scaled(rows, BLOCK) for rows in (q, k, v)), p8),
            "the same, q and k rotated": (*(scaled(rows, BLOCK) for rows in (*turned, v)), p8),
        }
        right = attention(q, k, v, float)
        print(f"{title:29}  error of S  worst score  error of O")
        for name, way in ways.items():
            s, o = attention(*way)
            worst = max(abs(x - y) for a, b in zip(s, right[0]) for x, y in zip(a, b))
            print(f"  {name:29}  {100 * error(s, right[0]):6.2f} %  {worst:11.2f}  {100 * error(o, right[1]):8.2f} %")


if __name__ == "__main__":
    if len(sys.argv) != 1:
        sys.exit(__doc__)
    main()
