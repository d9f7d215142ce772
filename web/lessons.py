# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/learn as parts of HTML for web/page/learn.js: the question, what unfolds after it, and the places in
the code. Exercises and the questions of recaps and exam are left out, since the page asks them through the core, as
`tessera learn` does."""
import base64
import io
import pathlib
import re
import zipfile

import markdown

from rooms import PARAGRAPH, rooms_of

OTHERS = ("exam", "faq", "recap", "kernel")  # pages of the path that are no lessons
QUESTIONS = re.compile(r"After part (\d)|(\d+)\. ")  # headings of recap.md and exam.md
KERNEL = "docs/learn/your_kernel"
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs/learn"


def html(text: str) -> str:
    made = markdown.markdown(text, extensions=["fenced_code", "tables", "md_in_html"], output_format="html")
    made = re.sub(r'src="([\w-]+\.svg)"', lambda match: f'src="data:image/svg+xml;base64,{picture(match[1])}"', made)
    made = re.sub(r'<a href="([^"]*)">(.*?)</a>', link, made, flags=re.DOTALL)
    made = made.replace("<pre>", '<pre tabindex="0">').replace(
        "<p><img", '<p class="scroll" tabindex="0" role="region" aria-label="Picture"><img').replace(
        "<table>", '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>').replace("</table>", "</table></div>")
    return made


def picture(name: str) -> str:
    return base64.b64encode((FOLDER / name).read_bytes()).decode()


def link(match: re.Match) -> str:
    """A link inside of the path becomes one inside of the page; the page has no other documents to lead to."""
    page = re.match(r"(?:\.\./)?(?:(\d\d)-[\w-]+|(README|exam|faq|recap|your_kernel/README))\.md", match[1])
    if not page:
        return match[2]
    name = {"README": "", "your_kernel/README": "?lesson=kernel"}
    where = name.get(page[2], f"?lesson={page[2] or int(page[1] or 0)}")
    return f'<a href="#learn{where}">{match[2]}</a>'


def sections(text: str) -> tuple:
    """The text before the first heading of the second level, and the sections: heading -> text."""
    first, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    return first, {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in rest}


def lesson(path: pathlib.Path) -> dict:
    text = re.sub(r"<!--.*?-->\n?", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^Next: .*\n?", "", text, flags=re.MULTILINE)
    rooms = rooms_of(text)
    first, others = sections(PARAGRAPH.sub("", text))  # the page has links in place of these paragraphs
    opening = re.search(r"^\*\*Before you read on\.\*\* (.*?)\n\n", first, flags=re.MULTILINE | re.DOTALL)
    if not opening:
        raise SystemExit(f"{path}: expected a paragraph that begins with **Before you read on.**")
    before = re.sub(r"\A# .*\n+Part .*\n+", "", first[:opening.start()])  # the title and the way back
    code = others.pop("In the code", "")
    others.pop("Exercises", None)
    body = first[opening.end():] + "".join(f"## {heading}\n{part}" for heading, part in others.items())
    return {"opening": html(f"{before}\n\n{opening[1]}"), "body": html(body), "code": html(code), "rooms": rooms}


def other(name: str) -> dict:
    """A page that is no lesson. The core asks the questions of recap and exam. Kept are their model answers, which have
    links and bold words here, and sections without a question."""
    file = FOLDER / ("your_kernel/README.md" if name == "kernel" else f"{name}.md")
    text = re.sub(r"<!--.*?-->\n?", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\A# .*\n", "", text.replace("<details>", '<details markdown="1">'))
    made = {"opening": "", "body": "", "code": "", "rooms": []}
    if name in ("recap", "exam"):
        _, others = sections(text)
        kept = [f"## {heading}\n{part}" for heading, part in others.items() if not QUESTIONS.match(heading)]
        return made | {"body": html("".join(kept)), "answers": answers(others)}
    if name == "kernel":
        files = {path.name: path.read_text(encoding="utf-8") for path in sorted((FOLDER / "your_kernel").iterdir())
                 if path.suffix in (".py", ".hpp", ".cc")}
        return made | {"body": html(text), "files": files, "zip": folder_of(files)}
    return made | {"body": html(text)}


def answers(parts: dict) -> dict:
    """Question of a recap or the exam, as the core names it ("recap 1a", "exam 7") -> its model answer."""
    found = {}
    for heading, part in parts.items():
        named = QUESTIONS.match(heading)
        if not named:
            continue
        for letter, answer in re.findall(r"(?:\*\*(\w)\.\*\*.*?)?<summary>Answer</summary>\n(.*?)</details>", part, re.DOTALL):
            found[f"recap {named[1]}{letter}" if named[1] else f"exam {named[2]}"] = html(answer)
    return found


def folder_of(files: dict) -> str:
    """The files as a zip in base64, the same bytes every time."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in files.items():
            made.writestr(zipfile.ZipInfo(f"{KERNEL}/{name}"), text, zipfile.ZIP_DEFLATED)
    return base64.b64encode(packed.getvalue()).decode()


def lessons() -> dict:
    """Number of the lesson, or name of another page -> its parts."""
    made = {str(int(path.name[:2])): lesson(path) for path in sorted(FOLDER.glob("[0-9][0-9]-*.md"))}
    return made | {name: other(name) for name in OTHERS}
