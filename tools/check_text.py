#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the form of comments and of Markdown pages (CONTRIBUTING.md, "How we write"):

- README.md has at most 160 lines, the README of a folder of src/ at most 120;
- no sentence of a comment, a docstring or a page opens with a word of OPENINGS, questions excepted. Headings, tables,
  quotations (lines with >) and code blocks of pages are not read;
- a line of a page in PAGES has at most 120 columns, except in code blocks, tables and lines that a link or a
  picture makes long;
- a link to a page or a heading of this project leads to one that exists;
- a source file that a page names in backticks with its folder (`host/config.h`) exists. Pages of history, TRIED.md and
  CHANGELOG.md, also name files of the past.

Usage: check_text.py [ROOT]. Prints one line per violation; exit status 1 if there are any.
"""
import fnmatch
import os
import pathlib
import re
import sys

# The most lines of pages of these patterns.
LINES = {"README.md": 160, "src/**/README.md": 120}
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
# Further pages whose links and sentences are checked.
LINKED = ["docs/**/*.md", "tests/**/*.md", "bench/**/*.md", "python/**/*.md"]
# Pages that exceed the limit of columns. This list should only shrink.
NOT_YET = []
LINK = re.compile(r"!?\[[^\]]*\]\([^)\s]*\)")
TARGET = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:\.\./)*[\w.*-]+/[\w./*-]+\.(?:cc|cpp|h|hpp|cu|cuh|py|sh))`")
HISTORY = ("TRIED.md", "CHANGELOG.md")
# Files of other projects that pages name, and names that stand for any file.
FOREIGN = ("test/xpu/*", "*X_test.cc", "*X_test.cu", "*/test_X.py")
# Words that no sentence opens with, and files whose comments are checked. A sentence of a page may be bold, or follow
# one that is bold or in brackets.
OPENINGS = re.compile(r"(?:^|(?<=[.:!?]) |(?<=[.:!?][*)]) |(?<=[.:!?]\*\*) )[*_]*"
                      r"((?:Of|What|Who|Whose|The same|Where|As|Nor|And) [^.?!]*[.?!]?)")
LIST_ITEM = re.compile(r"(?:[-*+]|\d+\.) +")
COMMENTED = re.compile(r"\.(?:cc|c|hpp|h|cu|cuh|py)$")
COMMENT = {".py": re.compile(r"^\s*(?:#|[rf]?\"\"\")\s?(.*)$|  # (.*)$"), "": re.compile(r"^\s*//[/!]?<?\s?(.*)$|  //[/!]?<? (.*)$")}
NOT_SOURCE = re.compile(r"\.|build|dist$|python-lib$|node_modules$")


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


def source_files(root):
    """Returns the paths of all files below root, each after a slash, without those of builds."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not NOT_SOURCE.match(f)]
        found += [f"/{pathlib.Path(folder, f).relative_to(root).as_posix()}" for f in files]
    return found


def missing_files(root, page, lines, files):
    if page.name in HISTORY:
        return
    for number, line in prose(lines, tables=True):
        for name in NAMED_FILE.findall(line):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in FOREIGN):
                continue
            end = "*/" + re.sub(r"^(\.\./)+", "", name)
            if not any(fnmatch.fnmatchcase(file, end) for file in files):
                yield f"{page.relative_to(root)}:{number}: names {name}, which is not there"


def comments(path, text):
    """Yields (line, text) of the comments of a source file, lines that follow each other joined."""
    pattern = COMMENT[path.suffix if path.suffix == ".py" else ""]
    begin, words, in_docstring = 0, [], False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = pattern.search(line)
        if in_docstring:
            said = line.strip().removesuffix('"""')
        else:
            said = (found[1] or found[2] or "").removesuffix('"""') if found else None
        quotes = line.count('"""') if path.suffix == ".py" else 0
        in_docstring = in_docstring != (quotes % 2 == 1) if said is not None or in_docstring else False
        whole_line = said is not None and (in_docstring or quotes or found is None or found[1] is not None)
        if words and (not said or not whole_line):
            yield begin, " ".join(words)
            words = []
        if said:
            begin = begin if words else number
            words.append(said)
        if words and not whole_line:
            yield begin, " ".join(words)
            words = []


def paragraphs(lines):
    """Yields (line, text) of the paragraphs and list items of a page."""
    begin, words = 0, []
    for number, line in [*prose(lines), (len(lines) + 1, "")]:
        text = line.strip()
        item = LIST_ITEM.match(text)
        ends = not text or text[0] in "#>!<"
        if words and (ends or item):
            yield begin, " ".join(words)
            words = []
        if ends:
            continue
        begin = begin if words else number
        words.append(text[item.end():] if item else text)


def bad_openings(name, texts):
    for number, text in texts:
        for sentence in OPENINGS.findall(text):
            if not sentence.endswith("?"):
                yield f"{name}:{number}: a sentence opens with {sentence[:40]!r}"


def opened_badly(root, files):
    for name in files:
        path = pathlib.Path(root, name[1:])
        if not COMMENTED.search(name) or "/licenses/" in name or "/results/" in name:
            continue
        yield from bad_openings(name[1:], comments(path, path.read_text()))


def check(root):
    found = []
    for pattern, most in LINES.items():
        for page in sorted(root.glob(pattern)):
            if (count := len(page.read_text().splitlines())) > most:
                found.append(f"{page.relative_to(root)}: {count} lines, at most {most}")
    files = source_files(root)
    found += opened_badly(root, files)
    measured = {page for pattern in PAGES for page in root.glob(pattern)}
    for page in sorted(measured | {page for pattern in LINKED for page in root.glob(pattern)}):
        name = page.relative_to(root).as_posix()
        lines = page.read_text().splitlines()
        found += broken_links(root, page, lines)
        found += missing_files(root, page, lines, files)
        found += bad_openings(name, paragraphs(lines))
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
