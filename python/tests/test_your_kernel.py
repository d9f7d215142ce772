# SPDX-License-Identifier: Apache-2.0
"""The kernels that a learner writes (docs/learn/your_kernel): filled blanks are right, and slips are named."""
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "docs/learn/your_kernel"

FILLS = {
    "online_softmax": {
        "m_new = ...": "m_new = max(m, s.max())", "rescale = ...": "rescale = numpy.exp(m - m_new)",
        "p = ...": "p = numpy.exp(s - m_new)", "l = ...": "l = rescale * l + p.sum()",
        "o = ...": "o = rescale * o + p @ v", "return ..., ...": "return o / l, m + numpy.log(l)",
    },
    "forward": {
        "end = ...": "end = min(len(k), i + rows + shift) if causal else len(k)",
        "s = ...": "s = scale * queries @ keys.T",
        "hidden = ...": "hidden = j + numpy.arange(len(keys)) > i + numpy.arange(rows)[:, None] + shift",
        "m_new = ...": "m_new = numpy.maximum(m, s.max(1))", "rescale = ...": "rescale = numpy.exp(m - m_new)",
        "p = ...": "p = numpy.exp(s - m_new[:, None])", "l = ...": "l = rescale * l + p.sum(1)",
        "sums = ...": "sums = rescale[:, None] * sums + p @ values", "o.store(i, ...)": "o.store(i, sums / l[:, None])",
        "lse.store(i, ...)": "lse.store(i, (m + numpy.log(l))[:, None])",
    },
    "backward": {
        "delta = ...": "delta = (d_o * o.load(i, i + block_q)).sum(1, keepdims=True)",
        "p = ...": "p = numpy.exp(s - lse.load(i, i + block_q))", "dv_sum += ...": "dv_sum += p.T @ d_o",
        "dp = ...": "dp = d_o @ values.T", "ds = ...": "ds = p * (dp - delta)",
        "dk_sum += ...": "dk_sum += scale * ds.T @ queries", "dq.add(i, ...)": "dq.add(i, scale * ds @ keys)",
    },
}

# (kernel, its right text, the slip, what is said)
SLIPS = [
    ("online_softmax", "m_new = max(m, s.max())", "m_new = s.max()", "stale maximum"),
    ("online_softmax", "l = rescale * l", "l = l", "l is not rescaled"),
    ("online_softmax", "o = rescale * o", "o = o", "the sum for O is not rescaled"),
    ("online_softmax", "rescale = numpy.exp(m - m_new)", "rescale = 1.0", "nothing is rescaled"),
    ("online_softmax", "return o / l", "return o", "not divided"),
    ("online_softmax", "m + numpy.log(l)", "numpy.log(l)", "it is m + log(l)"),
    ("online_softmax", "len(scores), tile)", "len(scores) // tile * tile, tile)", "the last tile"),
    ("forward", "rescale[:, None] * sums", "sums", "the sum for O is not rescaled"),
    ("forward", "s = scale * queries", "s = queries", "not multiplied by scale"),
    ("forward", "[:, None] + shift", "[:, None]", "aligned at the first query"),
    ("forward", "[:, None] + shift", "[:, None] + shift + 1", "one key too many"),
    ("forward", "keys)) > i", "keys)) > 1000 + i", "hides nothing"),
    ("forward", "min(len(k), i + rows + shift) if causal else len(k)", "len(k)", "no tile that the mask hides"),
    ("backward", "p * (dp - delta)", "p * dp", "no delta"),
    ("backward", "p * (dp - delta)", "dp - delta", "multiplied by P"),
    ("backward", "numpy.exp(s - lse.load(i, i + block_q))", "numpy.exp(s)", "exp(S - LSE)"),
    ("backward", "dk_sum += scale * ds.T", "dk_sum += ds.T", "dK is not multiplied by scale"),
    ("backward", "dv_sum += p.T", "dv_sum += ds.T", "dV is made of dS"),
    ("backward", "dk_sum += scale * ds.T", "dk_sum += scale * p.T", "dK is made of P"),
]


def filled(kernel):
    text = (FOLDER / f"{kernel}.py").read_text(encoding="utf-8")
    for blank, fill in FILLS[kernel].items():
        lines = [line for line in text.split("\n") if line.strip().startswith(blank)]
        assert len(lines) == 1, (blank, lines)
        text = text.replace(lines[0], lines[0].replace(blank, fill, 1))
    return text


def judged(path):
    return subprocess.run([sys.executable, FOLDER / "judge.py", path], capture_output=True, text=True)


def written(tmp_path, kernel, text):
    path = tmp_path / f"{kernel}.py"
    path.write_text(text, encoding="utf-8")
    return judged(path)


@pytest.mark.parametrize("kernel", FILLS)
def test_blanks_are_named_and_filled_blanks_are_right(tmp_path, kernel):
    said = judged(FOLDER / f"{kernel}.py")
    assert said.returncode == 2 and f"{len(FILLS[kernel])} lines still have a blank" in said.stderr, said
    said = written(tmp_path, kernel, filled(kernel))
    assert said.returncode == 0 and "Right in all" in said.stdout, said


@pytest.mark.parametrize("kernel, right, slip, text", SLIPS)
def test_slips_are_named(tmp_path, kernel, right, slip, text):
    source = filled(kernel)
    assert source.count(right) == 1
    said = written(tmp_path, kernel, source.replace(right, slip))
    assert said.returncode == 1 and text in said.stdout, said.stdout + said.stderr


def test_traffic_is_counted(tmp_path):
    said = written(tmp_path, "online_softmax", filled("online_softmax").replace(
        "s = scores.load(begin, begin + tile)[:, 0]", "s = scores.load(0, begin + tile)[begin:, 0]"))
    assert said.returncode == 1 and "numbers loaded, expected" in said.stdout, said


def test_what_cannot_be_judged_is_said(tmp_path):
    assert "No such file" in judged(tmp_path / "nothing.py").stderr
    assert "expected one of the functions" in written(tmp_path, "other", "x = 1\n").stderr
    said = written(tmp_path, "online_softmax", filled("online_softmax").replace("p @ v", "p @ w"))
    assert said.returncode == 1 and "NameError" in said.stdout and "line" in said.stdout, said
