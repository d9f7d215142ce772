# SPDX-License-Identifier: Apache-2.0
"""The kernels that a learner writes (docs/learn/your_kernel), in Python and in C++: filled blanks are right, and slips
are named."""
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "docs/learn/your_kernel"

FILLS = {
    "online_softmax.py": {
        "m_new = ...": "m_new = max(m, s.max())", "rescale = ...": "rescale = numpy.exp(m - m_new)",
        "p = ...": "p = numpy.exp(s - m_new)", "l = ...": "l = rescale * l + p.sum()",
        "o = ...": "o = rescale * o + p @ v", "return ..., ...": "return o / l, m + numpy.log(l)",
    },
    "forward.py": {
        "end = ...": "end = min(len(k), i + rows + shift) if causal else len(k)",
        "s = ...": "s = scale * queries @ keys.T",
        "hidden = ...": "hidden = j + numpy.arange(len(keys)) > i + numpy.arange(rows)[:, None] + shift",
        "m_new = ...": "m_new = numpy.maximum(m, s.max(1))", "rescale = ...": "rescale = numpy.exp(m - m_new)",
        "p = ...": "p = numpy.exp(s - m_new[:, None])", "l = ...": "l = rescale * l + p.sum(1)",
        "sums = ...": "sums = rescale[:, None] * sums + p @ values", "o.store(i, ...)": "o.store(i, sums / l[:, None])",
        "lse.store(i, ...)": "lse.store(i, (m + numpy.log(l))[:, None])",
    },
    "backward.py": {
        "delta = ...": "delta = (d_o * o.load(i, i + block_q)).sum(1, keepdims=True)",
        "p = ...": "p = numpy.exp(s - lse.load(i, i + block_q))", "dv_sum += ...": "dv_sum += p.T @ d_o",
        "dp = ...": "dp = d_o @ values.T", "ds = ...": "ds = p * (dp - delta)",
        "dk_sum += ...": "dk_sum += scale * ds.T @ queries", "dq.add(i, ...)": "dq.add(i, scale * ds @ keys)",
    },
    "online_softmax.hpp": {
        "m_new = ...": "m_new = std::max(m_new, s(j, 0))", "rescale = ...": "rescale = std::exp(m - m_new)",
        "l = ...": "l = rescale * l", "o(0, c) = ...;\n        for": "o(0, c) = rescale * o(0, c);\n        for",
        "p = ...": "p = std::exp(s(j, 0) - m_new)", "o(0, c) += ...": "o(0, c) += p * v(j, c)",
        "o(0, c) = ...": "o(0, c) = o(0, c) / l", "return ...": "return m + std::log(l)",
    },
    "forward.hpp": {
        "end = ...": "end = causal ? std::min(k.rows(), i + rows + shift) : k.rows()",
        "causal && ...": "causal && j + c > i + r + shift",
        "-infinity : ...": "-infinity : scale * dot(queries.row(r), keys.row(c))",
        "m_new = ...": "m_new = std::max(m_new, s(0, c))", "rescale = ...": "rescale = std::exp(m(r, 0) - m_new)",
        "l(r, 0) = ...": "l(r, 0) = rescale * l(r, 0)",
        "sums(r, x) = ...;\n                for": "sums(r, x) = rescale * sums(r, x);\n                for",
        "p = ...": "p = std::exp(s(0, c) - m_new)", "sums(r, x) += ...": "sums(r, x) += p * values(c, x)",
        "sums(r, x) = ...": "sums(r, x) = sums(r, x) / l(r, 0)",
        "lses(r, 0) = ...": "lses(r, 0) = m(r, 0) + std::log(l(r, 0))",
    },
    "backward.hpp": {
        "delta = ...": "delta = dot(grad.row(r), out.row(r))", "p = ...": "p = std::exp(s - lses(r, 0))",
        "dp = ...": "dp = dot(grad.row(r), values.row(c))", "ds = ...": "ds = p * (dp - delta)",
        "dv_sum(c, x) += ...": "dv_sum(c, x) += p * grad(r, x)",
        "dk_sum(c, x) += ...": "dk_sum(c, x) += scale * ds * queries(r, x)",
        "dq_part(r, x) += ...": "dq_part(r, x) += scale * ds * keys(c, x)",
    },
}

# (file, its right text, the slip, what is said)
SLIPS = [
    ("online_softmax.py", "m_new = max(m, s.max())", "m_new = s.max()", "stale maximum"),
    ("online_softmax.py", "l = rescale * l", "l = l", "l is not rescaled"),
    ("online_softmax.py", "o = rescale * o", "o = o", "the sum for O is not rescaled"),
    ("online_softmax.py", "rescale = numpy.exp(m - m_new)", "rescale = 1.0", "nothing is rescaled"),
    ("online_softmax.py", "return o / l", "return o", "not divided"),
    ("online_softmax.py", "m + numpy.log(l)", "numpy.log(l)", "it is m + log(l)"),
    ("online_softmax.py", "len(scores), tile)", "len(scores) // tile * tile, tile)", "the last tile"),
    ("forward.py", "m_new = numpy.maximum(m, s.max(1))", "m_new = s.max(1)", "stale maximum"),
    ("forward.py", "rescale[:, None] * sums", "sums", "the sum for O is not rescaled"),
    ("forward.py", "s = scale * queries", "s = queries", "not multiplied by scale"),
    ("forward.py", "[:, None] + shift", "[:, None]", "aligned at the first query"),
    ("forward.py", "[:, None] + shift", "[:, None] + shift + 1", "one key too many"),
    ("forward.py", "keys)) > i", "keys)) > 1000 + i", "hides nothing"),
    ("forward.py", "min(len(k), i + rows + shift) if causal else len(k)", "len(k)", "no tile that the mask hides"),
    ("backward.py", "p * (dp - delta)", "p * dp", "no delta"),
    ("backward.py", "p * (dp - delta)", "dp - delta", "multiplied by P"),
    ("backward.py", "numpy.exp(s - lse.load(i, i + block_q))", "numpy.exp(s)", "exp(S - LSE)"),
    ("backward.py", "dk_sum += scale * ds.T", "dk_sum += ds.T", "dK is not multiplied by scale"),
    ("backward.py", "dv_sum += p.T", "dv_sum += ds.T", "dV is made of dS"),
    ("backward.py", "dk_sum += scale * ds.T", "dk_sum += scale * p.T", "dK is made of P"),
    ("online_softmax.hpp", "double m_new = m;", "double m_new = -infinity;", "stale maximum"),
    ("online_softmax.hpp", "l = rescale * l", "l = l", "l is not rescaled"),
    ("online_softmax.hpp", "o(0, c) = rescale * o(0, c)", "o(0, c) = o(0, c)", "the sum for O is not rescaled"),
    ("online_softmax.hpp", "rescale = std::exp(m - m_new)", "rescale = 1", "nothing is rescaled"),
    ("online_softmax.hpp", "o(0, c) = o(0, c) / l", "o(0, c) = o(0, c)", "not divided"),
    ("online_softmax.hpp", "m + std::log(l)", "std::log(l)", "it is m + log(l)"),
    ("online_softmax.hpp", "begin < scores.rows()", "begin + tile <= scores.rows()", "the last tile"),
    ("forward.hpp", "m_new = m(r, 0)", "m_new = -infinity", "stale maximum"),
    ("forward.hpp", "sums(r, x) = rescale * sums(r, x)", "sums(r, x) = sums(r, x)", "the sum for O is not rescaled"),
    ("forward.hpp", ": scale * dot", ": dot", "not multiplied by scale"),
    ("forward.hpp", "> i + r + shift", "> i + r", "aligned at the first query"),
    ("forward.hpp", "> i + r + shift", "> i + r + shift + 1", "one key too many"),
    ("forward.hpp", "causal && j + c > i + r + shift", "false", "hides nothing"),
    ("forward.hpp", "causal ? std::min(k.rows(), i + rows + shift) : k.rows()", "k.rows()",
     "no tile that the mask hides"),
    ("backward.hpp", "p * (dp - delta)", "p * dp", "no delta"),
    ("backward.hpp", "p * (dp - delta)", "dp - delta", "multiplied by P"),
    ("backward.hpp", "std::exp(s - lses(r, 0))", "std::exp(s)", "exp(S - LSE)"),
    ("backward.hpp", "dk_sum(c, x) += scale * ds", "dk_sum(c, x) += ds", "dK is not multiplied by scale"),
    ("backward.hpp", "dv_sum(c, x) += p", "dv_sum(c, x) += ds", "dV is made of dS"),
    ("backward.hpp", "dk_sum(c, x) += scale * ds", "dk_sum(c, x) += scale * p", "dK is made of P"),
]


def filled(file):
    text = (FOLDER / file).read_text(encoding="utf-8")
    for blank, fill in FILLS[file].items():
        places = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(blank)}", text)]
        assert len(places) == 1, (blank, places)
        text = text[:places[0]] + fill + text[places[0] + len(blank):]
    return text


def judged(path):
    return subprocess.run([sys.executable, FOLDER / "judge.py", path], capture_output=True, text=True)


def written(tmp_path, file, text):
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    return judged(path)


@pytest.mark.parametrize("file", FILLS)
def test_blanks_are_named_and_filled_blanks_are_right(tmp_path, file):
    said = judged(FOLDER / file)
    assert said.returncode == 2 and f"{len(FILLS[file])} lines still have a blank" in said.stderr, said
    said = written(tmp_path, file, filled(file))
    assert said.returncode == 0 and "Right in all" in said.stdout, said


@pytest.mark.parametrize("file, right, slip, text", SLIPS)
def test_slips_are_named(tmp_path, file, right, slip, text):
    source = filled(file)
    assert source.count(right) == 1
    said = written(tmp_path, file, source.replace(right, slip))
    assert said.returncode == 1 and text in said.stdout, said.stdout + said.stderr


@pytest.mark.parametrize("file, right, slip", [
    ("online_softmax.py", "s = scores.load(begin, begin + tile)[:, 0]", "s = scores.load(0, begin + tile)[begin:, 0]"),
    ("online_softmax.hpp", "v = values.load(begin, begin + tile);",
     "v = values.load(begin, begin + tile); values.load(begin, begin + 1);"),
])
def test_traffic_is_counted(tmp_path, file, right, slip):
    said = written(tmp_path, file, filled(file).replace(right, slip))
    assert said.returncode == 1 and "numbers loaded, expected" in said.stdout, said
    assert "right numbers, wrong traffic" in said.stdout


def test_what_cannot_be_judged_is_said(tmp_path):
    assert "No such file" in judged(tmp_path / "nothing.py").stderr
    assert "expected one of the functions" in written(tmp_path, "other.py", "x = 1\n").stderr
    assert "expected one of the functions" in written(tmp_path, "other.hpp", "int x = 1;\n").stderr
    said = written(tmp_path, "online_softmax.py", filled("online_softmax.py").replace("p @ v", "p @ w"))
    assert said.returncode == 1 and "NameError" in said.stdout and "line" in said.stdout, said
    said = written(tmp_path, "online_softmax.hpp", filled("online_softmax.hpp").replace("p * v(j, c)", "p * w(j, c)"))
    assert said.returncode == 2 and "error" in said.stderr and "w" in said.stderr, said


@pytest.mark.parametrize("right, slip, text", [
    ("p * v(j, c)", "p * v(j + 1, c)", "has no number (8, 0)"),
    ("scores.load(begin, begin + tile)", "scores.load(begin, begin - tile)", "load(0, -8): expected 0 <= begin <= end"),
    ("double l = 0;", "double l = 0; int* none = nullptr; *const_cast<volatile int*>(none) = 1;", "ended the program"),
])
def test_errors_of_a_compiled_kernel_are_said(tmp_path, right, slip, text):
    said = written(tmp_path, "online_softmax.hpp", filled("online_softmax.hpp").replace(right, slip))
    assert said.returncode == 1 and text in said.stdout + said.stderr, said


def test_an_absent_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = written(tmp_path, "forward.hpp", filled("forward.hpp"))
    assert said.returncode == 2 and "no-such-compiler" in said.stderr, said
