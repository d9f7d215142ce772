# SPDX-License-Identifier: Apache-2.0
"""Exact attention by tiles, on arrays of any library that supports DLPack.

    import numpy, tessera
    q = k = v = numpy.random.rand(1, 1024, 8, 64).astype("float32")    # batch, len, heads, head_dim
    o, lse = tessera.attention(q, k, v, causal="bottom-right", return_lse=True)
    print(tessera.plan(q, k, v, causal="bottom-right"))                # the kernel of this call, and why no other

Importing this module imports no other package and loads no library; the first call does.
"""
from __future__ import annotations

import typing

from ._append import append_kv
from ._attention import attention, attention_backward
from ._decode_block import DecodeBlockWorkspace, decode_block
from ._merge import merge
from ._native import DeviceUnavailable, Unsupported
from ._plan import Plan, Prediction, Refusal, plan, predict
from ._problem import Spec

if typing.TYPE_CHECKING:
    from . import bert_padding as bert_padding, compat as compat, flash_attn as flash_attn
    from . import flash_attn_3 as flash_attn_3, flash_attn_cute as flash_attn_cute, jax as jax, rotary as rotary
    from . import ring_flash_attn as ring_flash_attn, torch as torch, transformers as transformers, vllm as vllm
    from . import which as which, xformers as xformers

__version__: str  # of the library, which is loaded for it

__all__ = ["append_kv", "attention", "attention_backward", "decode_block", "merge", "plan", "predict",
           "DecodeBlockWorkspace", "Plan", "Prediction", "Refusal", "Spec", "DeviceUnavailable", "Unsupported"]

# Modules that need another package, or are seldom needed, are imported at their first use: tessera.torch, say.
_MODULES = ("bert_padding", "compat", "flash_attn", "flash_attn_3", "flash_attn_cute", "jax", "ring_flash_attn",
            "rotary", "torch", "transformers", "vllm", "which", "xformers")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__doc__", "__version__"]


if not typing.TYPE_CHECKING:
    def __getattr__(name):
        if name == "__version__":
            from . import _native
            return _native.library().tessera_version().decode()
        if name in _MODULES:
            import importlib
            return importlib.import_module(f"tessera.{name}")
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
