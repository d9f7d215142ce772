# SPDX-License-Identifier: Apache-2.0
"""Which rooms of the page a lesson leads to. A paragraph of the lesson says it:

**On the page:** room `#tiles?window=255,0` shows the band of a window."""
import pathlib
import re

PARAGRAPH = re.compile(r"^\*\*On the page:\*\* .*\n(?:\S.*\n)*", re.MULTILINE)
ROOM = re.compile(r"`#([\w-]+(?:\?[^`]*)?)`")


def rooms_of(text: str) -> list:
    """The rooms that a lesson names, such as "tiles?window=255,0", in order."""
    return [room for paragraph in PARAGRAPH.findall(text) for room in ROOM.findall(paragraph)]


def rooms_of_page(folder: pathlib.Path) -> dict:
    """Name of each room in web/page -> the names of its values."""
    rooms = {}
    for file in sorted(folder.glob("*.js")):
        text = file.read_text(encoding="utf-8")
        name = re.search(r"^  id: '([\w-]+)'", text, re.MULTILINE)
        if name:
            values = re.search(r"^  defaults: \{(.*)\}", text, re.MULTILINE)
            rooms[name[1]] = re.findall(r"(\w+): ", values[1]) if values else []
    return rooms


def problems_of(lessons: dict, folder: pathlib.Path) -> list:
    """Lists what is wrong with the rooms of the lessons. `lessons`: name of a page -> its text."""
    known, named, problems = rooms_of_page(folder), {"learn"}, []
    for page, text in lessons.items():
        for room in rooms_of(text):
            name, _, query = room.partition("?")
            named.add(name)
            if name not in known:
                problems.append(f"{page}: the page has no room #{name}, expected one of {', '.join(sorted(known))}")
                continue
            for value in filter(None, query.split("&")):
                if value.partition("=")[0] not in known[name]:
                    problems.append(f"{page}: room #{name} has no value {value.partition('=')[0]}")
    problems += [f"no lesson leads to the room #{name} (**On the page:** ...)" for name in known if name not in named]
    return problems
