# SPDX-License-Identifier: Apache-2.0
"""flash_attn_interface, the module of version 3, for programs with this folder in PYTHONPATH."""
import sys

from tessera import compat

del sys.modules[__name__]
compat.install("flash_attn")
