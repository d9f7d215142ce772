#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every command of docs/learn and compares its output with the pages. It also redraws and compares the pictures, and
checks that each lesson has its parts and that the code it names exists.

In a ```console block, text after "$ " is a command, which bash runs in the root of the checkout. The lines below it are its
output. A line "..." replaces output that depends on the machine (times, the kernel that was chosen). Pictures are the
files that commands with --picture write to docs/learn.

Usage: learn_pages.py COMMAND [ROOT] [--update]     COMMAND is the program tessera; --update puts new output and new
pictures into the pages (output with "..." is left to you). Exit status 1 if something differs.
"""
import argparse
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^- `([\w./]+)`: (.*(?:\n  .*)*)", re.MULTILINE)
PARTS = ("**Before you read on.**", "## Try it", "## Exercise", "## In the code")
HOME = "build/tessera"  # the name of the program in the pages


class Folder:
    """A folder that looks like the checkout, in which commands may write."""

    def __init__(self, root, command):
        self.temporary = tempfile.TemporaryDirectory(prefix="tessera_learn_pages_")
        self.path = pathlib.Path(self.temporary.name)
        for name in ("examples", "bench", "src", "toolkit", "tools"):
            (self.path / name).symlink_to(root / name)
        (self.path / "docs/learn").mkdir(parents=True)
        (self.path / "build").mkdir()
        (self.path / HOME).symlink_to(command)
        self.environment = dict(os.environ, XDG_STATE_HOME=str(self.path / "state"), LC_ALL="C.UTF-8", COLUMNS="80")

    def run(self, command):
        done = subprocess.run(["bash", "-c", "set -o pipefail; " + command], cwd=self.path, env=self.environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
        return done.stdout.decode().rstrip("\n"), done.returncode


def sessions(block):
    """Returns (command, output) of a block."""
    result = []
    for line in block.rstrip("\n").split("\n"):
        if line.startswith("$ "):
            result.append([line[2:], []])
        elif not result:
            raise ValueError(f"a console block begins with a command, not with: {line}")
        else:
            result[-1][1].append(line)
    return [(command, "\n".join(output)) for command, output in result]


def agrees(shown, printed):
    pieces = [re.escape(piece) for piece in ("\n" + shown + "\n").split("\n...\n")]
    return re.fullmatch("\n(?:.*\n)*".join(pieces), "\n" + printed + "\n") is not None


def check_commands(page, text, folder, update):
    problems = []

    def again(match):
        written = []
        for command, shown in sessions(match[1]):
            printed, status = folder.run(command)
            # Deliberately wrong answers exit with 1, and a pipe into grep or sed has the status of the program.
            if status not in (0, 1):
                problems.append(f"{page.name}: exit status {status} of: {command}\n{printed}")
            elif not agrees(shown, printed):
                if update and "\n...\n" not in "\n" + shown + "\n":
                    shown = printed
                else:
                    lines = difflib.unified_diff(shown.split("\n"), printed.split("\n"), "the page", "now", lineterm="", n=1)
                    problems.append(f"{page.name}: another output of: {command}\n" + "\n".join(lines))
            written.append(f"$ {command}" + (f"\n{shown}" if shown else ""))
        return "```console\n" + "\n".join(written) + "\n```"

    return BLOCK.sub(again, text), problems


def check_code(page, text, root):
    named = CODE.findall(text[text.find("## In the code"):])
    if not named:
        yield f"{page.name}: names no code"
    for path, rest in named:
        file = root / path
        if not file.is_file():
            yield f"{page.name}: there is no file {path}"
            continue
        functions = re.findall(r"`(\w+)`", rest.split(":")[0])
        if not functions:
            yield f"{page.name}: names no function of {path}"
        for function in functions:
            if not re.search(rf"\b{function}\b\s*[<({{]|struct {function}\b|\b{function}\[\]", file.read_text()):
                yield f"{page.name}: {path} has no {function}"


def check_lesson(lesson, page, text, root):
    title = text.split("\n", 1)[0]
    expected = f"# {lesson['lesson']}. {lesson['title']}"
    if title != expected:
        yield f"{page.name}: the title is \"{title}\", expected \"{expected}\""
    for part in PARTS:
        if part not in text:
            yield f"{page.name}: no {part}"
    for needed in (f"({lesson['slug']}.svg)", f"learn {lesson['lesson']} --picture docs/learn/{lesson['slug']}.svg",
                   f"learn {lesson['lesson']} --show", f"learn {lesson['lesson']} --answer"):
        if needed not in text:
            yield f"{page.name}: no {needed}"
    answers = [shown for block in BLOCK.findall(text) for command, shown in sessions(block) if " --answer " in command]
    if not answers or not answers[-1].startswith("Right: "):
        yield f"{page.name}: the last answer that it shows is not right"
    yield from check_code(page, text, root)


def check_links(page, text, root):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        if not (page.parent / target).exists():
            yield f"{page.relative_to(root)}: leads to nothing: {target}"


def check_pictures(folder, pages, update):
    made = {path.name: path.read_bytes() for path in (folder.path / "docs/learn").iterdir()}
    kept = {path.name: path.read_bytes() for path in pages.glob("*.svg")}
    for name in sorted(made.keys() | kept.keys()):
        if made.get(name) == kept.get(name):
            continue
        if update and name in made:
            (pages / name).write_bytes(made[name])
        elif name not in made:
            yield f"{name}: no command of a page makes it"
        else:
            yield f"{name}: the command makes another picture; tools/learn_pages.py --update replaces it"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", type=pathlib.Path)
    parser.add_argument("root", type=pathlib.Path, nargs="?", default=pathlib.Path(__file__).parent.parent)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    root = options.root.resolve()
    pages = root / "docs/learn"
    folder = Folder(root, options.command.resolve())
    listed, _ = folder.run(f"{HOME} learn --json")
    lessons = {lesson["slug"]: lesson for lesson in json.loads(listed)["lessons"]}
    problems = [f"{slug}.md is missing" for slug in lessons if not (pages / f"{slug}.md").is_file()]
    count = 0
    for page in sorted(pages.glob("*.md")):
        text = page.read_text()
        new, found = check_commands(page, text, folder, options.update)
        if options.update and new != text:
            page.write_text(new)
        problems += found
        problems += check_links(page, new, root)
        if page.stem in lessons:
            problems += check_lesson(lessons[page.stem], page, new, root)
        count += sum(len(sessions(block)) for block in BLOCK.findall(new))
    problems += check_pictures(folder, pages, options.update)
    for problem in problems:
        print(problem)
    print(f"{len(lessons)} lessons, {count} commands, {len(problems)} problems")
    return 1 if problems or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
