# SPDX-License-Identifier: Apache-2.0
"""The ten lines of lesson 0 run as typed, print what the page shows, and give the O and LSE of tessera."""
import pathlib
import re

import numpy

import tessera

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/learn/00-ten-lines.md").read_text()
PROGRAM = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
SHOWN = re.search(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]


def test_the_ten_lines_are_ten_and_give_attention(capsys):
    names = {}
    exec(compile(PROGRAM, "ten_lines.py", "exec"), names)
    assert len(PROGRAM.splitlines()) == 10
    assert capsys.readouterr().out == SHOWN
    q, k, v = (names[name].astype(numpy.float32)[None, :, None, :] for name in "QKV")
    o, lse = tessera.attention(q, k, v, scale=float(names["scale"]), return_lse=True)
    numpy.testing.assert_allclose(o[0, :, 0], names["O"], rtol=1e-5, atol=1e-6)
    numpy.testing.assert_allclose(lse[0, 0], numpy.log(names["E"].sum(axis=1)), rtol=1e-5)
