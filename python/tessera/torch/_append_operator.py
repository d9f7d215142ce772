# SPDX-License-Identifier: Apache-2.0
"""append_kv() as an operator of PyTorch, which says what it writes: for torch.compile and torch.export."""
from typing import Optional

import torch
from torch import Tensor

from .. import _append


@torch.library.custom_op("tessera::append_kv", mutates_args=("k_cache", "v_cache", "out_q"))
def append_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Optional[Tensor],
              kv_lengths: Optional[Tensor], page_table: Optional[Tensor], cache_batch_index: Optional[Tensor],
              cu_seqlens_k: Optional[Tensor], rotary_cos: Optional[Tensor], rotary_sin: Optional[Tensor],
              positions: Optional[Tensor], q: Optional[Tensor], q_positions: Optional[Tensor],
              k_norm: Optional[Tensor], q_norm: Optional[Tensor], out_q: Optional[Tensor], rotary_interleaved: bool,
              norm_eps: float, threads: Optional[int]) -> Tensor:
    """The turned q, or an empty tensor if there is no q, or if out_q has it: a result may not be an argument."""
    turned = _append.append_kv(
        k, v, k_cache, v_cache, slot_mapping=slot_mapping, kv_lengths=kv_lengths, page_table=page_table,
        cache_batch_index=cache_batch_index, cu_seqlens_k=cu_seqlens_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, positions=positions, q=q, q_positions=q_positions, k_norm=k_norm,
        q_norm=q_norm, norm_eps=norm_eps, out_q=out_q, threads=threads)
    return k.new_empty(0) if turned is None or out_q is not None else turned


@append_kv.register_fake
def _(k, v, k_cache, v_cache, slot_mapping, kv_lengths, page_table, cache_batch_index, cu_seqlens_k, rotary_cos,
      rotary_sin, positions, q, q_positions, k_norm, q_norm, out_q, rotary_interleaved, norm_eps, threads):
    if q is None or out_q is not None:
        return k.new_empty(0)
    return torch.empty_like(q, memory_format=torch.contiguous_format)
