#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""web/rooms.py reads the rooms that lessons name, and finds those that the page does not have."""
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(ROOT / "web"))
import rooms  # noqa: E402

PAGE = {"walk.js": "export const walk = {\n  id: 'walk',\n  defaults: {row: '100', step: '6'},\n};\n",
        "learn.js": "export const learn = {\n  id: 'learn',\n  defaults: {lesson: ''},\n};\n",
        "dom.js": "export const element = {id: 'x'};\n"}
CLEAN = "# 6\n\n**On the page:** room `#walk` goes on, and\n`#walk?row=3&step=2` too.\n\nNo room: `#other`.\n"
# Lessons, and a piece of what is found.
WRONG = [
    ({"06.md": "**On the page:** room `#wlak`.\n"}, "06.md: the page has no room #wlak, expected one of learn, walk"),
    ({"06.md": "**On the page:** room `#walk?rows=3`.\n"}, "06.md: room #walk has no value rows"),
    ({"06.md": "room `#walk`, but in no paragraph for it\n"}, "no lesson leads to the room #walk"),
]


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file, text in PAGE.items():
            (folder / file).write_text(text)
        assert rooms.rooms_of_page(folder) == {"walk": ["row", "step"], "learn": ["lesson"]}
        assert rooms.rooms_of(CLEAN) == ["walk", "walk?row=3&step=2"]
        assert rooms.problems_of({"06.md": CLEAN}, folder) == []
        for lessons, expected in WRONG:
            found = rooms.problems_of(lessons, folder)
            assert any(expected in one for one in found), (lessons, found)
    lessons = {page.name: page.read_text() for page in (ROOT / "docs/learn").glob("[0-9]*.md")}
    found = rooms.problems_of(lessons, ROOT / "web/page")
    assert found == [], found
    print(f"{sum(len(rooms.rooms_of(text)) for text in lessons.values())} rooms named by {len(lessons)} lessons")


main()
