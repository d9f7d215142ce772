# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's hopper/test_flash_attn.py against tessera.flash_attn_3: the text of its checkout, on any device."""
import importlib
import os
import pathlib
import sys

import flash_attention as suite
from tessera import compat

# FlashAttention-3 may be built without these, and its tests then leave them out. LOCAL means attention_chunk too, and
# HDIM64 values of 512 columns: neither is in tessera.
LEFT_OUT_BY_BUILD = ("FP8", "LOCAL", "HDIM64", "PAGEDKV", "APPENDKV")
ASKED = ("test_flash_attn_output", "test_flash_attn_varlen_output", "test_flash_attn_cluster")


def before_the_text():
    """Replaced where a suite of these tests needs more than install() gives (kvcache.py)."""


def load(checkout: pathlib.Path, device: str):
    """The test module, ours in the place of flash_attn_interface; its padding and reference are the checkout's own."""
    for feature in LEFT_OUT_BY_BUILD:
        os.environ[f"FLASH_ATTENTION_DISABLE_{feature}"] = "TRUE"
    compat.install()
    before_the_text()
    folder = checkout / "hopper"
    sys.path.insert(0, str(folder))
    importlib.import_module("padding")
    importlib.import_module("test_util")
    path = folder / "test_flash_attn.py"
    text = path.read_text()
    if device != "cuda":
        suite.pretend_cuda()
        text = text.replace('"cuda"', repr(device))
    return suite.load_file("judged_test_flash_attn_3", path, text)


def is_asked(function, case):
    return function in ASKED and not case.get("has_qv")  # qv is not in tessera
