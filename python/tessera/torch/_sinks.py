# SPDX-License-Identifier: Apache-2.0
"""Attention sinks on PyTorch tensors: by the kernels, which take them, or from O and LSE of a call without.

A sink is a score without a value: exp(sink) joins the sum of the exponentials of each row of its head. O then keeps the
share exp(LSE) / (exp(LSE) + exp(sink)) = sigmoid(LSE - sink) of itself. LSE has a gradient, so the sinks, q and k get
theirs, on every device and under every transform that attention() takes. In 16 bits O is rounded once more than by
the kernels that tessera.attention() runs with sinks."""
import torch
from torch.compiler import is_compiling

from . import _distributed, _operators
from ._tensors import expect_arguments, expect_tensor


def run(arguments, sinks, with_lse=True, math=False, name="sinks"):
    """_attention.run(), or run_math() with math, with a sink for each query head; None: without. name: the caller's
    name of the sinks.

    In forward mode, under torch.func, for DTensors and in float64 no kernel with sinks runs: kernels take sinks in
    float32. Raises ValueError naming the argument."""
    from . import _attention  # which imports this module
    of_call = _attention.run_math if math else _attention.run
    if sinks is None:
        return of_call(arguments, with_lse)
    plain = expect_arguments(arguments)
    sinks = checked(sinks, arguments.q, arguments.q.shape[1 if arguments.heads_first else -2], name)
    if (math or arguments.q.dtype == torch.float64 or (not plain and _distributed.are_in(arguments))
            or _attention._functorch_active() or _attention._forward_mode()):
        o, lse = added(*of_call(arguments, True), sinks, arguments.heads_first, arguments.cu_seqlens_q)
        return (o, lse) if with_lse else o
    arguments = arguments if is_compiling() else _attention._with_numbers(arguments)
    try:
        inputs = *arguments[:4], sinks
        differentiates = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        keeps = differentiates and _operators.keeps_residual(arguments.q, arguments.dropout_p, arguments.kernel)
        of_kernels = _operators.attention_with_sinks_and_residual if keeps else _operators.attention_with_sinks
        results = of_kernels(*arguments, sinks.float())[:2]
    except (RuntimeError, AttributeError) as error:
        raise _attention._explained(error, arguments) from None
    return results if with_lse else results[0]


def checked(sinks, q, heads_q, name="sinks"):
    """The sinks as a call on q takes them. Raises ValueError naming the argument."""
    expect_tensor(name, sinks)
    if _distributed.are_in((q,)) != _distributed.are_in((sinks,)):
        raise ValueError(f"{name}: expected a {type(q).__name__}, as q is, got a {type(sinks).__name__}")
    if not sinks.is_floating_point():
        raise ValueError(f"{name}: expected a floating dtype, got {str(sinks.dtype).removeprefix('torch.')}")
    if sinks.dim() != 1 or sinks.shape[0] != heads_q:
        raise ValueError(f"{name}: expected shape [{heads_q}], got {list(sinks.shape)} of rank {sinks.dim()}")
    if sinks.device != q.device:
        raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got one on {sinks.device}")
    return sinks


def added(o, lse, sinks, heads_first, cu_seqlens_q=None):
    """(O, LSE) with the sinks [heads_q]. lse: [batch, heads_q, len_q] or [heads_q, total_q]; o: its rows and heads in
    the same order with heads_first, otherwise rows before heads, and head_dim_v. cu_seqlens_q: of a ragged batch, whose
    rows past the last offset have no sinks either."""
    sinks = sinks.to(lse.dtype).unsqueeze(-1)
    # A row that sees no key has LSE -inf, and -inf - -inf is NaN.
    share = torch.sigmoid(lse - sinks.clamp(min=torch.finfo(lse.dtype).min))
    of_rows = share if heads_first else share.transpose(-1, -2)
    o, of_all = (o * of_rows.unsqueeze(-1)).to(o.dtype), torch.logaddexp(lse, sinks)
    if cu_seqlens_q is None:
        return o, of_all
    return o, torch.where(torch.ones_like(lse, dtype=torch.int64).cumsum(-1) <= cu_seqlens_q[-1], of_all, lse)
