#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks the installed PyTorch on a GPU which backends take a set of calls, and compares with tessera's table.

For each call: torch.backends.cuda.can_use_*(params, debug=True), whose warnings must contain the text of a rule from
`tessera which --torch ... --shape ... --json`, and torch._fused_sdp_choice(), which must be the backend that tessera
predicts. Prints one line per difference; exit status 1 if there are any, 77 without PyTorch or without a GPU.

Usage: which_rules.py TESSERA | --record FILE | --texts-on-cpu [--random SEED]
--record: only writes PyTorch's answers (tests/diagnose/pytorch_*.tsv), also for calls that the command has no options for.
--random: uses 400 random calls from SEED instead of those that the table was written for.
--texts-on-cpu: without a GPU, prints PyTorch's warnings for CPU tensors; nothing is compared.
"""
import argparse
import itertools
import json
import pathlib
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
from tessera import _sdpa_choice  # noqa: E402

SWITCHES = {"flash": "flash", "efficient": "mem_efficient", "math": "math", "cudnn": "cudnn"}
SHAPES = ("2,8,512,64", "2,8,512,60", "2,8,1,64/2,8,512,64", "2,8,512,64/2,2,512,64", "2,8,512,192/2,8,512,192/2,8,512,128",
          "2,8,512,256", "2,8,128,64/2,8,512,64", "2,8,512,64/2,8,1,64")
DTYPES = ("fp16", "bf16", "fp32", "fp64")
MASKS = ("none", "causal", "bool:512,512", "float:2,8,512,512")
OPTIONS = ("", "gqa", "grad", "dropout=0.1")
SQUARE = "2,8,512,64"
# Calls that the combinations above leave out: shapes, dtypes, mask, options.
OTHERS = (
    ("8,512,64", "bf16", "none", ""),
    ("2,8,0,64/2,8,512,64", "bf16", "none", ""),
    ("2,8,512,64/2,8,0,64", "bf16", "none", ""),
    ("2,8,512,64/1,8,512,64", "bf16", "none", ""),
    ("2,8,512,64/2,3,512,64", "bf16", "none", "gqa"),
    ("2,8,512,64/2,2,512,64/2,4,512,64", "bf16", "none", "gqa"),
    ("2,8,512,64/2,1,512,64", "bf16", "none", ""),
    ("2,8,512,68", "bf16", "none", ""),
    ("2,8,512,72", "bf16", "none", ""),
    ("2,8,512,68", "fp32", "none", ""),
    ("2,8,512,66", "fp32", "none", ""),
    ("2,8,512,128", "bf16", "causal", "grad"),
    ("2,8,512,136", "bf16", "none", ""),
    ("2,8,512,192", "bf16", "none", "grad"),
    ("2,8,512,224", "bf16", "none", "grad dropout=0.1"),
    ("2,8,512,256", "bf16", "none", "grad dropout=0.1"),
    ("2,8,512,264", "bf16", "none", ""),
    ("2,8,512,512", "bf16", "none", ""),
    ("65535,1,8,64", "bf16", "none", ""),
    ("65536,1,8,64", "bf16", "none", ""),
    ("1,65536,8,64", "bf16", "none", ""),
    (SQUARE, "bf16/fp32/fp32", "none", ""),
    (SQUARE, "bf16/fp16/bf16", "none", ""),
    (SQUARE, "bf16", "bool:8,512,512", ""),
    (SQUARE, "bf16", "bool:2,1,1,512", ""),
    (SQUARE, "bf16", "bool:1,512", ""),
    (SQUARE, "bf16", "bool:2,8,512,1", "expanded_mask"),
    (SQUARE, "bf16", "float:2,8,512,512", "mask_grad"),
    (SQUARE, "bf16", "none", "deterministic"),
    (SQUARE, "bf16", "none", "deterministic grad"),
    (SQUARE, "bf16", "none", "dropout=0.125"),
    (SQUARE, "bf16", "none", "dropout=0.5 grad"),
    ("2,8,1,64/2,8,512,64", "bf16", "none", "dropout=0.5"),
    (SQUARE, "bf16", "none", "k_stride"),
    ("2,8,512,1", "bf16", "none", "k_stride"),
    (SQUARE, "bf16", "none", "q_offset=1"),
    (SQUARE, "bf16", "none", "q_offset=4"),
    (SQUARE, "bf16", "none", "q_offset=8"),
    (SQUARE, "fp32", "none", "q_offset=2"),
    (SQUARE, "fp32", "none", "q_offset=4"),
    (SQUARE, "bf16", "none", "off=flash"),
    (SQUARE, "bf16", "none", "off=efficient"),
    (SQUARE, "bf16", "none", "off=cudnn"),
    (SQUARE, "bf16", "none", "off=flash,cudnn"),
    (SQUARE, "bf16", "none", "off=flash,efficient,cudnn"),
    (SQUARE, "fp64", "none", "off=math"),
    (SQUARE, "bf16", "none", "off=math"),
)


def calls():
    """Yields (shapes, dtypes, mask, options): every combination that PyTorch does not reject, and the further calls. A
    mask tensor fits 512 queries and keys only."""
    for shape, dtype, mask, options in itertools.product(SHAPES, DTYPES, MASKS, OPTIONS):
        if ":" not in mask or {part.split(",")[2] for part in shape.split("/")} == {"512"}:
            yield shape, dtype, mask, options
    yield from OTHERS


def random_calls(seed, count=400):
    """Yields random mixtures of sizes, dtypes, masks and options; some backend refuses most of them."""
    draw = random.Random(seed)
    for _ in range(count):
        batch, heads = draw.choice((1, 2, 3)), draw.choice((1, 4, 6, 8, 12))
        q_len, kv_len = draw.choice((1, 7, 64, 200, 512)), draw.choice((1, 33, 64, 256, 512))
        dim = draw.choice((8, 16, 20, 32, 40, 64, 72, 80, 96, 100, 128, 136, 160, 192, 200, 224, 240, 256, 320))
        kv_heads = draw.choice((heads, heads, heads, 1, 2))
        dim_v = draw.choice((dim, dim, dim, dim, 64, 128))
        shape = "/".join(",".join(map(str, sizes)) for sizes in (
            (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim_v)))
        dtype = draw.choice(DTYPES + ("bf16", "fp16", "bf16/bf16/fp32"))
        mask = draw.choice(("none", "none", "causal", f"bool:{q_len},{kv_len}", f"float:{batch},{heads},{q_len},{kv_len}",
                            f"bool:{batch},1,1,{kv_len}", f"float:1,1,{q_len},{kv_len}"))
        options = [word for word, chance in (("gqa", 0.4), ("grad", 0.4), ("deterministic", 0.1), ("dropout=0.25", 0.15),
                                             ("off=cudnn", 0.1), ("off=flash,efficient", 0.05)) if draw.random() < chance]
        if "off=cudnn" in options and "off=flash,efficient" in options:  # merge them, because the last one would win
            options = [word for word in options if not word.startswith("off=")] + ["off=flash,efficient,cudnn"]
        yield shape, dtype, mask, " ".join(options)


def parts_of(text):
    """Returns q, k and v of "q/k/v", "q/kv" or "qkv"."""
    parts = text.split("/")
    return parts + parts[-1:] * (3 - len(parts))


def options_of(text):
    return dict(word.partition("=")[::2] for word in text.split())


def command_for(tessera, torch, call):
    """Returns the command that asks tessera about the same call, or None if it lacks an option."""
    shape, dtype, mask, options = call
    known = {"gqa": "--gqa", "grad": "--grad", "deterministic": "--deterministic", "dropout": "--dropout", "off": "--off"}
    options = options_of(options)
    if not set(options) <= set(known):
        return None
    capability = ".".join(str(n) for n in torch.cuda.get_device_capability())
    cudnn = torch.backends.cudnn.version()
    command = [tessera, "which", "--json", "--torch", torch.__version__.split("+")[0], "--gpu", capability, "--shape", shape,
               "--dtype", dtype, "--mask", mask, "--cudnn", f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
               "--cuda", torch.version.cuda]
    for name, value in options.items():
        command += [known[name], value] if value else [known[name]]
    return command


def tensors(torch, device, call):
    shape, dtype, mask, options = call
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    options = options_of(options)
    made = []
    for sizes, kind in zip(parts_of(shape), parts_of(dtype)):
        sizes = [int(n) for n in sizes.split(",")]
        count = 1
        for size in sizes:
            count *= size
        offset = int(options.get("q_offset", 0)) if not made else 0
        step = 2 if "k_stride" in options and len(made) == 1 else 1
        flat = torch.zeros(count * step + offset, dtype=types[kind], device=device)[offset::step]
        made.append(flat.view(sizes).detach().requires_grad_("grad" in options))
    tensor = None
    if ":" in mask:
        sizes = [int(n) for n in mask.split(":")[1].split(",")]
        tensor = torch.ones(sizes, dtype=torch.bool if mask.startswith("bool") else made[0].dtype, device=device)
        if "expanded_mask" in options:
            tensor = tensor.expand(*sizes[:-1], made[1].shape[2])
        tensor.requires_grad_("mask_grad" in options)
    return [*made, tensor, float(options.get("dropout", 0)), mask == "causal", "gqa" in options]


def asked(torch, call):
    """Returns PyTorch's answers: {backend: (it may run, its warnings)}, and the backend that it takes."""
    options = options_of(call[3])
    args = tensors(torch, "cuda", call)
    switched = [name for name in options.get("off", "").split(",") if name]
    for name in switched:
        getattr(torch.backends.cuda, f"enable_{SWITCHES[name]}_sdp")(False)
    torch.use_deterministic_algorithms("deterministic" in options)
    try:
        return _sdpa_choice.ask(torch, *args)
    finally:
        torch.use_deterministic_algorithms(False)
        for name in switched:
            getattr(torch.backends.cuda, f"enable_{SWITCHES[name]}_sdp")(True)


def write_record(torch, path, answers):
    """Writes the numbered texts, then a line per call with "runs", "no", or a text's number for each backend."""
    numbers = {}
    rows = []
    for call, (backends, chosen) in answers:
        cells = []
        for runs, texts in backends.values():
            text = " ".join(texts[0].split())[:120] if texts else ""
            cells.append("runs" if runs else str(numbers.setdefault(text, len(numbers) + 1)) if text else "no")
        rows.append("\t".join(["call", *call, *cells, chosen]))
    with open(path, "w", encoding="utf-8") as file:
        capability = ".".join(str(n) for n in torch.cuda.get_device_capability())
        print(f"# Answers of PyTorch {torch.__version__} on an {torch.cuda.get_device_name()}, by tools/which_rules.py --record", file=file)
        print("about", torch.__version__.split("+")[0], capability, torch.backends.cudnn.version(), torch.version.cuda, sep="\t", file=file)
        for text, number in numbers.items():
            print("text", number, text, sep="\t", file=file)
        print("# call, shapes, dtypes, mask, options, flash, memory-efficient, cuDNN, taken", file=file)
        print("\n".join(rows), file=file)


def texts_on_cpu(torch):
    """Prints the warnings for CPU tensors, with the backends on and off; without a driver some checks only raise."""
    args = tensors(torch, "cpu", (SQUARE, "fp16", "none", ""))
    for on in (True, False):
        for switch in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{switch}_sdp")(on)
        for name, function in _sdpa_choice.FUNCTIONS.items():
            try:
                runs, texts = _sdpa_choice.answer_of(torch, function, torch.backends.cuda.SDPAParams(*args))
            except RuntimeError as error:
                runs, texts = str(error).splitlines()[0], []
            print(f"{name}, switched {'on' if on else 'off'}: {runs} {texts}")


def compare(torch, tessera, answers):
    """Returns the number of differences, and of the calls that tessera could be asked about."""

    def told(call):
        command = command_for(tessera, torch, call)
        return command and json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    found = count = 0
    with ThreadPoolExecutor() as pool:
        for (call, answer), json_of_call in zip(answers, pool.map(told, [call for call, _ in answers])):
            if json_of_call is None:
                continue
            count += 1
            for difference in _sdpa_choice.differences(*answer, json_of_call):
                print(" ".join(call), difference, sep=": ")
                found += 1
    return found, count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tessera", nargs="?")
    parser.add_argument("--record")
    parser.add_argument("--random", type=int)
    parser.add_argument("--texts-on-cpu", action="store_true")
    options = parser.parse_args()
    if not (options.tessera or options.record or options.texts_on_cpu):
        parser.error("expected the command tessera, --record or --texts-on-cpu")
    try:
        import torch
    except (ImportError, OSError) as error:
        print(f"which_rules.py: skipped, PyTorch cannot be imported: {error}")
        return 77
    if not torch.cuda.is_available():
        if options.texts_on_cpu:
            texts_on_cpu(torch)
        print("which_rules.py: skipped, there is no GPU")
        return 77
    answers = []
    for call in calls() if options.random is None else random_calls(options.random):
        try:
            answers.append((call, asked(torch, call)))
        except RuntimeError as error:
            print(f"{' '.join(call)}: PyTorch cannot be asked: {str(error).splitlines()[0]}")
    if options.record:
        write_record(torch, options.record, answers)
        return 0
    found, count = compare(torch, options.tessera, answers)
    print(f"which_rules.py: PyTorch {torch.__version__}: {count} calls, {found} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
