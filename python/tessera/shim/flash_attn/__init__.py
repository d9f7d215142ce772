# SPDX-License-Identifier: Apache-2.0
"""flash_attn for programs with this folder in PYTHONPATH: the modules that tessera.compat.install() gives."""
import sys

from tessera import compat

del sys.modules[__name__]  # install() puts tessera's module there, and that is the one that the import returns
compat.install("flash_attn")
