# SPDX-License-Identifier: Apache-2.0
"""install() makes `import flash_attn` give tessera in this process; importing this module changes nothing."""
import importlib
import sys
import types

# Name in sys.modules -> our module.
MODULES = {"flash_attn": "tessera.flash_attn", "flash_attn.flash_attn_interface": "tessera.flash_attn",
           "flash_attn_interface": "tessera.flash_attn_3"}
VERSION = "2.8.3"  # the flash-attn version whose functions these are


def _alias(name, source):
    module = types.ModuleType(name, source.__doc__)
    module.__dict__.update({key: value for key, value in vars(source).items() if not key.startswith("__")})
    module.__version__ = VERSION
    module.__tessera__ = source.__name__
    return module


def installed() -> bool:
    return hasattr(sys.modules.get("flash_attn"), "__tessera__")


def install() -> None:
    """Makes `import flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn_interface` (version 3) give
    tessera.flash_attn and tessera.flash_attn_3. A second call changes nothing.

    Libraries that look for the distribution flash-attn instead of the module, as transformers does, do not see it: use
    tessera.transformers there. Raises RuntimeError when the real flash_attn is imported already."""
    if installed():
        return
    for name in MODULES:
        if name in sys.modules:
            raise RuntimeError(f"{name} is imported already; call tessera.compat.install() before")
    for name, source in MODULES.items():
        sys.modules[name] = _alias(name, importlib.import_module(source))
    package = sys.modules["flash_attn"]
    package.__path__ = []  # marks a package, so that `import flash_attn.x` raises ModuleNotFoundError
    package.flash_attn_interface = sys.modules["flash_attn.flash_attn_interface"]


def uninstall() -> None:
    """Undoes install(). Names that were imported from the modules stay."""
    if installed():
        for name in MODULES:
            sys.modules.pop(name, None)
