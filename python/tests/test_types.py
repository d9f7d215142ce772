# SPDX-License-Identifier: Apache-2.0
"""Types and help of the public functions: annotations, docstrings, dir(), and what mypy says of a caller."""
import importlib.util
import inspect
import os
import pathlib
import subprocess
import sys
import typing

import pytest

import tessera

MODULES = ("tessera", "tessera.compat", "tessera.which", "tessera.torch", "tessera.flash_attn", "tessera.flash_attn_3",
           "tessera.transformers")


def module(name):
    if name not in ("tessera", "tessera.compat", "tessera.which"):
        pytest.importorskip("torch", reason="PyTorch is not installed")
    if name == "tessera.transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    return importlib.import_module(name)


def public(of):
    """(name, function or class) of what a module defines for its users."""
    names = getattr(of, "__all__", None) or [n for n, value in vars(of).items() if not n.startswith("_") and
                                             getattr(value, "__module__", None) == of.__name__]
    return [(name, getattr(of, name)) for name in names]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_types_and_a_docstring(name):
    of = module(name)
    found = [(n, value) for n, value in public(of) if callable(value)]
    assert found
    for n, value in found:
        assert value.__doc__, f"{name}.{n} has no docstring"
        if inspect.isclass(value):
            continue
        signature = inspect.signature(value)
        missing = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        assert not missing and signature.return_annotation is not signature.empty, f"{name}.{n}: {missing}"
        if name != "tessera.which":  # its tensors are of a package that it does not import
            assert typing.get_type_hints(value)


def test_dir_names_the_modules_and_the_version():
    assert {"attention", "plan", "torch", "jax", "flash_attn", "which", "__version__"} <= set(dir(tessera))
    assert all(hasattr(tessera, name) for name in dir(tessera) if name not in tessera._MODULES)
    assert (pathlib.Path(tessera.__file__).parent / "py.typed").exists()


CALLER = '''
import tessera, tessera.torch, tessera.transformers, tessera.compat, tessera.which, tessera.flash_attn, torch
from tessera.flash_attn_3 import flash_attn_func

q: torch.Tensor = torch.zeros(1, 4, 2, 8)
o: torch.Tensor = tessera.torch.attention(q, q, q, causal="bottom-right", window=(3, None), layout="bshd")
both: tuple[torch.Tensor, torch.Tensor] = tessera.torch.attention(q, q, q, return_lse=True, bias=q, math=True)
cu = torch.tensor([0, 4])
rows: torch.Tensor = tessera.torch.varlen_attention(q[0], q[0], q[0], cu, cu, max_len_q=4, seed=cu)
weights: torch.Tensor = tessera.torch.attention_weights(q, q, scale=0.5)
s: torch.Tensor = tessera.torch.scaled_dot_product_attention(q, q, q, None, 0.0, True, enable_gqa=True, math=True)
tessera.torch.register_provider()
tessera.transformers.register("tessera")
tessera.compat.install()
f = tessera.flash_attn.flash_attn_func(q, q, q, causal=True, window_size=(3, 0))
f3 = flash_attn_func(q, q, q, softmax_scale=0.1)
spec = tessera.Spec((1, 4, 2, 8), "bfloat16", "cuda")
kernel: str = tessera.plan(spec, spec, spec, causal="top-left").kernel
ms: float = tessera.predict(spec, spec, spec, machine="h200").ms
out = tessera.attention(q.numpy(), q.numpy(), q.numpy(), return_lse=True)
gradients = tessera.attention_backward(q, q, q, q, q, q)
version: str = tessera.__version__
report: list[str] = tessera.which.read("trace.json").families
'''
WRONG = {"tessera.torch.attention(q, q, q, cusal=None)": "cusal", "tessera.torch.attention(q, q, 3)": "int",
         "tessera.torch.attention(q, q, q)[0].lse": "lse", "tessera.atention": "atention",
         "tessera.plan(q, q, q).kernal": "kernal"}


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_strict(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "wrong.py").write_text(CALLER + "\n".join(WRONG))
    package = pathlib.Path(tessera.__file__).parents[1]

    def mypy(name):
        environment = {} if "site-packages" in str(package) else dict(MYPYPATH=str(package))
        return subprocess.run([sys.executable, "-m", "mypy", "--strict", name], cwd=tmp_path, capture_output=True,
                              text=True, env={**os.environ, **environment})
    right, wrong = mypy("caller.py"), mypy("wrong.py")
    assert "caller.py" not in right.stdout, right.stdout
    first = len(CALLER.splitlines()) + 1
    for line, word in enumerate(WRONG.values(), first):
        errors = [e for e in wrong.stdout.splitlines() if e.startswith(f"wrong.py:{line}: error")]
        assert any(word in e for e in errors), wrong.stdout
