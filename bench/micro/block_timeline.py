#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the table of block_timeline: each thread block of decode_block()'s one launch as a line of phases.

    python3 bench/micro/block_timeline.py TABLE.csv PICTURE.svg "TITLE" "SUBTITLE"

Grey is the time in which the computing warps of a thread block wait: for other thread blocks, or for the first bytes.
"""
import csv
import html
import statistics
import sys

WAIT = "#d0d7de"
PHASES = [  # the mark at the end of a phase, what it is, its colour
    ("launch before has ended", "start", WAIT), ("norm of x", "RMS norm of x", "#0f766e"),
    ("Q, K, V written", "weights of Q, K, V", "#1d4ed8"), ("Q of the split", "wait for Q; rotary embedding", WAIT),
    ("splits written", "attention on a split of the keys", "#c2410c"),
    ("partial results read", "wait for all splits of a head", WAIT), ("O written", "sum of the splits", "#7e22ce"),
    ("all of O read", "wait for O of all heads", WAIT), ("result written", "weights of the output", "#1d4ed8")]
LEFT, TOP, WIDTH, LINE, FONT = 60, 96, 880, 3, "system-ui, sans-serif"


def text(x, y, words, size=13, anchor="start", weight=400, color="#1b1f24"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="{color}">{html.escape(words)}</text>')


def main():
    table, picture, title, subtitle = sys.argv[1:]
    with open(table) as file:
        rows = [{name: float(value) / 1000 for name, value in row.items() if value} for row in csv.DictReader(file)]
    end = max(row["result written"] for row in rows)
    step = 5 if end > 12 else 2
    scale = WIDTH / end
    bottom = TOP + LINE * len(rows)
    out = [text(LEFT, 28, title, 18, weight=700), text(LEFT, 50, subtitle, 13, color="#57606a")]
    medians, begin = [], 0.0
    for mark, name, color in PHASES:  # names above the phases
        at = statistics.median(row[mark] for row in rows if mark in row)
        medians.append((begin, at, name, color))
        begin = at
    shown = [m for m in medians if m[3] != WAIT]
    for i, (first, last, name, color) in enumerate(shown):
        x, y = LEFT + (first + last) / 2 * scale, 74 if i % 2 == 0 else 90
        out.append(text(min(max(x, LEFT + 40), LEFT + WIDTH - 60), y, name, 12, "middle", 600, color))
    for number, row in enumerate(rows):
        before = row["start"]
        for mark, _, color in PHASES:
            if mark not in row:
                continue
            if mark == "splits written" and "Q of the split" not in row:  # a thread block without a split
                color = WAIT
            out.append(f'<rect x="{LEFT + before * scale:.1f}" y="{TOP + LINE * number}" '
                       f'width="{max(row[mark] - before, 0) * scale:.1f}" height="{LINE - 0.5}" fill="{color}"/>')
            before = row[mark]
    for us in range(0, int(end) + 1, step):
        x = LEFT + us * scale
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="#57606a"/>')
        out.append(text(x, bottom + 20, str(us), 12, "middle", color="#57606a"))
    out.append(text(LEFT + WIDTH / 2, bottom + 40, "microseconds from the first instruction", 12, "middle", color="#57606a"))
    for number in (0, len(rows) - 1):
        out.append(text(LEFT - 8, TOP + LINE * number + 6, str(number), 12, "end", color="#57606a"))
    out.append(f'<text transform="translate(16 {(TOP + bottom) / 2:.0f}) rotate(-90)" font-size="12" text-anchor="middle" '
               'fill="#57606a">thread block</text>')
    out.append(f'<rect x="{LEFT}" y="{bottom + 54}" width="14" height="10" fill="{WAIT}"/>')
    out.append(text(LEFT + 20, bottom + 63, "waits: for the start, for Q of its heads, for all splits of a head, for O of "
                    "all heads", 12, color="#57606a"))
    with open(picture, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 30} {bottom + 76}" '
                   f'font-family="{FONT}"><title>{html.escape(title)}</title><rect width="100%" height="100%" fill="#fff"/>\n'
                   + "\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    main()
