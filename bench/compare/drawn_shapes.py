#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws random shapes from a seed, kind by kind, for measurements that judge the cost model.

    python3 bench/compare/drawn_shapes.py --seed 11 --count 60 > suite.json   # for tessera bench --suite, on a CPU
    python3 bench/compare/drawn_shapes.py --seed 11 --count 60 --records > drawn.jsonl   # for host_rounds (bench/fit)

torch_held_out.py --seed draws those for a GPU. The kinds are those of measure::kind_of(). Within a kind every size is
drawn from a range, so that most are no power of two and many no multiple of a tile. Shapes of more than `most` FLOP are
drawn again."""
import argparse
import itertools
import json
import random

KINDS = ("prefill", "head_dim", "few heads", "grouped heads", "decode", "window", "cross lengths", "ragged")
DIMS = (64, 128, 256)


def between(rng, low, high):
    """A log-uniform random size."""
    return round(low * (high / low) ** rng.random())


def group_of(rng):
    return rng.choice((2, 3, 4, 5, 6, 7, 8, 16))


def one(rng, kind, direction, longest):
    """[kind, pass, head_dim, heads_q, heads_kv, batch, len_q, len_kv, mask]; lengths of a ragged batch are lists."""
    dim, heads, group, batch = rng.choice(DIMS), rng.randint(8, 40), 1, between(rng, 1, 24)
    len_q = len_kv = between(rng, 300, longest)
    mask = rng.choice(("none", "causal"))
    if kind == "head_dim":
        dim = rng.choice([d for d in range(32, 257, 8) if d not in DIMS])
    elif kind == "few heads":
        heads, batch = rng.randint(1, 6), 1
    elif kind == "grouped heads":
        heads, group = rng.choice((1, 2, 4, 8)), group_of(rng)
    elif kind == "decode":
        heads, group, batch = rng.randint(1, 16), rng.choice((1, group_of(rng))), between(rng, 1, 64)
        len_q, len_kv = rng.choice((1, 1, 1, rng.randint(2, 16))), between(rng, 1000, 4 * longest)
        mask = "none" if len_q == 1 else "causal"
    elif kind == "window":
        mask = f"window {min(len_kv - 1, between(rng, 64, 4096))},0"
    elif kind == "cross lengths":
        len_q = between(rng, 64, len_kv)
    elif kind == "ragged":
        len_q = len_kv = [between(rng, 20, longest / 2) for _ in range(rng.randint(4, 40))]
        batch = len(len_q)
    return [kind, direction, dim, heads * group, heads, batch, len_q, len_kv, mask]


def flop(row):
    """FLOP of the whole rectangle of scores."""
    kind, direction, dim, heads, _, batch, len_q, len_kv, _ = row
    pairs = sum(n * n for n in len_q) if kind == "ragged" else batch * len_q * len_kv
    return (4 if direction == "forward" else 10) * pairs * heads * dim


def elements(row):
    """Elements of the largest tensor."""
    kind, _, dim, heads, heads_kv, batch, len_q, len_kv, _ = row
    return sum(len_q) * heads * dim if kind == "ragged" else batch * dim * max(heads * len_q, heads_kv * len_kv)


def drawn(seed, count, passes=("forward", "backward"), longest=16384, least=2e10, most=6e11, most_elements=1 << 28):
    """`count` rows, of all kinds and passes in turn; decoding has no backward here, nor a least size."""
    rng = random.Random(seed)
    rows = []
    for kind, direction in itertools.cycle(itertools.product(KINDS, passes)):
        if len(rows) == count:
            return rows
        if kind == "decode" and direction == "backward":
            continue
        fits = lambda row: elements(row) <= most_elements and (kind == "decode" or least <= flop(row)) and flop(row) <= most
        rows.append(next(filter(fits, (one(rng, kind, direction, longest) for _ in itertools.count()))))


def as_set(rng, row, cores):
    """The row as options of tessera bench."""
    kind, direction, dim, heads, heads_kv, batch, len_q, len_kv, mask = row
    options = {"pass": direction, "heads": f"{heads}/{heads_kv}", "head-dim": dim, "schedule": "fa2",
               "dtype": rng.choice(("fp32", "fp32", "bf16", "bf16", "fp16")), "threads": rng.choice((cores, cores, max(1, cores // 4), 1))}
    if kind == "ragged":
        options["ragged"] = ",".join(map(str, len_q))
    else:
        options.update({"batch": batch, "len-q": len_q, "len-kv": len_kv})
    if mask == "causal":
        options["causal"] = "bottom-right"
    elif mask != "none":
        options["window"] = mask.split()[1]
    return options


def as_record(options):
    """The row as a Record of tessera bench without results."""
    heads = [int(n) for n in options["heads"].split("/")]
    lens = [int(n) for n in options["ragged"].split(",")] if "ragged" in options else None
    len_q, len_kv = (max(lens), max(lens)) if lens else (options["len-q"], options["len-kv"])
    mask = f"window {options['window']}" if "window" in options else "causal bottom-right" if "causal" in options else "none"
    record = {"what": "predicted", "by": "tessera", "schedule": options["schedule"], "pass": options["pass"], "dtype": options["dtype"],
              "batch": len(lens) if lens else options["batch"], "len_q": len_q, "len_kv": len_kv, "heads_q": heads[0],
              "heads_kv": heads[1], "head_dim": options["head-dim"], "head_dim_v": options["head-dim"], "mask": mask,
              "deterministic": True, "ms": 0, "ms_spread": 0, "tflops": 0, "device": "", "threads": options["threads"], "date": "", "commit": ""}
    return {**record, "features": "ragged", "lens_q": lens, "lens_kv": lens} if lens else record


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--cores", type=int, default=16, help="of the host")
    parser.add_argument("--records", action="store_true", help="lines as of Records, without a time")
    options = parser.parse_args()
    rows = drawn(options.seed, options.count, longest=8192, least=5e7, most=8e9, most_elements=1 << 24)
    rng = random.Random(options.seed)
    sets = [as_set(rng, row, options.cores) for row in rows]
    if options.records:
        print("\n".join(json.dumps(as_record(one)) for one in sets))
        return
    print(json.dumps({"about": f"{options.count} shapes drawn with seed {options.seed}", "sets": sets}, indent=1))


if __name__ == "__main__":
    main()
