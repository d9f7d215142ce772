# SPDX-License-Identifier: Apache-2.0
"""tessera on PyTorch tensors. Importing this registers the operators tessera::* with PyTorch and changes nothing else.

    attention, varlen_attention     tessera's own meaning: causal is named, LSE is returned and differentiable
    attention_weights               the weights themselves, by PyTorch's own operators
    scaled_dot_product_attention    torch's signature and meaning: top-left causal, [batch, heads, len, head_dim]
    context_parallel_attention      one sequence over the processes of a group; shard_sequence and others beside it
    context_parallel                the context of torch.distributed.tensor.experimental, for SDPA inside of it
    register_provider               the name "tessera" for torch.nn.attention.activate_flash_attention_impl
"""
from . import _flops  # noqa: F401 - registers what FlopCounterMode counts
from ._attention import attention, attention_weights, varlen_attention
from ._context_parallel import (ContextParallelPlan, balance_documents, context_parallel, context_parallel_attention,
                                context_parallel_plan, context_parallel_unshard, replace_context_parallel,
                                sequence_positions, shard_sequence, unshard_sequence)
from ._provider import register_provider
from .sdpa import scaled_dot_product_attention

__all__ = ["ContextParallelPlan", "attention", "attention_weights", "balance_documents", "context_parallel",
           "context_parallel_attention", "context_parallel_plan", "context_parallel_unshard", "register_provider",
           "replace_context_parallel", "scaled_dot_product_attention", "sequence_positions", "shard_sequence",
           "unshard_sequence", "varlen_attention"]
