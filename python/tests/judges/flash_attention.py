# SPDX-License-Identifier: Apache-2.0
"""flash-attention's tests/test_flash_attn.py against tessera.flash_attn: the text of its checkout, on any device."""
import importlib.util
import itertools
import pathlib
import random
import sys
import types

import pytest
import torch

from tessera import compat

# Tests of what tessera does not have: caches of keys and values, pages, and the extension module's own argument list.
LEFT_OUT = ("kvcache", "paged", "generator_arg")
ONE_BLOCK = 2**30  # S_dmask of tessera.flash_attn is made of one block of keys, whatever their number


def _module(name, **contents):
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module


def _not_there(*_, **__):
    raise NotImplementedError("tessera has no cache of keys and values yet")


def load_file(name, path, text=None):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(path.read_text() if text is None else text, str(path), "exec"), module.__dict__)
    return module


def pretend_cuda():
    """The file asks for the GPU's properties before its first test; on the CPU it gets those of an H200."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**40, multi_processor_count=132)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda *_: None


def load(checkout: pathlib.Path, device: str):
    """The test module, ours in the place of flash_attn; its padding helpers are the checkout's own."""
    compat.install()
    interface = sys.modules["flash_attn.flash_attn_interface"]
    interface._get_block_size_n = lambda *_: ONE_BLOCK
    interface.USE_TRITON_ROCM = False
    interface._flash_attn_varlen_forward = _not_there
    interface.flash_attn_gpu = None
    load_file("flash_attn.bert_padding", checkout / "flash_attn" / "bert_padding.py")
    _module("flash_attn.layers", __path__=[])
    _module("flash_attn.layers.rotary", apply_rotary_emb=_not_there)
    path = checkout / "tests" / "test_flash_attn.py"
    text = path.read_text()
    if device != "cuda":
        pretend_cuda()
        text = text.replace('"cuda"', repr(device))
    return load_file("judged_test_flash_attn", path, text)


def _axes(function):
    """The parameters of a test: a list of (names, values), from its parametrize marks."""
    axes = []
    for mark in reversed(getattr(function, "pytestmark", [])):
        if mark.name == "parametrize":
            names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            axes.append((names, [v if len(names) > 1 else (v,) for v in mark.args[1]]))
    return axes


def _size(axes):
    size = 1
    for _, values in axes:
        size *= len(values)
    return size


def _case(axes, index):
    case = {}
    for names, values in axes:
        index, place = divmod(index, len(values))
        case.update(zip(names, values[place]))
    return case


def is_asked(function, case):
    return not any(word in function for word in LEFT_OUT) and case.get("paged_kv_block_size") is None


def _longest(case):
    return max([v for n, v in case.items() if n.startswith("seqlen")] or [0])


def cases(module, asked, count, seed, longest):
    """A sample without replacement of the cases for which asked(name of the function, keywords): a list of (function,
    keywords), and how many cases the module has in all."""
    functions = [(f, _axes(f)) for n, f in vars(module).items() if n.startswith("test_") and callable(f)]
    total = sum(_size(a) for _, a in functions)
    functions = [(f, a) for f, a in functions if asked(f.__name__, {})]
    ends = list(itertools.accumulate(_size(a) for _, a in functions))
    chance, sample, drawn = random.Random(seed), [], set()
    while len(sample) < count and len(drawn) < ends[-1]:
        number = chance.randrange(ends[-1])
        if number in drawn:
            continue
        drawn.add(number)
        place = next(i for i, end in enumerate(ends) if number < end)
        function, axes = functions[place]
        case = _case(axes, number - (ends[place - 1] if place else 0))
        if _longest(case) <= longest and asked(function.__name__, case):
            sample.append((function, case))
    return sample, total


def run(function, case):
    """("passed" | "skipped" | "failed", why)."""
    try:
        function(**case)
    except pytest.skip.Exception as reason:
        return "skipped", str(reason)
    except AssertionError as error:
        return "failed", f"AssertionError {error}".strip().splitlines()[0]
    except Exception as error:  # whatever else it raises is a failure to report, not to stop at
        return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
    return "passed", ""
