# SPDX-License-Identifier: Apache-2.0
"""install() makes `import flash_attn` and `import xformers.ops` give tessera in this process; importing this module
changes nothing."""
from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types

# Package -> its modules, each with our module and those of its names that it gives; None: all.
_MASKS = (
    "AttentionBias", "BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask", "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask", "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask", "BlockDiagonalMask", "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask", "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask", "LowerTriangularMask", "LowerTriangularMaskWithTensorBias")
_CALLS = ("memory_efficient_attention", "memory_efficient_attention_backward", "memory_efficient_attention_forward",
          "memory_efficient_attention_forward_requires_grad", "memory_efficient_attention_partial", "merge_attentions")
_OPS = ("AttentionOp", "AttentionOpBase", "MemoryEfficientAttentionCkOp", "MemoryEfficientAttentionCutlassFwdFlashBwOp",
        "MemoryEfficientAttentionCutlassOp", "MemoryEfficientAttentionFlashAttentionOp",
        "MemoryEfficientAttentionSplitKCkOp")
PACKAGES = {
    "flash_attn": {"flash_attn": ("tessera.flash_attn", None),
                   "flash_attn.flash_attn_interface": ("tessera.flash_attn", None),
                   "flash_attn.bert_padding": ("tessera.bert_padding", None),
                   "flash_attn.layers": (None, ()), "flash_attn.layers.rotary": ("tessera.rotary", None),
                   "flash_attn.cute": ("tessera.flash_attn_cute", None),
                   "flash_attn.cute.interface": ("tessera.flash_attn_cute", None),
                   "flash_attn_interface": ("tessera.flash_attn_3", None)},
    "xformers": {"xformers": (None, ()),
                 "xformers.ops": ("tessera.xformers", ("AttentionMask", "unbind", *_MASKS, *_CALLS, *_OPS)),
                 "xformers.ops.fmha": ("tessera.xformers", (*_MASKS, *_CALLS, *_OPS)),
                 "xformers.ops.fmha.attn_bias": ("tessera.xformers", _MASKS)},
}
VERSION = "2.8.3"  # the flash-attn version whose functions these are
XFORMERS_VERSION = "0.0.32"  # the xFormers version whose functions these are
_VERSIONS = {"flash_attn": VERSION, "xformers": XFORMERS_VERSION}


def _alias(name, source, names, package, is_package):
    source = importlib.import_module(source) if source else importlib.import_module(__name__)
    module = types.ModuleType(name, source.__doc__)
    given = vars(source) if names is None else {key: vars(source)[key] for key in names}
    module.__dict__.update({key: value for key, value in given.items() if not key.startswith("__")})
    module.__version__ = _VERSIONS[package]
    module.__tessera__ = source.__name__
    # So that importlib.util.find_spec() answers, and `import flash_attn.x` raises ModuleNotFoundError.
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    return module


def installed(package: str = "flash_attn") -> bool:
    """Whether install() has given this package."""
    return hasattr(sys.modules.get(package), "__tessera__")


def install(*packages: str) -> None:
    """Makes imports of flash_attn, flash_attn_interface (version 3) and xformers.ops give tessera. A second call
    changes nothing. docs/python.md lists the names that are there.

    packages: "flash_attn" (both versions) or "xformers"; default: all.
    Libraries that look for the distribution flash-attn or xformers instead of the module, as transformers and diffusers
    do, do not see it: use tessera.transformers there. Raises RuntimeError when the real package is imported already."""
    for package in packages:
        if package not in PACKAGES:
            raise ValueError(f"packages: expected {' or '.join(map(repr, PACKAGES))}, got {package!r}")
    wanted = [package for package in packages or PACKAGES if not installed(package)]
    for package in wanted:
        for name in PACKAGES[package]:
            if name in sys.modules:
                others = ", ".join(f'"{other}"' for other in PACKAGES if other != package)
                raise RuntimeError(f"{name} is imported already; call tessera.compat.install() before, or "
                                   f"tessera.compat.install({others}) without it")
    for package in wanted:
        names = PACKAGES[package]
        for name, (source, of_source) in names.items():
            is_package = any(other.startswith(name + ".") for other in names)
            sys.modules[name] = _alias(name, source, of_source, package, is_package)
        for name in names:
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, sys.modules[name])


def uninstall(*packages: str) -> None:
    """Undoes install(), for these packages or all. Names that were imported from the modules stay."""
    for package in packages or PACKAGES:
        if installed(package):
            for name in PACKAGES[package]:
                sys.modules.pop(name, None)
