# SPDX-License-Identifier: Apache-2.0
"""tessera on PyTorch tensors. Importing this loads the operators into PyTorch, and kernels for one operator of PyTorch's on
the CPU and another on CUDA, which have none there and which PyTorch never calls there (_node.py); it changes nothing else.

    attention, varlen_attention     tessera's own words: causal is named, LSE is given and differentiable
    scaled_dot_product_attention    torch's signature and meaning: top-left causal, [batch, heads, len, head_dim]
    register_provider               the name "tessera" for torch.nn.attention.activate_flash_attention_impl
"""
from ._attention import attention, varlen_attention
from .sdpa import register_provider, scaled_dot_product_attention

__all__ = ["attention", "register_provider", "scaled_dot_product_attention", "varlen_attention"]
