#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the form of Markdown pages (CONTRIBUTING.md, "How we write"):

- README.md has at most 160 lines;
- a line of a page in PAGES has at most 120 columns, except in code blocks, tables and lines that a link or a
  picture makes long;
- a link to a page or a heading of this project leads to one that exists.

Usage: check_text.py [ROOT]. Prints one line per violation; exit status 1 if there are any.
"""
import pathlib
import re
import sys

README_LINES = 160
COLUMNS = 120
# Patterns of pages whose lines are measured.
PAGES = [
    "*.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "src/**/*.md",
    "toolkit/**/*.md",
    "examples/**/*.md",
]
# Further pages whose links are checked.
LINKED = ["docs/**/*.md"]
# Pages that exceed the limit of columns. This list should only shrink.
NOT_YET = []
LINK = re.compile(r"!?\[[^\]]*\]\([^)\s]*\)")
TARGET = re.compile(r"\]\(([^)\s]+)\)")


def prose(lines, tables=False):
    """Returns (number, line) of the lines outside code blocks and, unless requested, tables."""
    fenced = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if fenced or line.startswith("    ") or (line.startswith("|") and not tables):
            continue
        yield number, line


def too_wide(line):
    """Whether the line is too long and can be broken. A single link or picture cannot."""
    if len(line) <= COLUMNS:
        return False
    rest = LINK.sub("", line).strip(" -*.,;:()")
    return bool(rest)


def anchors(page):
    """Returns the anchors of the page's headings, as GitHub makes them."""
    found = set()
    for _, line in prose(page.read_text().splitlines()):
        if line.startswith("#"):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


def broken_links(root, page, lines):
    for number, line in prose(lines, tables=True):
        for target in TARGET.findall(line):
            if "://" in target or target.startswith("mailto:"):
                continue
            path, _, anchor = target.partition("#")
            other = page.parent / path if path else page
            there = other.exists() and (not anchor or other.suffix != ".md" or anchor in anchors(other))
            if not there:
                yield f"{page.relative_to(root)}:{number}: link to {target}, which is not there"


def check(root):
    found = []
    readme = root / "README.md"
    if readme.exists() and (count := len(readme.read_text().splitlines())) > README_LINES:
        found.append(f"README.md: {count} lines, at most {README_LINES}")
    measured = {page for pattern in PAGES for page in root.glob(pattern)}
    for page in sorted(measured | {page for pattern in LINKED for page in root.glob(pattern)}):
        name = page.relative_to(root).as_posix()
        lines = page.read_text().splitlines()
        found += broken_links(root, page, lines)
        if name in NOT_YET or page not in measured:
            continue
        found += [f"{name}:{number}: {len(line)} columns, at most {COLUMNS}" for number, line in prose(lines)
                  if too_wide(line)]
    return found


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    found = check(root)
    for violation in found:
        print(violation)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
