# SPDX-License-Identifier: Apache-2.0
"""Which models of transformers are written for the masks of "sdpa": for tessera.transformers.

A model that is not has layers of its own, which add the mask to the scores and are causal by the mask alone, or does not
say which of its layers are causal. It gets the masks of "eager", and a layer of it without a mask has none."""
import sys

import torch

_FAMILIES = "transformers.models."
# They have no "sdpa" for want of a softcap or of sinks, and are written for its masks all the same.
_WITHOUT_A_FEATURE = {"gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "t5gemma", "vaultgemma"}
_known: dict[str, bool] = {}


@torch.compiler.assume_constant_result
def take_masks_of_sdpa(module):
    """Whether the models of a module of transformers do, which has their configuration or their layers; True for any
    other module. module: its name."""
    if not module.startswith(_FAMILIES):
        return True
    package = module.rpartition(".")[0]
    if package not in _known:
        _known[package] = package[len(_FAMILIES):] in _WITHOUT_A_FEATURE or _some_has_sdpa(package)
    return _known[package]


def _some_has_sdpa(package):
    return any(getattr(kind, "_supports_sdpa", False)
               for name, module in list(sys.modules.items()) if name.startswith(f"{package}.modeling_")
               for kind in vars(module).values() if getattr(kind, "__module__", None) == name)
