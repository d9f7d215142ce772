#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the colours of the plots (toolkit/plot/style.cc) are legible and distinct, also with colour blindness.

Each theme's colours are tested unchanged and as seen with protanopia, deuteranopia and tritanopia (Machado, Oliveira
and Fernandes 2009, severity 1). Any two must differ by 12 in CIELAB (1976), and each must have a contrast of 4.5 to the
surface (WCAG 2).
"""
import itertools
import math
import pathlib
import re
import sys

LEAST_DIFFERENCE = 12
LEAST_CONTRAST = 4.5
SIGHTS = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour):
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour):
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear(colour)))


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def lab(colour, sight):
    r, g, b = (min(1, max(0, sum(m * p for m, p in zip(row, linear(colour))))) for row in SIGHTS[sight])
    xyz = ((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047, 0.2126 * r + 0.7152 * g + 0.0722 * b,
           (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883)
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def problems(surface, colours):
    for colour in colours:
        if contrast(colour, surface) < LEAST_CONTRAST:
            yield f"{colour} on {surface}: contrast {contrast(colour, surface):.2f}, expected {LEAST_CONTRAST}"
    for sight in SIGHTS:
        for a, b in itertools.combinations(colours, 2):
            difference = math.dist(lab(a, sight), lab(b, sight))
            if difference < LEAST_DIFFERENCE:
                yield f"{a} and {b}, {sight}: differ by {difference:.1f}, expected {LEAST_DIFFERENCE}"


def themes(text):
    """Yields (surface, colours of the series) of every Palette in the source."""
    for body in re.findall(r"constexpr Palette \w+\{(.*?)\}\};", text, re.S):
        colours = re.findall(r"#[0-9a-f]{6}", body)
        yield colours[0], colours[4:]


def main():
    source = pathlib.Path(__file__).parents[1] / "toolkit/plot/style.cc"
    found = list(themes(source.read_text()))
    if len(found) != 2 or any(len(colours) < 7 for _, colours in found):
        sys.exit(f"{source}: expected two palettes of seven colours, got {found}")
    wrong = [line for surface, colours in found for line in problems(surface, colours)]
    print("\n".join(wrong) or f"{len(found)} palettes: every two colours can be told apart")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
