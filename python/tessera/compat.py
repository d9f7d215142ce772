# SPDX-License-Identifier: Apache-2.0
"""install() makes `import flash_attn` and `import xformers.ops` give tessera in this process; importing this module
changes nothing.

A program that is not to be changed gets flash_attn by a folder in PYTHONPATH: PYTHONPATH=$(python -m tessera.compat)
"""
from __future__ import annotations

import importlib
import importlib.machinery
import pathlib
import sys
import types

_EVERY, _PUBLIC, _NONE = "every name", "the names in __all__", "no name"

# Package -> its modules, each with our module and those of its names that it gives.
PACKAGES = {
    "flash_attn": {"flash_attn": ("tessera.flash_attn", _EVERY),
                   "flash_attn.flash_attn_interface": ("tessera.flash_attn", _EVERY),
                   "flash_attn.bert_padding": ("tessera.bert_padding", _PUBLIC),
                   "flash_attn.layers": ("tessera.compat", _NONE),
                   "flash_attn.layers.rotary": ("tessera.rotary", _PUBLIC),
                   "flash_attn.cute": ("tessera.flash_attn_cute", _PUBLIC),
                   "flash_attn.cute.interface": ("tessera.flash_attn_cute", _PUBLIC),
                   "flash_attn_interface": ("tessera.flash_attn_3", _EVERY)},
    "xformers": {"xformers": ("tessera.compat", _NONE),
                 "xformers.ops": ("tessera.xformers", _PUBLIC),
                 "xformers.ops.fmha": ("tessera.xformers", _PUBLIC),
                 "xformers.ops.fmha.attn_bias": ("tessera._xformers_masks", _PUBLIC)},
    "ring_flash_attn": {"ring_flash_attn": ("tessera.ring_flash_attn", _PUBLIC)},
}
_DEFAULT = ("flash_attn", "xformers")
VERSION = "2.8.3"  # the flash-attn version whose functions these are
XFORMERS_VERSION = "0.0.32"  # the xFormers version whose functions these are
FOLDER = str(pathlib.Path(__file__).parent / "shim")  # for PYTHONPATH: flash_attn, and the metadata of flash-attn
_VERSIONS = {"flash_attn": VERSION, "xformers": XFORMERS_VERSION, "ring_flash_attn": "0.1.8"}


def _alias(name, source, names, package, is_package):
    source = importlib.import_module(source)
    module = types.ModuleType(name, source.__doc__)
    given = {_EVERY: vars(source), _PUBLIC: getattr(source, "__all__", ()), _NONE: ()}[names]
    module.__dict__.update({key: vars(source)[key] for key in given if not key.startswith("__")})
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
    """Makes imports of flash_attn, flash_attn_interface (version 3) and xformers.ops give tessera's modules. A second
    call changes nothing. docs/python.md lists the names that these modules have.

    packages: "flash_attn" (both versions), "xformers" or "ring_flash_attn"; default: the first two.
    With flash_attn, FOLDER joins the end of sys.path, so that libraries that look for the distribution flash-attn, as
    transformers does, find version 2.8.3. They often look once, so call this before they are imported. There is no
    distribution of xformers. Raises RuntimeError when the real package is imported already."""
    for package in packages:
        if package not in PACKAGES:
            raise ValueError(f"packages: expected {' or '.join(map(repr, PACKAGES))}, got {package!r}")
    wanted = [package for package in packages or _DEFAULT if not installed(package)]
    for package in wanted:
        for name in PACKAGES[package]:
            if name in sys.modules:
                others = ", ".join(f'"{other}"' for other in _DEFAULT if other != package)
                raise RuntimeError(f"{name} is imported already; call tessera.compat.install() before, or "
                                   f"tessera.compat.install({others}) without it")
    if "flash_attn" in wanted and FOLDER not in sys.path:
        sys.path.append(FOLDER)
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
            if package == "flash_attn" and FOLDER in sys.path:
                sys.path.remove(FOLDER)


if __name__ == "__main__":
    print(FOLDER)
