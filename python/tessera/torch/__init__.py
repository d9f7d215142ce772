# SPDX-License-Identifier: Apache-2.0
"""tessera on PyTorch tensors. Importing this registers the operators tessera::* with PyTorch and changes nothing else.

    attention, varlen_attention     tessera's own meaning: causal is named, LSE is returned and differentiable
    attention_weights               the weights themselves, by PyTorch's own operators
    scaled_dot_product_attention    torch's signature and meaning: top-left causal, [batch, heads, len, head_dim]
    register_provider               the name "tessera" for torch.nn.attention.activate_flash_attention_impl
"""
from . import _flops  # noqa: F401 - registers what FlopCounterMode counts
from ._attention import attention, attention_weights, varlen_attention
from ._provider import register_provider
from .sdpa import scaled_dot_product_attention

__all__ = ["attention", "attention_weights", "register_provider", "scaled_dot_product_attention", "varlen_attention"]
