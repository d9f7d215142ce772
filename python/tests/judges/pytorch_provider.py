# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: PyTorch's scaled_dot_product_attention runs on tessera wherever it would choose its flash kernel."""
import importlib
import sys
import types

import sample

# Modules in which a test file newer than this PyTorch looks for names that it does not have.
HELPERS = ("common_cuda", "common_utils", "common_xpu")


def stand_in(name):
    """For a name that is missing: a constant is false, a decorator of tests does nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return False if name.isupper() else lambda *arguments, **_: arguments[0] if arguments else (lambda test: test)


def pytest_configure(config):
    for name in HELPERS:
        try:
            module = importlib.import_module("torch.testing._internal." + name)
        except ImportError:
            module = sys.modules["torch.testing._internal." + name] = types.ModuleType(name)
        module.__getattr__ = stand_in
    import tessera.torch
    from tessera.torch import _provider
    from torch.nn.attention import activate_flash_attention_impl
    _provider._forward = sample.counted(_provider._forward)
    tessera.torch.register_provider()
    activate_flash_attention_impl("tessera")
