# SPDX-License-Identifier: Apache-2.0
"""Types and help of the public functions: annotations, docstrings, dir(), and what mypy says of a caller."""
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import typing

import pytest

import tessera

MODULES = ("tessera", "tessera.compat", "tessera.vllm", "tessera.which", "tessera.torch", "tessera.flash_attn", "tessera.flash_attn_3",
           "tessera.flash_attn_cute", "tessera.transformers", "tessera.jax", "tessera.xformers", "tessera.bert_padding",
           "tessera.rotary", "tessera.ring_flash_attn")


def module(name):
    if name == "tessera.jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    elif name not in ("tessera", "tessera.compat", "tessera.vllm", "tessera.which"):
        pytest.importorskip("torch", reason="PyTorch is not installed")
    if name == "tessera.transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    return importlib.import_module(name)


def public(of):
    """(name, function or class) of what a module defines for its users."""
    names = getattr(of, "__all__", None) or [n for n, value in vars(of).items() if not n.startswith("_") and
                                             getattr(value, "__module__", None) == of.__name__]
    return [(name, getattr(of, name)) for name in names]


def expect_types(name, function):
    signature = inspect.signature(function)
    missing = [p.name for p in signature.parameters.values()
               if p.annotation is p.empty and p.name not in ("self", "cls")]
    assert not missing and signature.return_annotation is not signature.empty, f"{name}: {missing}"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_types_and_a_docstring(name):
    of = module(name)
    found = [(n, value) for n, value in public(of) if callable(value)]
    assert found
    for n, value in found:
        assert inspect.getdoc(value), f"{name}.{n} has no docstring"
        if inspect.isclass(value):
            for method, function in vars(value).items():  # of the class itself, not of a base of another package
                if not method.startswith("_") and inspect.isroutine(getattr(value, method)):
                    expect_types(f"{name}.{n}.{method}", getattr(value, method))
            continue
        expect_types(f"{name}.{n}", value)
        if name != "tessera.which":  # its tensors are of a package that it does not import
            assert typing.get_type_hints(value)


@pytest.mark.parametrize("name", ["forward", "varlen_forward", "backward", "varlen_backward"])
def test_the_single_passes_have_types(name):
    function = getattr(module("tessera.flash_attn"), f"_flash_attn_{name}")
    expect_types(name, function)
    assert typing.get_type_hints(function)


def test_dir_names_the_modules_and_the_version():
    assert {"attention", "plan", "torch", "jax", "flash_attn", "which", "__version__"} <= set(dir(tessera))
    assert all(hasattr(tessera, name) for name in dir(tessera) if name not in tessera._MODULES)
    assert set(MODULES) <= {"tessera", *(f"tessera.{name}" for name in tessera._MODULES)}
    assert (pathlib.Path(tessera.__file__).parent / "py.typed").exists()


CALLER = '''
import tessera, tessera.torch, tessera.transformers, tessera.compat, tessera.which, tessera.flash_attn, torch
from tessera.flash_attn_3 import flash_attn_func

q: torch.Tensor = torch.zeros(1, 4, 2, 8)
o: torch.Tensor = tessera.torch.attention(q, q, q, causal="bottom-right", window=(3, None), layout="bshd")
both: tuple[torch.Tensor, torch.Tensor] = tessera.torch.attention(q, q, q, return_lse=True, bias=q, mask=q > 0, math=True)
cu = torch.tensor([0, 4])
rows: torch.Tensor = tessera.torch.varlen_attention(q[0], q[0], q[0], cu, cu, max_len_q=4, seed=cu)
weights: torch.Tensor = tessera.torch.attention_weights(q, q, scale=0.5, mask=q > 0)
s: torch.Tensor = tessera.torch.scaled_dot_product_attention(q, q, q, None, 0.0, True, enable_gqa=True, math=True)
tessera.torch.register_provider()
tessera.transformers.register("tessera")
tessera.compat.install()
f = tessera.flash_attn.flash_attn_func(q, q, q, causal=True, window_size=(3, 0))
f3 = flash_attn_func(q, q, q, softmax_scale=0.1)
spec = tessera.Spec((1, 4, 2, 8), "bfloat16", "cuda")
kernel: str = tessera.plan(spec, spec, spec, causal="top-left").kernel
ms: float = tessera.predict(spec, spec, spec, machine="h200").ms
out = tessera.attention(q.numpy(), q.numpy(), q.numpy(), mask=q.numpy() > 0, return_lse=True)
gradients = tessera.attention_backward(q, q, q, q, q, q)
version: str = tessera.__version__
report: list[str] = tessera.which.read("trace.json").families
'''
CALLER += '''
import tessera.xformers, tessera.bert_padding, tessera.rotary, tessera.flash_attn_cute

x: torch.Tensor = tessera.xformers.memory_efficient_attention(q, q, q, tessera.xformers.LowerTriangularMask(), p=0.0)
mask = tessera.xformers.BlockDiagonalMask.from_seqlens([1, 3]).make_causal()
part, lse = tessera.xformers.memory_efficient_attention_partial(q, q, q)
merged, total = tessera.xformers.merge_attentions([part, part], [lse, lse])
kept, indices, starts, longest, used = tessera.bert_padding.unpad_input(q, torch.ones(1, 4))
again: torch.Tensor = tessera.bert_padding.pad_input(kept, indices, 1, longest)
rotated: torch.Tensor = tessera.rotary.apply_rotary_emb(q, q[0, :, 0], q[0, :, 0], inplace=False)
embedding = tessera.rotary.RotaryEmbedding(8)
o4, lse4 = tessera.flash_attn_cute.flash_attn_func(q, q, q, causal=True, window_size=(3, None))
layout: str = tessera.plan(spec, spec, spec).layout
'''
CALLER += '''
import tessera.ring_flash_attn

o5: torch.Tensor = tessera.torch.attention(q, q, q, sinks=q)
o6: torch.Tensor = tessera.torch.context_parallel_attention(q, q, q, None, causal=True, sinks=q, cu_seqlens=[0, 1])
ranks: tuple[torch.Tensor, torch.Tensor] = tessera.torch.context_parallel_attention(q, q, q, return_lse=True)
own: torch.Tensor = tessera.torch.shard_sequence(q, order="contiguous")
workspace = tessera.DecodeBlockWorkspace()
block = tessera.decode_block(q, q, q, q, q, q, cu, window_left=3, way="chain", workspace=workspace)
tessera.append_kv(q, q, q, q, slot_mapping=cu)
o7, lse7 = tessera.merge(q, q, q, q)
cached = tessera.flash_attn.flash_attn_with_kvcache(q, q, q, s_aux=q, cache_seqlens=3)
ring = tessera.ring_flash_attn.ring_flash_attn_func(q, q, q, causal=True)
'''
CALLER_OF_JAX = '''
import jax, tessera.jax

a: jax.Array = jax.numpy.zeros((1, 4, 2, 8))
oj = tessera.jax.dot_product_attention(a, a, a, is_causal=True, local_window_size=(3, 0), implementation="xla")
checks = tessera.jax.export_checks()
'''
# Wrong lines, and a pattern of what mypy or pyright says of each.
WRONG = {"tessera.torch.attention(q, q, q, cusal=None)": "cusal|No overloads",
         "tessera.torch.attention(q, q, 3)": "int|Literal", "tessera.torch.attention(q, q, q)[0].lse": "lse",
         "tessera.atention": "atention", "tessera.plan(q, q, q).kernal": "kernal",
         "tessera.rotary.rotate_half(3)": "int|Literal",
         "tessera.xformers.memory_efficient_attention(q, q, q, 'causal')": "str|Literal",
         "tessera.bert_padding.pad_input(q, q, 1)": "seqlen", "tessera.flash_attn_cute.flash_attn_func(q, q)": '"v"',
         "tessera.decode_block(q, q, q, q, q, q, q, window_left='3')": "str|Literal",
         "tessera.decode_block(q, q, q, q, q, q, q, way=3)": "int|Literal",
         "tessera.torch.context_parallel_attention(q, q, q, steps='2')": "No overload|str|Literal",
         "tessera.torch.attention(q, q, q, sinks=0.5)": "No overload|float",
         "tessera.torch.attention(q, q, q, mask=True)": "No overload|bool|Literal"}
# basedpyright is pyright with its program in the wheel.
CHECKERS = {"mypy": ["--strict"], "basedpyright": ["--level", "error", "--pythonpath", sys.executable]}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_takes_right_calls_and_finds_wrong_ones(tmp_path, checker):
    """One run for both files: reading PyTorch's types takes most of the time."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    right = CALLER if importlib.util.find_spec("jax") is None else CALLER + CALLER_OF_JAX
    (tmp_path / "caller.py").write_text(right)
    (tmp_path / "wrong.py").write_text(CALLER + "\n".join(WRONG) + "\n")
    package = pathlib.Path(tessera.__file__).parents[1]
    path = {} if "site-packages" in str(package) else dict(MYPYPATH=str(package))
    if checker != "mypy":
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(dict(extraPaths=list(path.values()))))
    said = subprocess.run([sys.executable, "-m", checker, *CHECKERS[checker], "caller.py", "wrong.py"], cwd=tmp_path,
                          capture_output=True, text=True, env={**os.environ, **path}).stdout
    errors = [re.sub(r"^.*?(\w+\.py):(\d+)", r"\1:\2", line.strip()) for line in said.splitlines() if "error" in line]
    assert not [e for e in errors if e.startswith("caller.py")], said
    first = len(CALLER.splitlines()) + 1
    for line, pattern in enumerate(WRONG.values(), first):
        assert any(re.search(pattern, e) for e in errors if e.startswith(f"wrong.py:{line}:")), said
