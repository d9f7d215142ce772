#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""python3 bench/next/fa3bwd/order.py: a list schedule of causal blocks of keys of 128, one head a group, on 132
multiprocessors. Every block waits in every step for the one before it in the order of dQ. Says the share of the time in
which multiprocessors work, and how much they wait, with the blocks of a head in 1, 2, 4 or 8 parts
(src/cuda/fa3/backward/order.hpp). A step is 1, what a block costs besides its steps 3.3 (head_dim 128, its README)."""
import heapq

MULTIPROCESSORS, BESIDES, STEPS_OF_BLOCK = 132, 3.3, 2


def schedule(length, heads, parts):
    blocks = length // 128
    size = -(-blocks // parts)
    starts = [(h, n) for p in range(parts) for h in range(heads) for n in range(min(blocks, (p + 1) * size) - 1, p * size - 1, -1)]
    added = [[0.0] * (blocks * STEPS_OF_BLOCK) for _ in range(heads)]
    free = [0.0] * MULTIPROCESSORS
    wait = work = 0
    for head, n in starts:
        time = heapq.heappop(free) + BESIDES / 2
        for m in range(STEPS_OF_BLOCK * n, blocks * STEPS_OF_BLOCK):
            time += 1
            wait += max(added[head][m] - time, 0)
            time = added[head][m] = max(added[head][m], time)
            work += 1
        work += BESIDES
        heapq.heappush(free, time + BESIDES / 2)
    return work / MULTIPROCESSORS / max(free), wait / work


for length, heads in ((4096, 16), (4096, 64), (8192, 16), (8192, 32), (16384, 8), (16384, 16), (16384, 32), (32768, 8)):
    print(length, heads, " | ".join(f"{p}: {busy:.3f}, waits {wait:.3f}" for p in (1, 2, 4, 8) for busy, wait in [schedule(length, heads, p)]))
