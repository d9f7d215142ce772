#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every command of docs/learn and compares its output with the pages. It also runs the Python that a page prints the
output of, checks the numbers of the prose (learn_numbers.py), redraws and compares the pictures, and checks that each lesson has its parts and that the code it
names exists. In README.md and docs it checks the numbers that have a mark.

In a ```console block, text after "$ " is a command, which bash runs in a copy of what a learner's checkout has. The
lines below it are its output. A line "..." replaces output that depends on the machine (times, the chosen kernel).
A ```python block that a ```text block follows is a program and its output. It needs NumPy, without which it is skipped.

Usage: learn_pages.py COMMAND [ROOT] [--update]     COMMAND is the program tessera; --update puts new output and new
pictures into the pages (output with "..." is left to you). Exit status 1 if something differs.
"""
import argparse
import difflib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import learn_numbers

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^- `([\w./]+)`: (.*(?:\n  .*)*)", re.MULTILINE)
PROGRAM = re.compile(r"^```python\n((?:(?!```).*\n)*)```\n(?:(?!```).*\n)*```text\n((?:(?!```).*\n)*)```$", re.MULTILINE)
PARTS = ("**Before you read on.**", "## Try it", "## Exercises", "## In the code")
HOME = "build/tessera"  # the name of the program in the pages


class Folder:
    """A copy of what a learner has in the checkout, in which commands may write."""

    def __init__(self, root, command):
        self.temporary = tempfile.TemporaryDirectory(prefix="tessera_learn_pages_")
        self.path = pathlib.Path(self.temporary.name)
        for name in ("examples", "bench", "src", "toolkit", "tools"):
            (self.path / name).symlink_to(root / name)
        shutil.copytree(root / "docs", self.path / "docs")
        (self.path / "build").mkdir()
        (self.path / HOME).symlink_to(command)
        self.environment = dict(os.environ, XDG_STATE_HOME=str(self.path / "state"), LC_ALL="C.UTF-8", COLUMNS="80")
        self.printed = {}

    def run(self, command):
        done = subprocess.run(["bash", "-c", "set -o pipefail; " + command], cwd=self.path, env=self.environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
        return done.stdout.decode().rstrip("\n"), done.returncode

    def output_of(self, command):
        """Returns the output of a command of a mark; each command runs once."""
        if command not in self.printed:
            self.printed[command] = self.run(command)[0]
        return self.printed[command]


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
                    lines = difflib.unified_diff(shown.split("\n"), printed.split("\n"), "the page", "now", lineterm="",
                                                 n=1)
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
    for needed in (f"({lesson['slug']}.svg)", f"learn {lesson['lesson']} --show"):
        if needed not in text:
            yield f"{page.name}: no {needed}"
    shown = [session for block in BLOCK.findall(text) for session in sessions(block)]
    for exercise in lesson["exercises"]:
        end = "--solution" if exercise["kind"] == "explain" else "--answer"
        answers = [output for command, output in shown if f" learn {exercise['exercise']} {end}" in command]
        if not answers or (end == "--answer" and not answers[-1].startswith("Right: ")):
            yield f"{page.name}: the last learn {exercise['exercise']} {end} that it shows is not right, or there is none"
    yield from check_code(page, text, root)


def check_programs(page, text):
    """Runs the Python of a page with the interpreter of this check. Returns problems, and the number of skipped programs."""
    problems, skipped = [], 0
    for program, shown in PROGRAM.findall(text):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        if "No module named 'numpy'" in done.stderr:
            skipped += 1
        elif done.returncode != 0 or done.stdout != shown:
            problems.append(f"{page.name}: another output of its Python:\n{done.stdout}{done.stderr}")
    return problems, skipped


def check_links(page, text, root):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        if not (page.parent / target).exists():
            yield f"{page.relative_to(root)}: leads to nothing: {target}"


def plain(text):
    """Returns the text without marks, links to lessons, bold and line ends."""
    text = re.sub(r"<!--.*?-->|\s*\(\[lesson\s+\d+\]\([^)]*\)\)|\*\*", "", text, flags=re.DOTALL).replace("²", "^2")
    return learn_numbers.joined(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))


def check_quizzes(folder, pages):
    """The recaps and the exam ask what their pages ask, with the same answers."""
    for name in ("recap 1", "recap 2", "recap 3", "recap 4", "recap 5", "exam"):
        page = pages / f"{name.split()[0]}.md"
        text = plain(page.read_text())
        for question in json.loads(folder.run(f"{HOME} learn {name} --json")[0])["exercises"]:
            expected = [question["task"]]
            if question["kind"] == "explain":
                solution, _ = folder.run(f"{HOME} learn {question['exercise']} --solution --json")
                expected.append(json.loads(solution)["solution"])
            for words in expected:
                if words not in text:
                    yield f"{page.name}: does not have this of {question['exercise']}: {words}"


def marked_numbers(pages):
    """Returns a function from the name of a page to the numbers of its marks."""
    def numbers(name):
        page = pages / name
        text = page.read_text() if page.is_file() else ""
        return learn_numbers.numbers_of(" ".join(match[1] for match in learn_numbers.MARK.finditer(text)))
    return numbers


def check_numbers(page, text, folder, root, strict):
    shown = [session for block in BLOCK.findall(text) for session in sessions(block)]
    outputs, commands = [output for _, output in shown], [command for command, _ in shown]
    name = str(page.relative_to(root))
    pages = marked_numbers(root / "docs/learn")
    return learn_numbers.Page(name, text, outputs, commands, folder.output_of, pages).check(strict)


def check_pictures(folder, lessons, pages, update):
    """Redraws the pictures over those of the checkout, as somebody does who changed one."""
    for lesson in lessons.values():
        name = f"{lesson['slug']}.svg"
        printed, status = folder.run(f"{HOME} learn {lesson['lesson']} --picture docs/learn/{name}")
        if status != 0:
            yield f"{name}: exit status {status} of --picture\n{printed}"
            continue
        made, kept = folder.path / "docs/learn" / name, pages / name
        if kept.is_file() and made.read_bytes() == kept.read_bytes():
            continue
        if update:
            kept.write_bytes(made.read_bytes())
        else:
            yield f"{name}: the command draws another picture; tools/learn_pages.py --update replaces it"
    for picture in pages.glob("*.svg"):
        if picture.stem not in lessons:
            yield f"{picture.name}: no lesson has it"


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
    count = skipped = 0
    for page in sorted(pages.glob("*.md")):
        text = page.read_text()
        new, found = check_commands(page, text, folder, options.update)
        if options.update and new != text:
            page.write_text(new)
        problems += found
        problems += check_numbers(page, new, folder, root, strict=True)
        found, without_numpy = check_programs(page, new)
        problems += found
        skipped += without_numpy
        problems += check_links(page, new, root)
        if page.stem in lessons:
            problems += check_lesson(lessons[page.stem], page, new, root)
        count += sum(len(sessions(block)) for block in BLOCK.findall(new))
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        problems += check_numbers(page, page.read_text(), folder, root, strict=False)
    problems += check_quizzes(folder, pages)
    problems += check_pictures(folder, lessons, pages, options.update)
    for problem in problems:
        print(problem)
    note = f", {skipped} programs skipped (no NumPy)" if skipped else ""
    print(f"{len(lessons)} lessons, {count} commands, {len(problems)} problems{note}")
    return 1 if problems or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
