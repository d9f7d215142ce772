# SPDX-License-Identifier: Apache-2.0
"""The Python in the FAQ runs, and its assertions hold. Each piece stands alone and has ten lines at most."""
import pathlib
import re

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "docs/learn/faq.md").read_text()
PIECES = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_faq_has_its_pieces():
    assert len(PIECES) == TEXT.count("```python\n") >= 4
    for title, code in PIECES:
        lines = [line for line in code.splitlines() if not line.startswith("import ")]
        assert "assert " in code and len(lines) <= 10, title


@pytest.mark.parametrize("title, code", PIECES, ids=[title for title, _ in PIECES])
def test_a_piece_runs(title, code):
    torch.manual_seed(0)
    exec(compile(code, title, "exec"), {})
