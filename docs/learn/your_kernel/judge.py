#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Judges a kernel of your own against the definition in fp64, counts what it moves, and names the likely slip.

    python3 docs/learn/your_kernel/judge.py FILE

FILE defines online_softmax, forward or backward, in Python (.py) or in C++ (any other name); the files with blanks
beside this one say what each has to do. Exit status: 0 right, 1 wrong, 2 not to be judged. It needs NumPy, and for C++
a compiler: g++, or the one that $CXX names."""
import importlib.util
import os
import pathlib
import re
import signal
import sys
import tempfile
import traceback

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from compiled import compile_kernel  # noqa: E402
from memory import Matrix  # noqa: E402

LIMIT = 1e-9  # the largest error, as a share of the largest number of the right result
SCALE = 0.3


def hidden_keys(len_q, len_kv, causal, shift=None):
    shift = len_kv - len_q if shift is None else shift
    if not causal:
        return numpy.zeros((len_q, len_kv), bool)
    return numpy.arange(len_kv) > numpy.arange(len_q)[:, None] + shift


def definition(q, k, v, scale, hidden):
    """(P, O, LSE [len_q, 1]) without any tile."""
    s = numpy.where(hidden, -numpy.inf, scale * q @ k.T)
    m = s.max(1, keepdims=True)
    p = numpy.exp(s - m)
    total = p.sum(1, keepdims=True)
    return p / total, p / total @ v, m + numpy.log(total)


# The slips: what a kernel computes that has one of them. If a wrong result is one of these, its slip is named.

def tiled(q, k, v, scale, hidden, tile, slip=None):
    """(O, LSE) tile by tile, with a slip."""
    rows, n = len(q), len(k)
    m, l, o = numpy.full((rows, 1), -numpy.inf), numpy.zeros((rows, 1)), numpy.zeros((rows, v.shape[1]))
    last = n - n % tile if slip == "rest" else n
    for j in range(0, last, tile):
        s = (1 if slip == "scale" else scale) * q @ k[j:j + tile].T
        s = numpy.where(hidden[:, j:j + tile], -numpy.inf, s)
        top = s.max(1, keepdims=True)
        new = top if slip == "stale" else numpy.maximum(m, top)
        with numpy.errstate(all="ignore"):
            rescale = numpy.where(m == -numpy.inf, 0, numpy.exp(m - new))
            p = numpy.where(s == -numpy.inf, 0, numpy.exp(s - new))
        rescale_l = 1 if slip in ("no rescale", "l not rescaled") else rescale
        rescale_o = 1 if slip in ("no rescale", "o not rescaled") else rescale
        l, o, m = rescale_l * l + p.sum(1, keepdims=True), rescale_o * o + p @ v[j:j + tile], new
    with numpy.errstate(all="ignore"):
        lse = {"lse without m": numpy.log(l), "lse without log": m + l, "lse of m": m}.get(slip, m + numpy.log(l))
        return (o if slip == "not divided" else o / l), lse


FORWARD_SLIPS = {
    "stale": "m is the largest score of the tile alone (a stale maximum), so exp(old m - new m) can be infinite: take "
             "the larger of it and the m before.",
    "no rescale": "nothing is rescaled: when m rises, l and the sum for O have to be multiplied by exp(old m - new m).",
    "l not rescaled": "l is not rescaled: when m rises, l has to be multiplied by exp(old m - new m).",
    "o not rescaled": "the sum for O is not rescaled: when m rises, multiply it by exp(old m - new m), as l.",
    "not divided": "O is not divided by l at the end.",
    "lse without m": "LSE is log(l): the scores were taken relative to m, so it is m + log(l).",
    "lse without log": "LSE is m + l: the logarithm of l is missing.",
    "lse of m": "LSE is m: log(l) is missing.",
    "rest": "the last tile, which has fewer keys than the others, is left out.",
    "scale": "the scores are not multiplied by scale.",
}
MASK_SLIPS = {
    "unmasked": "the mask hides nothing: hidden keys need a score of -inf in the tiles that it cuts.",
    "top-left": "the mask is aligned at the first query and key: query i sees the keys up to i + len_kv - len_q.",
    "one more": "the mask shows each query one key too many.",
    "one less": "the mask hides the last key that each query sees.",
}


def mask_of(slip, len_q, len_kv, causal):
    diagonal = len_kv - len_q
    shifts = {"unmasked": len_kv, "top-left": 0, "one more": diagonal + 1, "one less": diagonal - 1}
    return hidden_keys(len_q, len_kv, causal, shifts.get(slip))


def gradients(q, k, v, d_o, scale, hidden, slip=None):
    """(dQ, dK, dV), with a slip."""
    p, o, lse = definition(q, k, v, scale, hidden)
    if slip == "not normalized":
        p = p * numpy.exp(lse)
    delta = 0 if slip == "delta" else (d_o * o).sum(1, keepdims=True)
    dp = d_o @ v.T
    ds = (dp - delta) if slip == "ds without p" else p * dp if slip == "delta" else p * (dp - delta)
    of_q, of_k = (1 if slip in ("scale", f"scale of {name}") else scale for name in ("dq", "dk"))
    dk = (ds if slip != "dk of p" else p).T @ q
    dv = (p if slip != "dv of ds" else ds).T @ d_o
    return of_q * ds @ k, of_k * dk, dv


BACKWARD_SLIPS = {
    "not normalized": "P is exp(S), or relative to something else than the LSE: it is exp(S - LSE).",
    "delta": "dS has no delta: dS = P (dP - delta).",
    "ds without p": "dS is dP - delta: it has to be multiplied by P.",
    "dk of p": "dK is made of P: it is scale * dS^T Q.",
    "dv of ds": "dV is made of dS: it is P^T dO.",
    "scale": "dQ and dK are not multiplied by scale.",
    "scale of dq": "dQ is not multiplied by scale.",
    "scale of dk": "dK is not multiplied by scale.",
}


class Case:
    """One call: its inputs, the right results, and the numbers that a kernel has to move."""

    def __init__(self, name, len_q, len_kv, d, block_q, block_kv, causal=False, offset=0.0, peak=0.0, first_key=0.0):
        random = numpy.random.default_rng(len_q * 1000 + len_kv)
        self.name, self.block_q, self.block_kv, self.causal = name, block_q, block_kv, causal
        self.q, self.k, self.v, self.d_o = (random.standard_normal((n, d)) for n in (len_q, len_kv, len_kv, len_q))
        self.k = self.k * numpy.linspace(0.2, 3, len_kv)[:, None]  # later keys have larger scores, so m rises
        if first_key != 0.0:  # added to the scores of the first key
            self.q[:, 0], self.k[0, 0] = 1.0, first_key / SCALE
        self.offset, self.peak = offset, peak  # added to all scores of the softmax, and to its first one
        self.hidden = hidden_keys(len_q, len_kv, causal)
        self.p, self.o, self.lse = definition(self.q, self.k, self.v, SCALE, self.hidden)

    def keys_seen(self, i):
        """Rows of keys that the tiles of the query block at i load."""
        end = len(self.k) if not self.causal else min(len(self.k), i + self.block_q + len(self.k) - len(self.q))
        return min(len(self.k), -(-end // self.block_kv) * self.block_kv)


def judge_softmax(function, case):
    scores = SCALE * case.q[:1] @ case.k.T + case.offset
    scores[0, 0] += case.peak
    s, v = Matrix(scores.T), Matrix(case.v)
    o, lse = function(s, v, case.block_kv)
    one = numpy.ones((1, 1))
    none = numpy.zeros((1, len(case.k)), bool)
    slips = {text: tiled(one, scores.T, case.v, 1.0, none, case.block_kv, slip)
             for slip, text in FORWARD_SLIPS.items() if slip != "scale"}
    right = definition(one, scores.T, case.v, 1.0, none)[1:]
    results = {"o": numpy.reshape(o, (1, -1)), "lse": numpy.reshape(lse, (1, 1))}
    moved = [("scores", "loaded", s.loaded, len(s)), ("values", "loaded", v.loaded, v.rows.size)]
    return results, dict(zip(("o", "lse"), right)), {t: dict(zip(("o", "lse"), r)) for t, r in slips.items()}, moved


def judge_forward(function, case):
    m = {name: Matrix(rows) for name, rows in (("q", case.q), ("k", case.k), ("v", case.v), ("o", 0 * case.q),
                                               ("lse", 0 * case.lse))}
    function(m["q"], m["k"], m["v"], m["o"], m["lse"], case.block_q, case.block_kv, SCALE, case.causal)
    def wrong(slip, hidden):
        return dict(zip(("o", "lse"), tiled(case.q, case.k, case.v, SCALE, hidden, case.block_kv, slip)))
    slips = {text: wrong(slip, case.hidden) for slip, text in FORWARD_SLIPS.items()}
    if case.causal:
        queries = numpy.arange(len(case.q)) // case.block_q * case.block_q
        not_loaded = numpy.arange(len(case.k)) >= numpy.array([case.keys_seen(i) for i in queries])[:, None]
        slips.update({text: wrong(None, mask_of(slip, len(case.q), len(case.k), True) | not_loaded)
                      for slip, text in MASK_SLIPS.items()})
    rows = sum(case.keys_seen(i) for i in range(0, len(case.q), case.block_q))
    moved = [("q", "loaded", m["q"].loaded, case.q.size), ("k", "loaded", m["k"].loaded, rows * case.k.shape[1]),
             ("v", "loaded", m["v"].loaded, rows * case.v.shape[1]), ("o", "stored", m["o"].stored, case.o.size),
             ("lse", "stored", m["lse"].stored, len(case.q)), ("o", "loaded", m["o"].loaded, 0)]
    return {n: m[n].rows for n in ("o", "lse")}, dict(o=case.o, lse=case.lse), slips, moved


def judge_backward(function, case):
    m = {name: Matrix(rows) for name, rows in (
        ("q", case.q), ("k", case.k), ("v", case.v), ("o", case.o), ("lse", case.lse), ("do", case.d_o),
        ("dq", 0 * case.q), ("dk", 0 * case.k), ("dv", 0 * case.v))}
    function(*m.values(), case.block_q, case.block_kv, SCALE, case.causal)
    names = ("dq", "dk", "dv")
    def wrong(slip):
        return dict(zip(names, gradients(case.q, case.k, case.v, case.d_o, SCALE, case.hidden, slip)))
    moved = [(name, "loaded", m[name].loaded, case.k.size) for name in "kv"]
    moved += [(name, "stored", m[name].stored, case.k.size) for name in ("dk", "dv")]
    slips = {text: wrong(slip) for slip, text in BACKWARD_SLIPS.items()}
    return {n: m[n].rows for n in names}, wrong(None), slips, moved


PLAIN = [Case("one tile", 4, 8, 4, 4, 8), Case("tiles that fit", 16, 32, 8, 8, 8),
         Case("lengths that tiles do not divide", 13, 37, 8, 4, 8)]
FIRST_KEY = Case("the first key's scores are the largest by 800", 4, 24, 8, 4, 8, first_key=800.0)
CAUSAL = [Case("causal", 32, 32, 8, 8, 8, causal=True),
          Case("causal, more keys than queries", 13, 37, 8, 4, 8, causal=True)]
KERNELS = {
    "online_softmax": (judge_softmax, [
        *PLAIN, Case("scores near 800, whose exp is infinite", 4, 40, 8, 4, 8, offset=800.0),
        Case("the first score is the largest by 800", 4, 24, 8, 4, 8, peak=800.0)]),
    "forward": (judge_forward, [*PLAIN, FIRST_KEY, *CAUSAL]),
    "backward": (judge_backward, [*PLAIN, *CAUSAL]),
}


def error_of(got, right):
    """The largest difference as a share of the largest number; infinite where a number is missing."""
    got, right = numpy.asarray(got, float), numpy.asarray(right, float)
    if got.shape != right.shape or not numpy.isfinite(got).all():
        return numpy.inf
    return numpy.abs(got - right).max() / max(numpy.abs(right).max(), 1e-30)


def slip_of(results, right, slips):
    """The text of the slip that gives just these results, or None."""
    def same(got, wrong):
        got, wrong = numpy.asarray(got, float), numpy.asarray(wrong, float)
        return got.shape == wrong.shape and numpy.allclose(got, wrong, rtol=LIMIT, atol=LIMIT, equal_nan=True)
    for text, wrong in slips.items():
        if all(same(results[n], wrong[n]) for n in results) and not all(same(right[n], wrong[n]) for n in right):
            return text
    return None


def verdict(name, function):
    """(right, text)."""
    judge, cases = KERNELS[name]
    lines, right_cases, slip = [], 0, None
    for case in cases:
        try:
            with numpy.errstate(all="ignore"):
                results, right, slips, moved = judge(function, case)
        except Exception as error:
            place = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if f.name == name), None)
            where = f", line {place.lineno}: {place.line}" if place else ""
            return False, "\n".join([*lines, f"{case.name}: {type(error).__name__}: {error}{where}"])
        errors = {n: error_of(results[n], right[n]) for n in results}
        wrong = [n for n, e in errors.items() if not e <= LIMIT]
        amounts = [f"{n}: {got} numbers {verb}, expected {want}" for n, verb, got, want in moved if got != want]
        if wrong:
            off = ", ".join(f"{n} off by {errors[n]:.2g} of its largest number" for n in wrong)
            lines.append(f"{case.name}: wrong: {off}")
            with numpy.errstate(all="ignore"):
                slip = slip or slip_of(results, right, slips)
        elif amounts:
            lines += [f"{case.name}: right numbers, wrong traffic", *(f"    {text}" for text in amounts)]
        else:
            lines.append(f"{case.name}: right")
            right_cases += 1
    lines.append("")
    if right_cases == len(cases):
        return True, "\n".join([*lines, f"Right in all {len(cases)} cases, and each number is moved as often as the "
                                        "closed form says."])
    if slip:
        lines.append(f"The likely slip: {slip}")
    elif all("right" in line or line.startswith("    ") for line in lines if line):
        lines.append("More is loaded than needed: load each tile once, and no tile that the mask hides from the whole "
                     "block.")
    return False, "\n".join([*lines, f"Right in {right_cases} of {len(cases)} cases."])


class NotToBeJudged(Exception):
    """The text says why."""


def only_kernel(path, names):
    if len(names) != 1:
        raise NotToBeJudged(f"{path}: expected one of the functions {', '.join(KERNELS)}, got "
                            f"{' and '.join(names) or 'none'}")
    return names[0]


def kernel_of(path, folder):
    """(its name, the kernel as a function) of a file. Raises NotToBeJudged."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotToBeJudged(f"{path}: {error.strerror}") from None
    python = path.suffix == ".py"
    code = [line.split("#" if python else "//")[0] for line in text.split("\n")]
    blanks = [number for number, line in enumerate(code, 1) if "..." in line and "Replace each" not in line]
    if blanks:
        raise NotToBeJudged(f"{path}: {len(blanks)} lines still have a blank (...): {', '.join(map(str, blanks))}")
    try:
        if python:
            spec = importlib.util.spec_from_file_location("your_kernel", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            name = only_kernel(path, [n for n in KERNELS if callable(getattr(module, n, None))])
            return name, getattr(module, name)
        name = only_kernel(path, [n for n in KERNELS if re.search(rf"^[\w ]*\b{n}\(", "\n".join(code), re.MULTILINE)])
        return name, compile_kernel(path, name, folder)
    except NotToBeJudged:
        raise
    except Exception as error:
        raise NotToBeJudged(f"{path}: {type(error).__name__}: {error}") from None


def judged(path):
    """Prints the verdict, and returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            right, said = verdict(*kernel_of(path, folder))
        except NotToBeJudged as error:
            print(error, file=sys.stderr)
            return 2
    print(said)
    return 0 if right else 1


def main(arguments):
    if len(arguments) != 1:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    child = os.fork()  # a kernel in C++ can end its process
    if child == 0:
        status = judged(pathlib.Path(arguments[0]))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        print(f"{arguments[0]}: the kernel ended the program ({signal.strsignal(-status)}): does it read or write past "
              "the end of an array?", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
