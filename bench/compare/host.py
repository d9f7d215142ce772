# SPDX-License-Identifier: Apache-2.0
"""Host memory, tessera's calls on it, and their Records, with nothing but Python's standard library."""
import array
import ctypes
import datetime
import functools
import mmap
import platform
import random
import statistics
import subprocess
import time

import abi
from abi import BACKWARD, BF16, FORWARD, FP32, INT32

DTYPES = {"fp32": FP32, "bf16": BF16}
SIZE = {FP32: 4, BF16: 2, INT32: 4}
BLOCK = 8  # calls in a row of one library
LONG_CALL = 50  # ms: such calls alternate one by one
MOST_CALLS = 400


class Memory:
    """Pages of memory, released when the object is destroyed."""

    def __init__(self, size):
        self.size = max(size, 1)
        self.map = mmap.mmap(-1, self.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def fill(self, block):
        """Fills the memory with repetitions of `block`."""
        for begin in range(0, self.size, len(block)):
            ctypes.memmove(self.address + begin, block, min(len(block), self.size - begin))


@functools.lru_cache
def normal_numbers(dtype, count=1 << 16, seed=1):
    """Bytes of normal random numbers."""
    rng = random.Random(seed)
    numbers = array.array("f", (rng.gauss(0, 1) for _ in range(count)))
    if dtype == FP32:
        return numbers.tobytes()
    return array.array("H", (bits >> 16 for bits in array.array("I", numbers.tobytes()))).tobytes()


def tensor(memory, dtype, shape):
    """A contiguous view."""
    strides = [1] * 4
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    pad = 4 - len(shape)
    return abi.Tensor(memory.address, dtype, len(shape), (ctypes.c_int64 * 4)(*shape, *[0] * pad),
                      (ctypes.c_int64 * 4)(*strides[:len(shape)], *[0] * pad), 0, 0)


class Case:
    """A problem: lengths, heads, mask and features. `lens` of several numbers: a ragged batch."""

    def __init__(self, name, lens, heads, heads_kv=0, causal=False, window=None, **features):
        self.name, self.lens, self.heads, self.heads_kv = name, lens, heads, heads_kv or heads
        self.causal, self.window, self.features = causal, window, features

    def ragged(self):
        return len(self.lens) > 1

    def visible_pairs(self):
        return self.heads * sum(visible(n, self.causal, self.window) for n in self.lens)

    def flop(self, direction, dim):
        return (4 if direction == FORWARD else 10) * self.visible_pairs() * dim

    def problem(self, dtype, dim):
        shape = {"dtype": dtype, "batch": len(self.lens), "len_q": max(self.lens), "len_kv": max(self.lens),
                 "heads_q": self.heads, "heads_kv": self.heads_kv, "head_dim": dim, "head_dim_v": dim,
                 "causal": int(self.causal)}
        if self.window is not None:
            shape.update(window_left=self.window, window_right=0)
        if self.ragged():
            shape.update(ragged=1, total_q=sum(self.lens), total_kv=sum(self.lens))
        shape.update(self.features)
        return shape

    def mask_text(self):
        parts = ["causal bottom-right"] * self.causal + [f"window {self.window},0"] * (self.window is not None)
        return ", ".join(parts) or "none"

    def features_text(self):
        texts = {"softcap": "softcap {:g}", "alibi": "alibi", "dropout_probability": "dropout {}"}
        parts = [texts[name].format(value) for name, value in self.features.items() if name in texts]
        return ", ".join([f"ragged rows {sum(self.lens)} x {sum(self.lens)}"] * self.ragged() + parts)


def visible(n, causal, window):
    """Pairs of a head of n queries and keys; a window is (window, 0)."""
    if window is not None:
        full = max(0, n - window)
        return full * (window + 1) + (n - full) * (n - full + 1) // 2
    return n * (n + 1) // 2 if causal else n * n


class Arena:
    """Inputs and gradients that all cases of one dtype share; each case reads or overwrites them."""

    def __init__(self, dtype, elements):
        self.memory = {}
        block = normal_numbers(dtype)
        for i, name in enumerate(("q", "k", "v", "d_o", "dq", "dk", "dv")):
            self.memory[name] = Memory(elements * SIZE[dtype])
            self.memory[name].fill(block[4 * i:] + block[:4 * i])


def elements(case, dim):
    return case.heads * sum(case.lens) * dim


class Bound:
    """A case in memory; O and LSE are its own."""

    def __init__(self, lib, case, dtype, dim, threads, arena):
        self.lib, self.problem = lib, lib.problem(case.problem(dtype, dim))
        self.options = abi.Options(struct_size=ctypes.sizeof(abi.Options), threads=threads)
        rows = sum(case.lens)
        lead = [rows] if case.ragged() else [1, rows]
        shapes = {"q": [*lead, case.heads, dim], "k": [*lead, case.heads_kv, dim], "v": [*lead, case.heads_kv, dim]}
        shapes.update(d_o=shapes["q"], dq=shapes["q"], dk=shapes["k"], dv=shapes["k"])
        self.own = [Memory(elements(case, dim) * SIZE[dtype]), Memory(case.heads * rows * 4), Memory(4 * case.heads),
                    Memory(4 * (len(case.lens) + 1)), arena]
        self.views = {name: tensor(arena.memory[name], dtype, shape) for name, shape in shapes.items()}
        self.views["o"] = tensor(self.own[0], dtype, shapes["q"])
        self.views["lse"] = tensor(self.own[1], FP32, [case.heads, rows] if case.ragged() else [1, case.heads, rows])
        if "alibi" in case.features:
            slopes = array.array("f", (2 ** (-8 * (h + 1) / case.heads) for h in range(case.heads)))
            self.own[2].fill(slopes.tobytes())
            self.views["alibi_slopes"] = tensor(self.own[2], FP32, [case.heads])
        if case.ragged():
            self.own[3].fill(array.array("i", (sum(case.lens[:i]) for i in range(len(case.lens) + 1))).tobytes())
            for name in ("cu_seqlens_q", "cu_seqlens_kv"):
                self.views[name] = tensor(self.own[3], INT32, [len(case.lens) + 1])

    def workspace_bytes(self, direction):
        return self.lib.workspace_bytes(self.problem, self.options, direction)

    def call(self, direction):
        size = self.workspace_bytes(direction)
        workspace = Memory(size)
        outs = ("dq", "dk", "dv", "d_o")
        views = {n: v for n, v in self.views.items() if direction == BACKWARD or n not in outs}
        return self.lib.bind(self.problem, self.options, direction, views, workspace.address, size,
                             keep=(workspace, self))

    def looks_right(self):
        """O is a mean of normal numbers: finite, and not all 0."""
        count = min(1024, self.own[0].size // SIZE[self.problem.dtype])
        data = ctypes.string_at(self.own[0].address, count * SIZE[self.problem.dtype])
        if self.problem.dtype == BF16:
            data = array.array("I", (h << 16 for h in array.array("H", data))).tobytes()
        numbers = array.array("f", data)
        return all(abs(x) < 100 for x in numbers) and any(x != 0 for x in numbers)


def milliseconds(call, clock=time.perf_counter):
    begin = clock()
    call()
    return (clock() - begin) * 1e3


def short_median(call, most_ms=20, calls=4):
    """One time of `call`, in ms: after an uncounted call the median of a few, or of one when it is long."""
    first = milliseconds(call)
    if first > most_ms:
        return milliseconds(call) if first < 5 * most_ms else first
    return statistics.median(milliseconds(call) for _ in range(calls))


def in_turn(calls, seconds, least=3, most=25):
    """Times (ms) of each call, taken one after another in rounds, so that disturbances of the machine affect all alike."""
    times = [[] for _ in calls]
    for call in calls:
        call()
    stop = time.perf_counter() + seconds
    while len(times[0]) < least or (time.perf_counter() < stop and len(times[0]) < most):
        for i, call in enumerate(calls):
            times[i].append(short_median(call))
    return times


def alternate(calls, seconds, clock=time.perf_counter):
    """Times (ms) of calls of different libraries, taken in alternating blocks; at least three of each.

    Between blocks the process sleeps until the other library's idle threads have stopped spinning; the first call of a
    block wakes the library's own threads and is not counted. With `clock` time.process_time, other programs on the host
    take no part of the time of calls on one thread.
    """
    times = [[] for _ in calls]
    stop = time.perf_counter() + seconds
    while min(map(len, times)) < 3 or (time.perf_counter() < stop and len(times[0]) < MOST_CALLS):
        for call, taken in zip(calls, times):
            time.sleep(0.03)
            call()
            for _ in range(BLOCK):
                taken.append(milliseconds(call, clock))
                if taken[-1] > LONG_CALL:
                    break
    return times


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def commit():
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        return done.stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def record(case, direction, dtype, dim, threads, times, versions, revision):
    """The Record of one measurement (docs/measuring.md)."""
    ms = statistics.median(times)
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [ms, ms, ms]
    made = {"what": "measured", "by": "tessera", "schedule": "fa2", "pass": ("forward", "backward")[direction],
            "dtype": dtype, "batch": len(case.lens), "len_q": max(case.lens), "len_kv": max(case.lens),
            "heads_q": case.heads, "heads_kv": case.heads_kv, "head_dim": dim, "head_dim_v": dim,
            "mask": case.mask_text(), "features": case.features_text(), "deterministic": True, "ms": ms,
            "ms_spread": quarters[2] - quarters[0], "tflops": case.flop(direction, dim) / ms * 1e-9,
            "device": cpu_name(), "threads": threads, "versions": versions,
            "date": datetime.date.today().isoformat(), "commit": revision}
    if not made["features"]:
        del made["features"]
    return made
