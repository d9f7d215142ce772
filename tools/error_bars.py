#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the table of error bars of src/model/error_bars.hpp from rows that no constant was fitted on.

    tessera roofline --accuracy --json --records bench/results/h200/now/fitted_packed.jsonl > packed.json
    tessera roofline --accuracy --json | tools/error_bars.py packed.json > src/model/error_bars.hpp
    tessera roofline --accuracy --json | tools/error_bars.py packed.json --check  # rows inside of bars of other shapes

Constants of tessera's kernels and two of FlashAttention-3 (by its rows of 16/16 heads) were fitted to the packed
documents of that file, so its other rows of FlashAttention's kernels count. FlashAttention-3 has rows of packed documents
alone: they make no other kernel's bar.
Calls of 2 to 16 queries on a cache are kinds of their own here, and so are packed documents of a mean length under 512
(with all short calls of packed documents) and from 2,048 on: src/model/error_bar.cc has the same kinds (bar_cell_of).

A bar is the error that nine of ten rows of an H200 stay within, with the correction of a small sample: of n rows the
ceil(0.9 (n + 1))-th smallest. A cell of fewer than 20 rows takes the larger of its own bar and that of all libraries.
"""
import collections
import hashlib
import json
import math
import re
import sys

LEAST = 20  # rows of a cell with a bar of its own
FLOOR = 0.08
SHORT_FLOP = 2e10
SHORT_DOCUMENTS, LONG_DOCUMENTS = 512, 2048  # mean keys of a sequence
FITTED_HEADS_OF_FA3 = 16
FAMILIES = {"fa2": "flash-attention", "fa3": "flash-attention"}


def visible_pairs(row):
    lengths = list(zip(row.get("lens_q") or [], row.get("lens_kv") or []))
    window = re.search(r"window (\S+),(\S+)", row["mask"])
    pairs = 0
    for q, k in lengths or [(row["len_q"], row["len_kv"])] * row["batch"]:
        if window:
            left, right = (math.inf if side == "unbounded" else int(side) for side in window.groups())
            pairs += q * min(k, left + 1 + (0 if "causal" in row["mask"] else right))
        elif row["mask"].startswith("causal"):
            pairs += q * k - q * (q - 1) / 2 if k >= q else k * (k + 1) / 2
        else:
            pairs += q * k
    return pairs


def flop(row):
    d, dv = row["head_dim"], row["head_dim_v"]
    return visible_pairs(row) * row["heads_q"] * (2 * (d + dv) if row["pass"] == "forward" else 2 * (3 * d + 2 * dv))


def kind_of(row):
    if row["kind"] == "decode" and row["len_q"] > 1:
        return "few queries"
    if row["kind"] != "ragged":
        return row["kind"]
    lengths = row["lens_kv"] or [row["len_kv"]]
    mean = sum(lengths) / len(lengths)
    if mean < SHORT_DOCUMENTS or flop(row) <= SHORT_FLOP:
        return "short documents"
    return "long documents" if mean >= LONG_DOCUMENTS else "ragged"


def cell_of(row):
    kind = kind_of(row)
    one_length = kind in ("decode", "few queries") or row["kind"] == "ragged"
    return (FAMILIES.get(row["by"], row["by"]), row["schedule"] or "fa3", row["pass"], kind,
            not one_length and flop(row) <= SHORT_FLOP)


def error_of(row):
    predicted, measured = row["predicted_ms"], row["ms"]
    return max(predicted / measured, measured / predicted) - 1


def bar_of(errors):
    ordered = sorted(errors)
    return max(FLOOR, ordered[min(len(ordered), math.ceil(0.9 * (len(ordered) + 1))) - 1])


def bars_of(rows):
    own, all_libraries = collections.defaultdict(list), collections.defaultdict(list)
    for row in rows:
        by, schedule, pass_, kind, short = cell_of(row)
        own[by, schedule, pass_, kind, short].append(error_of(row))
        if schedule in ("fa2", "fa3") and (by, schedule) != ("flash-attention", "fa3"):
            all_libraries[pass_, kind, short].append(error_of(row))
    bars = {}
    for (by, schedule, pass_, kind, short), errors in own.items():
        bar = bar_of(errors)
        if len(errors) < LEAST:
            bar = max(bar, bar_of(all_libraries.get((pass_, kind, short), errors)))
        bars[by, schedule, pass_, kind, short] = bar
    for key, errors in all_libraries.items():
        bars["", "", *key] = bar_of(errors)
    return bars


def bar_for(bars, cell):
    return bars.get(cell) or bars.get(("", "", *cell[2:])) or 1


def check(rows):
    """Bars from the shapes of one half, and the rows of the other half inside, both ways round."""
    halves = [[], []]
    for row in rows:
        halves[hashlib.sha256(f"{row['len_kv']},{row['heads_q']}".encode()).digest()[0] % 2].append(row)
    for fitted, held in (halves, halves[::-1]):
        bars = bars_of(fitted)
        inside = sum(error_of(row) <= bar_for(bars, cell_of(row)) for row in held)
        print(f"{len(fitted)} rows make the bars; {inside} of {len(held)} others are inside: {100 * inside / len(held):.1f} %")


def print_table(rows):
    print("// SPDX-License-Identifier: Apache-2.0\n//\n// Made by tools/error_bars.py from the rows of an H200 that no "
          "constant was fitted on; its text says how.\n#pragma once\n\n#include <string_view>\n\n"
          "namespace tessera::model {\n\n/// An empty library and schedule stand for all of fa2 and fa3.\n"
          "struct ErrorBar {\n    std::string_view by, schedule, pass, kind;\n    bool is_short;\n    double error;\n};\n\n"
          "inline constexpr ErrorBar kErrorBars[] = {")
    for (by, schedule, pass_, kind, short), bar in sorted(bars_of(rows).items()):
        print(f'    {{"{by}", "{schedule}", "{pass_}", "{kind}", {str(short).lower()}, {math.ceil(bar * 100) / 100:g}}},')
    print("};\n\n}  // namespace tessera::model")


def main():
    rows = [row for row in json.load(sys.stdin)["rows"] if row["held_out"] and row["device"] == "NVIDIA H200"
            and "source" not in row["versions"] and row["by"] not in ("math", "memory-efficient")]  # of others, PyTorch
    for path in sys.argv[1:]:
        if path != "--check":
            rows += [row for row in json.loads(open(path).read())["rows"]
                     if row["by"] in FAMILIES and not (row["by"] == "fa3" and row["heads_q"] == FITTED_HEADS_OF_FA3)]
    check(rows) if "--check" in sys.argv[1:] else print_table(rows)


if __name__ == "__main__":
    main()
