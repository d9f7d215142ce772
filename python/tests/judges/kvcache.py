# SPDX-License-Identifier: Apache-2.0
"""test_flash_attn_kvcache of flash-attention 2 and of FlashAttention-3 against tessera: their text, on the CPU or CUDA.

Rotary embeddings of the reference are the checkout's formula (apply_rotary_emb_torch), computed in float32 as
flash-attention's kernel does. Both files draw one dtype, fp16 and bf16; half of the cases here have the other one."""
import os
import sys

import flash_attention
import flash_attention_3
import torch


def apply_rotary_emb(checkout):
    """The signature that the tests use, over the checkout's formula."""
    text = (checkout / "flash_attn" / "layers" / "rotary.py").read_text()
    begin = text.index("def rotate_half(")
    names = {"torch": torch}
    exec("from einops import rearrange, repeat\n" + text[begin:text.index("class ApplyRotaryEmb")], names)

    def apply(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
        offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(len(x))
        turned = []
        for rows, offset in zip(x, offsets.tolist()):
            at = slice(offset, offset + len(rows))
            turned.append(names["apply_rotary_emb_torch"](rows[None].float(), cos[at].float(), sin[at].float(),
                                                          interleaved))
        return torch.cat(turned).to(x.dtype)
    return apply


def _asked(name, case):
    return name == "test_flash_attn_kvcache"


class Of2:
    @staticmethod
    def load(checkout, device):
        module = flash_attention.load(checkout, device)
        module.apply_rotary_emb = apply_rotary_emb(checkout)
        return module

    is_asked = staticmethod(_asked)


class Of3:
    """fp8 is left out. The file draws windows only where a build has attention_chunk too, which tessera refuses: the
    cases are drawn with windows, and the tests then leave attention_chunk out."""

    @staticmethod
    def load(checkout, device):
        flash_attention_3.LEFT_OUT_BY_BUILD = ("FP8",)
        for feature in ("LOCAL", "HDIM64", "PAGEDKV", "APPENDKV"):
            os.environ.pop(f"FLASH_ATTENTION_DISABLE_{feature}", None)
        flash_attention_3.before_the_text = lambda: setattr(sys.modules["flash_attn.layers.rotary"],
                                                            "apply_rotary_emb", apply_rotary_emb(checkout))
        module = flash_attention_3.load(checkout, device)
        module.DISABLE_LOCAL = True  # from here on; the parameters of the tests are drawn already
        return module

    is_asked = staticmethod(_asked)


def with_both_dtypes(drawn):
    """Every second case with the other dtype of 16 bits."""
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
    return [(function, {**case, "dtype": other[case["dtype"]]} if number % 2 else case)
            for number, (function, case) in enumerate(drawn)]
