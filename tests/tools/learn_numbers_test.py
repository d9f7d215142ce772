#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/learn_numbers.py accepts numbers with marks that hold, and finds each kind of stale number."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
import learn_numbers  # noqa: E402

COMMAND = "tessera roofline --len 4096"
OUTPUT = "fa3   0.2170 ms\n8,192  0.8280 ms  win 4.52x"
ELSEWHERE = {"other.md": {"43"}}

CLEAN = [
    "It is 1.98 times as fast.\n<!-- sum: 0.8280 / 0.4181 = 1.98 -->",
    "It takes 0.2170 ms, or 0.22.\n<!-- shown: fa3 0.2170 ms\n     sum: 0.2170 = 0.22 -->",
    "Memory moves 4.8 TB/s.\n<!-- run: device -> 4800 GB/s\n     sum: 4800 / 1000 = 4.8 -->",
    "43 FLOP for a byte, and 40.3 GB.\n<!-- marked: 43 in other.md\n     given: 40.3; a paper -->",
    "The rescale is exp(0.5 - 2) = 0.223.\n<!-- given: 0.5; an example\n     sum: exp(0.5 - 2) = exp(-3/2) = 0.223 -->",
    # Kinds that need no mark.
    "## 99 words\n\n    99 = code\n\n```console\n$ 99\n```",
    "In lessons 10 to 14, on an H100, in PyTorch 2.11 of 2022, row 200 of `99` in bf16, FlashAttention-2, and 2^20.",
    "With 4096 queries there are 3 steps of 2 bytes, and key 17.",
]
# Text, and a piece of the expected line.
STALE = [
    ("It is 1.97 times as fast.\n<!-- sum: 0.8280 / 0.4181 = 1.98 -->", "1.97 has no mark"),
    ("It is 1.97 times as fast.\n<!-- sum: 0.8280 / 0.4181 = 1.97 -->", "is 1.98039, the page says 1.97"),
    ("It is 1.97 times as fast.\n<!-- sum: 0.8280 / 0.4203 = 1.97 -->", "0.4203: neither in an output nor in a mark"),
    ("It takes 0.2171 ms.\n<!-- shown: fa3 0.2171 ms -->", "shown: fa3 0.2171 ms: no output of the page has it"),
    ("Memory moves 4900 GB/s.\n<!-- run: device -> 4900 GB/s -->", "its output does not have: 4900 GB/s"),
    ("44 FLOP for a byte.\n<!-- marked: 44 in other.md -->", "marked: 44: no mark of other.md has it"),
    ("44 FLOP for a byte.\n<!-- marked: 44 -->", "marked: 44: no mark of this page has it"),
    ("40.3 GB.\n<!-- given: 40.3 -->", 'expected "; SOURCE"'),
    ("It is 2.\n<!-- sum: 1 + = 2 -->", "expected arithmetic"),
    ("It is 2.\n<!-- sum: 1 + 1 -->", 'expected "= RESULT"'),
    ("It is 3 times as fast.", "3 has no mark"),
    ("It has 12 parts.", "12 has no mark"),
    ("| a | 0.5 |\n|---|---|", "0.5 has no mark"),
    ("**Before you read on.** It takes 0.98 ms.", "0.98 has no mark"),
    ("First 1.98.\n\nThen 0.8280.\n<!-- shown: 0.8280 -->", "1.98 has no mark"),
]


def problems(prose, strict=True):
    page = learn_numbers.Page("a.md", f"# Title\n\n{prose}\n", [OUTPUT, "0.4181 ms"], [COMMAND, "tessera"],
                              lambda command: f"{command} 4800 GB/s", lambda name: ELSEWHERE.get(name, set()))
    return page.check(strict)


for text in CLEAN:
    assert problems(text) == [], f"{text}\n{problems(text)}"
for text, expected in STALE:
    found = problems(text)
    assert len(found) == 1 and expected in found[0], f"{text}\nexpected {expected!r}, got {found}"
assert problems("It has 12 parts.", strict=False) == []
assert problems("12.\n<!-- sum: 6 + 5 = 12 -->", strict=False) == ["a.md: sum: 6 + 5 is 11, the page says 12"]
