#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs attention in many ways on a GPU and keeps a profiler's trace of each, as test data for `tessera which`.

Each case requests one kernel through PyTorch, so the expected kernel is known. FOLDER gets NAME.json.gz for each case,
and GROUP.tsv with a line for each: its name, the families of attention that ran ("?": not known in advance, "-": none) and the
operators of attention that PyTorch's dispatcher saw, or why it failed. Exit status 77 without PyTorch or without a GPU.

Usage: which_traces.py FOLDER GROUP...
GROUP: sdpa, eager, graphs, flex, compiled, models, more, jax, pallas; held out from the reader's development: fresh_sdpa,
fresh_hand, fresh_compiled, fresh_flex, fresh_language, fresh_images, block_calls, block_hands, block_compiled, block_language,
block_images, block_jax, step_calls, step_hands, step_compiled, step_triton, step_language, served_compiled,
served_mixed, served_models, served_after
--bare instead of FOLDER writes no traces, so that another profiler can run around it.
"""
import glob
import gzip
import json
import os
import re
import shutil
import sys
import tempfile

import which_blocks as blocks
import which_cases as cases
import which_fresh as fresh
import which_fresh_models as fresh_models
import which_models as models
import which_served as served
import which_steps as steps

GROUPS = {"sdpa": cases.sdpa_cases, "eager": cases.eager_cases, "graphs": cases.graph_cases, "flex": cases.flex_cases,
          "compiled": cases.compiled_cases, "models": models.model_cases, "more": models.more_cases, "jax": models.jax_cases,
          "pallas": models.pallas_cases, "fresh_sdpa": fresh.fresh_sdpa_cases, "fresh_hand": fresh.fresh_hand_cases,
          "fresh_compiled": fresh.fresh_compiled_cases, "fresh_flex": fresh.fresh_flex_cases,
          "fresh_language": fresh_models.language_cases, "fresh_images": fresh_models.image_cases, **blocks.GROUPS,
          **steps.GROUPS, **served.GROUPS}
ASKED = ("fresh_sdpa", "fresh_hand", "fresh_language", "fresh_images", "block_calls", "block_hands", "block_language", "block_images",
         "step_calls", "step_hands", "step_language", "served_mixed", "served_models", "served_after")
FUSED = {"cudnn": "cudnn", "flash": "fa2", "efficient": "mem-efficient"}


def dispatched(case):
    """Returns what a step calls of PyTorch's fused attention, forward and backward, without a profiler: "cudnn
    fa2/backward"."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found = set()

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for word, family in FUSED.items():
                if re.search(f"_{word}_attention|_{word}_attention_forward", func.__name__):
                    found.add(family + ("/backward" if "backward" in func.__name__ else ""))
            if "softmax" in func.__name__:
                found.add("softmax" + ("/backward" if "backward" in func.__name__ else ""))
            return func(*args, **(kwargs or {}))

    with Listener():
        case.step()
    return " ".join(sorted(found))


def operators(case):
    try:
        return dispatched(case)
    except (NotImplementedError, RuntimeError) as error:  # this call of PyTorch bypasses the dispatcher
        return f"not asked: {type(error).__name__}"


def profile(case, path):
    import torch
    from torch.profiler import ProfilerActivity

    for _ in range(2):
        case.step()
    torch.cuda.synchronize()
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, record_shapes=case.shapes, with_stack=case.stack) as profiler:
        case.step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)


def profile_jax(case, path):
    import jax

    case.step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            case.step()
        shutil.copy(glob.glob(folder + "/plugins/profile/*/*.trace.json.gz")[0], path)


def without_paths(value):
    """Removes folders of this machine from the trace: each path keeps its last part."""
    if isinstance(value, dict):
        return {key: without_paths(part) for key, part in value.items() if key != "traceName"}
    if isinstance(value, list):
        return [without_paths(part) for part in value]
    return re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-]+)", "", value) if isinstance(value, str) and "/" in value else value


def tidy(path):
    """Rewrites a trace without paths, so that equal content gives equal bytes."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = without_paths(json.load(file))
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(json.dumps(trace, separators=(",", ":")).encode())


def run_group(folder, group):
    """Runs every case that can run; a case that cannot gets a line with the reason."""
    waiting = GROUPS[group]()
    index = open(os.path.join(folder, group + ".tsv"), "w", encoding="utf-8", buffering=1) if folder else sys.stdout
    while True:
        case = None
        try:
            case = next(waiting, None)
            if case is None:
                break
            path = os.path.join(folder or "", case.name + ".json.gz")
            if not folder:
                case.step()
            elif group in ("jax", "pallas", "block_jax"):
                profile_jax(case, path)
            else:
                profile(case, path)
            if folder:
                tidy(path)
            seen = operators(case) if group in ASKED else ""
            print(case.name, case.families, seen, sep="\t", file=index)
        except Exception as error:  # a release may lack anything; the other cases must still run
            print(case.name if case else group, f"failed: {type(error).__name__}: {str(error)[:300]!r}", sep="\t", file=index)


def main():
    if len(sys.argv) < 3 or any(group not in GROUPS for group in sys.argv[2:]):
        print(__doc__)
        return 2
    try:
        import torch
    except (ImportError, OSError) as error:
        print(f"which_traces.py: skipped, PyTorch cannot be imported: {error}")
        return 77
    if not torch.cuda.is_available():
        print("which_traces.py: skipped, there is no GPU")
        return 77
    folder = None if sys.argv[1] == "--bare" else sys.argv[1]
    for group in sys.argv[2:]:
        run_group(folder, group)
    return 0


if __name__ == "__main__":
    sys.exit(main())
