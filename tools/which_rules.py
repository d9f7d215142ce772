#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks the installed PyTorch on a GPU which backends take a set of calls, and compares with tessera's table.

For each call: torch.backends.cuda.can_use_*(params, debug=True), whose warnings must begin with the text of a rule that
`tessera which --torch ... --shape ... --json` gives, and torch._fused_sdp_choice(), which must be the backend that tessera says
is taken. Prints one line per difference; exit status 1 when there are any, 77 without PyTorch or without a GPU.

Usage: which_rules.py TESSERA [--texts-on-cpu]
--texts-on-cpu: without a GPU, prints the warnings that PyTorch gives for tensors of the CPU; nothing is compared.
"""
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings

NAMES = {"flash": "can_use_flash_attention", "memory-efficient": "can_use_efficient_attention", "cuDNN": "can_use_cudnn_attention"}
CHOICES = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}
SHAPES = ("2,8,512,64", "2,8,512,60", "2,8,1,64/2,8,512,64", "2,8,512,64/2,2,512,64", "2,8,512,192/2,8,512,192/2,8,512,128",
          "2,8,512,256", "2,8,128,64/2,8,512,64", "2,8,512,64/2,8,1,64")
DTYPES = ("fp16", "bf16", "fp32", "fp64")
MASKS = ("none", "causal", "bool:512,512", "float:2,8,512,512")
OTHERS = ((), ("--gqa",), ("--grad",), ("--dropout", "0.1"))


def calls():
    """Every combination that PyTorch itself does not refuse: a mask of a tensor fits 512 queries and keys only."""
    for shape, dtype, mask, others in itertools.product(SHAPES, DTYPES, MASKS, OTHERS):
        parts = [[int(n) for n in part.split(",")] for part in shape.split("/")]
        parts += parts[-1:] * (3 - len(parts))
        lengths = {part[2] for part in parts}
        if ":" in mask and lengths != {512}:
            continue
        yield shape, dtype, mask, others, parts


def told(tessera, torch, device, shape, dtype, mask, others):
    """What tessera says of a call: its JSON."""
    capability = ".".join(str(n) for n in torch.cuda.get_device_capability(device))
    cudnn = torch.backends.cudnn.version()
    command = [tessera, "which", "--json", "--torch", torch.__version__.split("+")[0], "--gpu", capability, "--shape", shape,
               "--dtype", dtype, "--mask", mask, *others, "--cudnn", f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
               "--cuda", torch.version.cuda]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def tensors(torch, device, dtype, mask, others, parts):
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    q, k, v = (torch.randn(part, dtype=types[dtype], device=device, requires_grad="--grad" in others) for part in parts)
    tensor = None
    if ":" in mask:
        shape = [int(n) for n in mask.split(":")[1].split(",")]
        tensor = torch.ones(shape, dtype=torch.bool if mask.startswith("bool") else types[dtype], device=device)
    dropout = float(others[1]) if "--dropout" in others else 0.0
    return q, k, v, tensor, dropout, mask == "causal", "--gqa" in others


def one_answer(torch, function, params):
    """Whether a backend may run, and its warnings: PyTorch 2.15 writes them to stderr and not to Python's warnings."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as written, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        os.dup2(written.fileno(), 2)
        try:
            runs = getattr(torch.backends.cuda, function)(params, debug=True)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        written.seek(0)
        texts = [line.split("Warning: ", 1)[1].strip() for line in written if "Warning: " in line]
    return runs, [str(w.message) for w in caught] + texts


def asked(torch, args):
    """PyTorch's answers: {backend: (may it run, its warnings)}."""
    params = torch.backends.cuda.SDPAParams(*args)
    return {name: one_answer(torch, function, params) for name, function in NAMES.items()}


def differences(torch, tessera, device, call):
    shape, dtype, mask, others, parts = call
    json_of_call = told(tessera, torch, device, shape, dtype, mask, others)
    q, k, v, tensor, dropout, causal, gqa = args = tensors(torch, device, dtype, mask, others, parts)
    backends = {row["backend"]: row for row in json_of_call["backends"]}
    where = f"{shape} {dtype} {mask} {' '.join(others)}"
    for name, (runs, texts) in asked(torch, args).items():
        row = backends[name]
        if runs != (row["verdict"] in ("taken", "could run")):
            yield f"{where}: {name}: PyTorch says {runs} {texts}, tessera {row['verdict']}"
        # The version of cuDNN stands before one of the texts, so the rule's is looked for anywhere.
        elif texts and not any(rule["text"] and rule["text"] in texts[0] for rule in row["refusals"]):
            yield f"{where}: {name}: PyTorch's text is in no rule: {texts[0]}"
    chosen = CHOICES[torch._fused_sdp_choice(q, k, v, tensor, dropout, causal, enable_gqa=gqa)]
    if chosen != json_of_call["taken"]:
        yield f"{where}: PyTorch takes {chosen}, tessera says {json_of_call['taken']}"


def texts_on_cpu(torch):
    """The warnings for tensors of the CPU, with the backends on and off; without a driver some checks only throw."""
    args = tensors(torch, "cpu", "fp16", "none", (), [[2, 8, 512, 64]] * 3)
    for on in (True, False):
        for switch in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{switch}_sdp")(on)
        for name, function in NAMES.items():
            try:
                runs, texts = one_answer(torch, function, torch.backends.cuda.SDPAParams(*args))
            except RuntimeError as error:
                runs, texts = str(error).splitlines()[0], []
            print(f"{name}, switched {'on' if on else 'off'}: {runs} {texts}")


def main():
    try:
        import torch
    except (ImportError, OSError) as error:
        print(f"which_rules.py: skipped, PyTorch cannot be imported: {error}")
        return 77
    if not torch.cuda.is_available():
        if "--texts-on-cpu" in sys.argv:
            texts_on_cpu(torch)
        print("which_rules.py: skipped, there is no GPU")
        return 77
    found = 0
    count = 0
    for call in calls():
        count += 1
        for difference in differences(torch, sys.argv[1], "cuda", call):
            print(difference)
            found += 1
    print(f"which_rules.py: PyTorch {torch.__version__}: {count} calls, {found} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
