# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.tensor.experimental.context_parallel, with tessera's exchange and kernels."""
from __future__ import annotations

import contextlib
import typing

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._tensors import expect_tensor

ORDER = "zigzag"  # PyTorch's own, with its load balancing
_pytorchs = functional.scaled_dot_product_attention


def _of_shards(mesh):
    """A function with the signature of PyTorch's SDPA, whose tensors are this rank's rows."""
    from . import _groups, _setup, context_parallel_attention

    def check(query, key, attn_mask, dropout_p, enable_gqa):
        if attn_mask is not None:
            raise ValueError("attn_mask: expected None inside of context_parallel(), where is_causal is the only mask, "
                             f"got a {type(attn_mask).__name__}")
        if dropout_p:
            raise ValueError(f"dropout_p: expected 0 inside of context_parallel(), got {dropout_p}")
        if query.dim() != 4:
            raise ValueError(f"query: expected [batch, heads, rows of this rank, head_dim], got {list(query.shape)}")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(f"key: expected {query.shape[1]} heads, as query has, without enable_gqa, got {key.shape[1]}")

    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                     enable_gqa=False):
        _groups.checked(mesh, 300.0, _setup.FUNCTION,
                        lambda: check(query, key, attn_mask, dropout_p, enable_gqa))
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        o = context_parallel_attention(q, k, v, mesh, order=ORDER, causal=is_causal or None, scale=scale)
        return o.transpose(1, 2)
    return scaled_dot_product_attention


class _Mode(TorchFunctionMode):
    """Calls `ours` in place of PyTorch's SDPA, under any name by which the caller imported it."""

    def __init__(self, ours):
        super().__init__()
        self.ours = ours

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (self.ours if function is _pytorchs else function)(*args, **(kwargs or {}))


@contextlib.contextmanager
def context_parallel(mesh: torch.distributed.device_mesh.DeviceMesh, *, buffers: list[Tensor] | None = None,
                     buffer_seq_dims: list[int] | None = None,
                     no_restore_buffers: set[Tensor] | None = None) -> typing.Iterator[None]:
    """The context of torch.distributed.tensor.experimental.context_parallel: buffers become this rank's rows, in zig-zag
    order, and scaled_dot_product_attention is attention over the rows of all ranks.

    mesh: a DeviceMesh of one dimension, or a process group. buffers, buffer_seq_dims: tensors that every rank has
        whole, and the dimension of the sequence of each. They may be views of one tensor: each gets memory of its own
        inside, and its old memory, which nothing writes, afterwards. Other views of that memory stay whole.
    no_restore_buffers: those of the buffers that stay cut afterwards.
    The backward belongs inside, too, if activations are recomputed in it. Inside, SDPA takes is_causal, scale and
    enable_gqa; a mask and dropout are refused. Autograd's threads see the function in torch.nn.functional, other
    names for it are replaced in this thread. Raises ValueError that names the argument."""
    from . import _groups, shard_sequence
    buffers, dims = list(buffers or []), list(buffer_seq_dims or [])
    if len(buffers) != len(dims):
        raise ValueError(f"buffer_seq_dims: expected {len(buffers)} dimensions, one for each buffer, got {len(dims)}")
    kept = {id(t) for t in no_restore_buffers or ()}
    if not kept <= {id(t) for t in buffers}:
        raise ValueError("no_restore_buffers: expected tensors that are in buffers, got one that is not")
    for index, buffer in enumerate(buffers):
        expect_tensor(f"buffers[{index}]", buffer)
        if buffer.requires_grad:
            raise ValueError(f"buffers: expected tensors without requires_grad, got one {list(buffer.shape)} with it")
    group = _groups.resolved(mesh)
    with torch.no_grad():
        parts = [shard_sequence(buffer, group, dim=dim, order=ORDER) for buffer, dim in zip(buffers, dims)]
    originals = [None if id(buffer) in kept else buffer.data for buffer in buffers]
    ours, before = _of_shards(group), functional.scaled_dot_product_attention
    try:
        for buffer, part in zip(buffers, parts):
            buffer.data = part
        del parts
        functional.scaled_dot_product_attention = ours
        with _Mode(ours):
            yield
    finally:
        functional.scaled_dot_product_attention = before
        for buffer, original in zip(buffers, originals):
            if original is not None:
                buffer.data = original


def context_parallel_unshard(mesh: torch.distributed.device_mesh.DeviceMesh, buffers: list[Tensor],
                             seq_dims: list[int], load_balancer: None = None) -> list[Tensor]:
    """The whole sequence of each of `buffers`, this rank's rows from inside of context_parallel(), on every rank.

    seq_dims: the dimension of the sequence of each. load_balancer: None, the zig-zag. Raises ValueError."""
    from . import unshard_sequence
    if load_balancer is not None:
        raise ValueError(f"load_balancer: expected None, which is the zig-zag, got a {type(load_balancer).__name__}")
    if len(buffers) != len(seq_dims):
        raise ValueError(f"seq_dims: expected {len(buffers)} dimensions, one for each buffer, got {len(seq_dims)}")
    return [unshard_sequence(buffer, mesh, dim=dim, order=ORDER) for buffer, dim in zip(buffers, seq_dims)]


def replace_context_parallel() -> typing.Callable[[], None]:
    """Makes PyTorch's name for context_parallel() mean tessera's in this process, for programs that import it later:
    accelerate's ParallelismConfig(cp_size=..) does, and transformers' Trainer and TRL by it. Returns a function that
    gives the name back to PyTorch."""
    import torch.distributed.tensor.experimental as experimental
    before = experimental.context_parallel
    experimental.context_parallel = context_parallel

    def restore():
        experimental.context_parallel = before
    return restore
