#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/check_text.py finds each kind of violation, and nothing in pages without any."""
import pathlib
import subprocess
import sys
import tempfile

CHECKER = pathlib.Path(sys.argv[1])
LONG = "word " * 30

CLEAN = {
    "README.md": "# A\n\nA line with [a link](docs/a.md#a-part-of-it) and [one](#a).\n",
    "docs/a.md": f"## A part, of `it`\n\n```\n{LONG}\n```\n\n    {LONG}\n\n| {LONG} |\n\n![{LONG}](../README.md)\n",
    "src/b/README.md": "[outside](https://example.org/nothing)\n",
    "docs/learn/deep.md": LONG + "\n",  # not among the folders
    "docs/files.md": "`b/c.cc`, `*/c.cc`, `../src/b/c.cc`, `gone.cc`, `build/c.cc --now`, `core/X_test.cc`\n",
    "src/b/c.cc": "/// Rows of a tile. What is a tile? See below.\nint x;  // of the step\nchar s[] = \"What\";\n",
    "python/d.py": '"""A sentence, and\nWhere a line begins."""\nx = "Of it"  # one thing: as before\n',
    "src/b/TRIED.md": "`b/gone.cc`\n",
    "docs/sentences.md": "# Of a heading\n\nWhat is it?\n\n> Of a quotation.\n\n| Of | a table |\n\n"
                         "    Of code.\n\nA line\nOf a name goes on.\n\n- A thing: of the step.\n",
}

# File, text, and a piece of the expected line.
VIOLATIONS = [
    ("README.md", "line\n" * 161, "README.md: 161 lines, at most 160"),
    ("src/b/README.md", "line\n" * 121, "src/b/README.md: 121 lines, at most 120"),
    ("src/b/README.md", "`b/gone.cc`\n", "src/b/README.md:1: names b/gone.cc, which is not there"),
    ("src/b/c.cc", "/// Of the step:\nint x;\n", "src/b/c.cc:1: a sentence opens with 'Of the step:'"),
    ("src/b/c.cc", "// A thing that\n// is. As such, it\n// is.\n", "src/b/c.cc:1: a sentence opens with 'As such, it is.'"),
    ("src/b/c.cc", "int x;  // Who reads it waits.\n", "src/b/c.cc:1: a sentence opens with 'Who reads"),
    ("python/d.py", '"""A thing.\n\n    It is. Where it\n    lies, it is."""\n', "python/d.py:3: a sentence opens with 'Where it"),
    ("python/d.py", "x = 1 " + " # The same thing\n", "python/d.py:1: a sentence opens with 'The same"),
    ("docs/a.md", "# A part of it\n\nIt is. As\nsuch, it is.\n", "docs/a.md:3: a sentence opens with 'As such, it is.'"),
    ("docs/a.md", "# A part of it\n\n- It is.\n- **Where it** is\n  read.\n", "docs/a.md:4: a sentence opens with 'Where it"),
    ("docs/learn/deep.md", "It is (so). Nor is it.\n", "docs/learn/deep.md:1: a sentence opens with 'Nor is it.'"),
    ("docs/learn/deep.md", "**It is.** Of it.\n", "docs/learn/deep.md:1: a sentence opens with 'Of it.'"),
    ("README.md", LONG + "\n", "README.md:1: 150 columns, at most 120"),
    ("docs/a.md", "# A part of it\n" + LONG + "\n", "docs/a.md:2: 150 columns"),
    ("docs/a.md", f"# A part of it\n{LONG}[a](../README.md)\n", "docs/a.md:2: 167 columns"),
    ("src/b/README.md", "| [gone](../../docs/a.md#nothing) |\n", "link to ../../docs/a.md#nothing, which is not there"),
    ("docs/learn/deep.md", "[gone](#nothing)\n", "docs/learn/deep.md:1: link to #nothing"),
    ("src/b/README.md", "[gone](nothing.md)\n", "src/b/README.md:1: link to nothing.md, which is not there"),
]


def run(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return subprocess.run([sys.executable, CHECKER, folder], capture_output=True, text=True)


clean = run(CLEAN)
assert clean.returncode == 0 and not clean.stdout, clean.stdout + clean.stderr
for name, text, expected in VIOLATIONS:
    result = run({**CLEAN, name: text})
    assert result.returncode == 1, f"not found: {expected}"
    assert expected in result.stdout, f"expected {expected!r}, got:\n{result.stdout}{result.stderr}"
    assert len(result.stdout.splitlines()) == 1, result.stdout
