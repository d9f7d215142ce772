# SPDX-License-Identifier: Apache-2.0
"""decode_block() as an operator of PyTorch, which says what it writes: for torch.compile and torch.export."""
from typing import Optional, Tuple

import torch
from torch import Tensor

from .. import _decode_block
from .._arrays import expect


@torch.library.custom_op("tessera::decode_block", mutates_args=("k_cache", "v_cache", "out"))
def decode_block(x: Tensor, norm: Tensor, w_qkv: Tensor, w_o: Tensor, k_cache: Tensor, v_cache: Tensor,
                 kv_lengths: Tensor, b_qkv: Optional[Tensor], b_o: Optional[Tensor], q_norm: Optional[Tensor],
                 k_norm: Optional[Tensor], rotary_cos: Optional[Tensor], rotary_sin: Optional[Tensor],
                 positions: Optional[Tensor], page_table: Optional[Tensor], cache_batch_index: Optional[Tensor],
                 left_padding: Optional[Tensor], sinks: Optional[Tensor], residual: Optional[Tensor],
                 out: Optional[Tensor], return_attention: bool, norm_eps: float, rotary_interleaved: bool,
                 window_left: Optional[int], scale: Optional[float], softcap: float, way: Optional[str],
                 early_weights: bool, threads: Optional[int]) -> Tuple[Tensor, Tensor, Tensor]:
    """(out, o, lse), with empty tensors for results that are not wanted, and for out if the caller has given it: a
    result may not be an argument."""
    results = _decode_block.decode_block(
        x, norm, w_qkv, w_o, k_cache, v_cache, kv_lengths, b_qkv=b_qkv, b_o=b_o, q_norm=q_norm, k_norm=k_norm,
        norm_eps=norm_eps, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        positions=positions, page_table=page_table, cache_batch_index=cache_batch_index, left_padding=left_padding,
        window_left=window_left, scale=scale, softcap=softcap, sinks=sinks, residual=residual, out=out,
        return_attention=return_attention, way=way, early_weights=early_weights, threads=threads)
    result, o, lse = results if return_attention else (results, x.new_empty(0), x.new_empty(0, dtype=torch.float32))
    return x.new_empty(0) if out is not None else result, o, lse


@decode_block.register_fake
def _(x, norm, w_qkv, w_o, k_cache, v_cache, kv_lengths, b_qkv, b_o, q_norm, k_norm, rotary_cos, rotary_sin, positions,
      page_table, cache_batch_index, left_padding, sinks, residual, out, return_attention, *_):
    result = x.new_empty(0 if out is not None else x.shape)
    if not return_attention:
        return result, x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    head_dim = k_cache.shape[3]
    heads = w_o.shape[1] // head_dim
    return result, x.new_empty(x.shape[0], heads, head_dim), x.new_empty(x.shape[0], heads, dtype=torch.float32)


def call(arrays, caches, out, return_attention, stream, workspace, options):
    """decode_block() under torch.compile. arrays: the inputs that were given, by name."""
    for name, value in (("stream", stream), ("workspace", workspace)):
        if value is not None:
            expect(name, "None under torch.compile", value)
    always = ("x", "norm", "w_qkv", "w_o", "kv_lengths")
    optional = {name: arrays.get(name) for name in (
        "b_qkv", "b_o", "q_norm", "k_norm", "rotary_cos", "rotary_sin", "positions", "page_table", "cache_batch_index",
        "left_padding", "sinks", "residual")}
    result, o, lse = decode_block(**{name: arrays[name] for name in always}, **caches, **optional, out=out,
                                  return_attention=return_attention, **options)
    result = result if out is None else out
    return (result, o, lse) if return_attention else result
