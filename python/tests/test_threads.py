# SPDX-License-Identifier: Apache-2.0
"""Many threads at once, each with its own results and its own errors; and a process that was forked after a call."""
import concurrent.futures
import pathlib
import subprocess
import sys

import numpy
import pytest
from reference import Reference, check_lse, check_o

import tessera


def inputs(seed):
    rng = numpy.random.default_rng(seed)
    return [rng.standard_normal((1, 65 + seed, 2, 16), dtype=numpy.float32) for _ in range(3)]


def test_calls_and_errors_of_many_threads():
    expected = {seed: tessera.attention(*inputs(seed)) for seed in range(6)}

    def work(task):
        seed = task % 6
        if task % 5 == 0:
            with pytest.raises(ValueError, match=f"^k: expected shape .*got \\[{seed + 2}, "):
                q, k, v = inputs(seed)
                tessera.attention(q, numpy.repeat(k, seed + 2, 0), v)
        return (tessera.attention(*inputs(seed)) == expected[seed]).all()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(240)))


def test_same_bits_for_any_number_of_threads():
    q, k, v = inputs(40)
    results = [tessera.attention(q, k, v, threads=threads, return_lse=True) for threads in (1, 2, 5)]
    assert all((o == results[0][0]).all() and (lse == results[0][1]).all() for o, lse in results)
    gradients = [tessera.attention_backward(q, q, k, v, *results[0], threads=threads) for threads in (1, 2, 5)]
    assert all((a == b).all() for g in gradients for a, b in zip(g, gradients[0]))


FORKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_threads import Reference, check_lse, check_o, inputs, tessera
tessera.attention(*inputs(3))
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
o, lse = tessera.attention(*inputs(3), return_lse=True)
ref = Reference(*inputs(3))
check_o(o, ref, "float32")
check_lse(lse, ref)
os._exit(7)
"""


def test_after_a_fork():
    """Loaders of data fork: the parent's threads are not in the child."""
    folder = str(pathlib.Path(__file__).parent)
    said = subprocess.run([sys.executable, "-c", FORKED, folder], capture_output=True, text=True, timeout=60)
    assert said.returncode == 7, said
