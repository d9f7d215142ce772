# SPDX-License-Identifier: Apache-2.0
"""The milliseconds that the cost model predicts for a call, without a GPU, as `tessera roofline --gpus` shows them."""
from __future__ import annotations

import ctypes
import functools
import typing

import torch

from ... import _native
from . import _order

_DTYPES = {torch.bfloat16: _native.BF16, torch.float16: _native.FP16, torch.float32: _native.FP32}


def milliseconds(total, count, batch, heads, head_dims, dtype, order, causal, window, cu_seqlens, copies,
                 device) -> typing.List[typing.Optional[float]]:
    """[forward, backward] on GPUs of this name, or of the name of the current one; None where nothing is predicted.
    count: of GPUs; heads: of q and of k; window: -1 for no limit. Raises ValueError for a name that the model does not
    know."""
    name = _name_of_the_current_gpu() if device is None else device
    if name is None or dtype not in _DTYPES:
        return [None, None]
    lengths = None
    if cu_seqlens is not None:
        offsets = _order.offsets_of(cu_seqlens, total)
        lengths = [end - begin for begin, end in zip(offsets, offsets[1:]) if end > begin]
        if offsets[-1] != total or isinstance(order, str) or not torch.equal(
                _order.tensor_of(order), _order.balance_documents(cu_seqlens, count, causal=causal)):
            return [None, None]
    elif not isinstance(order, str):
        return [None, None]
    if causal and lengths is None and (window[0] < 0) != (order == "zigzag"):
        return [None, None]
    if not causal and order == "zigzag":
        return [None, None]
    problem = _native.new_problem()
    problem.dtype, problem.batch, problem.len_q, problem.len_kv = _DTYPES[dtype], batch, total, total
    problem.heads_q, problem.heads_kv = heads
    problem.head_dim, problem.head_dim_v = head_dims
    problem.causal = int(causal)
    for side, size in zip(("window_left", "window_right"), window):
        setattr(problem, side, _native.UNBOUNDED if size < 0 or side == "window_right" and causal else size)
    if lengths is not None:
        problem.ragged, problem.batch, problem.total_q, problem.total_kv = 1, len(lengths), total, total
        problem.len_q = problem.len_kv = max(lengths)
    ranks = _native.sized(_native.Ranks)
    # A forward before a backward writes the residual.
    ranks.ranks, ranks.nccl, ranks.o_residual = count, int(not copies), int(dtype != torch.float32)
    if lengths is not None:
        ranks.lengths, ranks.documents = (ctypes.c_int64 * len(lengths))(*lengths), len(lengths)
    try:
        return [_milliseconds_of(problem, ranks, passing, name) for passing in (_native.FORWARD, _native.BACKWARD)]
    except ValueError as error:  # also what no kernel runs
        if str(error).startswith("machine: ") and device is not None:
            raise ValueError(f"device: {str(error).split(': ', 1)[1]}") from None
        return [None, None]


def _milliseconds_of(problem, ranks, passing, name):
    found = _native.sized(_native.RanksPrediction)
    _native.check(_native.library().tessera_predict_ranks(
        ctypes.byref(problem), ctypes.byref(ranks), passing, name.encode(), ctypes.byref(found)))
    return found.ms


@functools.lru_cache(maxsize=None)
def _name_of_the_current_gpu():
    """"NVIDIA H100 80GB HBM3" is "h100"; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().replace("NVIDIA", "").split()
    return "-".join(words[:2] if words[1:2] == ["PCIe"] else words[:1]).lower() or None
