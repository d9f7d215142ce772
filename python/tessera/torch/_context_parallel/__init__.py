# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence whose rows are spread over the processes of a group."""
from __future__ import annotations

import math
import typing
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.jit import is_tracing

from .. import _attention, _operators as _kernels, _sinks
from .._tensors import expect_tensor, is_plain
from . import _flops, _groups, _operators, _order, _setup  # noqa: F401 - _flops registers what FlopCounterMode counts
from ._order import balance_documents
from ._report import ContextParallelPlan, plan_of as context_parallel_plan
from ._sdpa import context_parallel, context_parallel_unshard, replace_context_parallel

Group = typing.Union["dist.ProcessGroup", "dist.device_mesh.DeviceMesh", None]
Order = typing.Union[str, typing.Sequence[int], Tensor]

if typing.TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Options(typing.TypedDict, total=False):
        """The keywords of context_parallel_attention() but for return_lse."""
        order: Order
        causal: str | bool | None
        window: tuple[int | None, int | None] | None
        scale: float | None
        softcap: float
        sinks: Tensor | None
        cu_seqlens: Tensor | typing.Sequence[int] | None
        gradient_blocks: int | None
        steps: int | None
        kernel: str | None
        timeout: float
        check: bool

_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_CAUSAL = {None: False, False: False, True: True, "bottom-right": True, "top-left": True}
__all__ = ["ContextParallelPlan", "balance_documents", "context_parallel", "context_parallel_attention",
           "context_parallel_plan", "context_parallel_unshard", "replace_context_parallel", "sequence_positions",
           "shard_sequence", "unshard_sequence"]


@overload
def context_parallel_attention(q: Tensor, k: Tensor, v: Tensor, group: Group = None, *,
                               return_lse: Literal[False] = False, **options: Unpack[_Options]) -> Tensor: ...


@overload
def context_parallel_attention(q: Tensor, k: Tensor, v: Tensor, group: Group = None, *, return_lse: Literal[True],
                               **options: Unpack[_Options]) -> tuple[Tensor, Tensor]: ...


def context_parallel_attention(q: Tensor, k: Tensor, v: Tensor, group: Group = None, *, order: Order = "zigzag",
                               causal: str | bool | None = None,
                               window: tuple[int | None, int | None] | None = None, scale: float | None = None,
                               softcap: float = 0.0, sinks: Tensor | None = None,
                               cu_seqlens: Tensor | typing.Sequence[int] | None = None, return_lse: bool = False,
                               gradient_blocks: int | None = None, steps: int | None = None,
                               kernel: str | None = None, timeout: float = 300.0,
                               check: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one sequence whose rows are spread over the ranks of a group; differentiable, torch.compile.

    q, k, v: this rank's rows, [batch, rows, heads, head_dim] or [rows, heads, head_dim]; as many rows on every rank.
        Under autocast they are cast as the inputs of torch's attention are.
    group: a process group, a DeviceMesh of one dimension, or None for the default group. gloo and NCCL.
    order: which rows a rank holds. "zigzag": the sequence in 2 * ranks chunks, of which rank r has the chunks r and
        2 * ranks - 1 - r; "contiguous": one chunk each; or a permutation int64 [total], row i of rank r being the
        position order[r * rows + i], best on the CPU (balance_documents() makes one). A rank makes small calls if its
        rows are not consecutive.
    causal: None, or True, "bottom-right" or "top-left", which are one mask here.
    window, scale, softcap, sinks, kernel: as in attention(). Each rank gets the gradient of the sinks of its own rows.
    cu_seqlens: offsets of packed documents over the whole sequence, [documents + 1], the same on every rank, best on
        the CPU. Documents may cross ranks. Rows past the last offset get O 0 and LSE -inf. Needs batch 1 or none.
    gradient_blocks: into how many equal blocks of rows the backward is cut. dQ, dK and dV then have the same bits on
        every number of ranks whose rows consist of whole blocks, a group of one among them. Default: the runs of rows
        that a rank holds, which is the fastest.
    steps: into how many groups the key heads are cut, one of which travels while another is computed. No bit depends
        on it. Default: 1; on CUDA by the bytes of a rank's K and V, up to 8.
    timeout: seconds after which a rank that waits for another raises.
    check: True: ranks compare the arguments in every call. They always do with gloo. With NCCL, False compares them in
        the first call of its kind, since the host waits for the answer.
    Returns o like q with head_dim_v, and with return_lse (o, lse), lse float32 [batch, heads_q, rows] or [heads_q,
        rows]. docs/context-parallel.md says which bits are those of one process.
    Raises ValueError on every rank when one refuses the call or the arguments differ; it names the argument and the
        ranks. RuntimeError when a rank does not come in time or has ended. tessera.Unsupported."""
    arguments, added, gradients = _groups.checked(group, timeout, _setup.FUNCTION, lambda: _arguments(
        q, k, v, group, order, causal, window, scale, softcap, sinks, cu_seqlens, gradient_blocks, steps, kernel, timeout,
        check))
    if torch.compiler.is_compiling():
        o, lse, _ = _operators.forward(*arguments)
    else:
        o, lse = _explained(arguments, gradients)
    if added is not None:
        o, lse = _sinks.added(o, lse, added, False)
    offsets = arguments[5]
    if sinks is not None and offsets is not None:  # rows of no document have no sinks
        positions = _positions(arguments[0].shape[1] * dist.get_world_size(_groups.resolved(group)), group, order, "q")
        lse = torch.where((positions < offsets[-1].to(positions.device)).to(lse.device), lse, float("-inf"))
    if q.dim() != 4:
        o, lse = o[0], lse[0]
    return (o, lse) if return_lse else o


def _arguments(q, k, v, group, order, causal, window, scale, softcap, sinks, cu_seqlens, gradient_blocks, steps, kernel,
               timeout, check):
    """(the arguments of the operator, sinks to add afterwards or None, whether a backward may follow). Raises ValueError
    for what this rank can check alone."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, tensor)
        if not is_plain(tensor) and not torch.compiler.is_compiling() and hasattr(tensor, "placements"):
            raise ValueError(f"{name}: expected this rank's rows as a torch.Tensor, got a DTensor; to_local() gives them")
    if not torch.compiler.is_compiling() and _attention._forward_mode():  # the operators would drop tangents
        raise NotImplementedError(_kernels.NO_FORWARD_MODE)
    q, k, v, _ = _attention._cast(q, k, v)
    if q.dim() != 4:
        q, k, v = (t[None] for t in (q, k, v))
    if not isinstance(causal, (str, bool, type(None))) or causal not in _CAUSAL:
        raise ValueError(f"causal: expected None, True, 'bottom-right' or 'top-left', got {causal!r}")
    name = _groups.name_of(group)
    left, right = _attention.window_sides(window)
    if _CAUSAL[causal] and right > 0:
        right = -1  # the causal mask is narrower
    _positive("gradient_blocks", gradient_blocks)
    _positive("steps", steps)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout: expected a number of seconds, got {timeout!r}")
    permutation = None if isinstance(order, str) else _order.tensor_of(order)
    offsets = None if cu_seqlens is None else torch.as_tensor(cu_seqlens)
    kernel = _attention.kernel_name(kernel)
    added = None
    if sinks is not None:
        sinks = _sinks.checked(sinks, q, q.shape[2])
        if q.device.type != "cpu":
            sinks, added = None, sinks
    given = added if sinks is None else sinks
    gradients = bool(_attention._needs_gradients((q, k, v, given)))
    keeps = bool(_attention._needs_gradients((q, k, v, None))) and _kernels.keeps_residual(q, 0.0, kernel)
    arguments = (
        q, k, v, sinks, permutation, offsets, name, "" if permutation is not None else order, _CAUSAL[causal], left,
        right, _attention.number("scale", scale), _attention.number("softcap", softcap), kernel, gradient_blocks or 0,
        steps or 0, float(timeout), check, gradients, "" if given is None else f"[{given.shape[0]}] {given.dtype}", keeps)
    return arguments, added, gradients


def _explained(arguments, gradients):
    """(o, lse) of an eager call. If no mode or transform observes the dispatcher, the operator's function is called
    directly, which takes the host less time. Raises tessera.Unsupported if a kernel refuses the tensors."""
    try:
        if is_tracing() or _attention._functorch_active() or _dispatch_modes():
            return _operators.forward(*arguments)[:2]
        if gradients:
            return _operators.EagerContextParallel.apply(*arguments[:4], arguments[4:])
        return _operators.run_forward(*arguments)[:2]
    except (RuntimeError, AttributeError) as error:
        if str(error).startswith(_setup.FUNCTION):  # a rank that did not come
            raise
        raise _attention._explained(error, _kernels.Arguments(*arguments[:3])) from None


def _positive(name, value):
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}: expected an integer from 1 on or None, got {value!r}")


def sequence_positions(total: int, group: Group = None, *, order: Order = "zigzag") -> Tensor:
    """The positions in the sequence of this rank's rows, int64 [total / ranks], for rotary embeddings and labels.

    total: the rows of the whole sequence. group, order: as in context_parallel_attention(). Raises ValueError."""
    return _positions(_order.whole_number("total", total, 0), group, order, "total")


def _positions(total, group, order, argument):
    group = _groups.resolved(group)
    return _order.positions_of(order, total, dist.get_world_size(group), argument)[dist.get_rank(group)].clone()


def shard_sequence(tensor: Tensor, group: Group = None, *, dim: int = 1, order: Order = "zigzag") -> Tensor:
    """This rank's rows of a tensor that every rank has whole; differentiable.

    dim: the dimension of the sequence. group, order: as in context_parallel_attention(). Raises ValueError."""
    dim = _dim(tensor, dim)
    positions = _positions(tensor.shape[dim], group, order, "tensor")
    return tensor.index_select(dim, positions.to(tensor.device))


def unshard_sequence(tensor: Tensor, group: Group = None, *, dim: int = 1, order: Order = "zigzag") -> Tensor:
    """The whole sequence in its own order, on every rank, of each rank's rows. It has no gradient.

    tensor: this rank's rows, of one shape on all ranks. dim, group, order: as in shard_sequence(). The ranks compare all
    of these as they do in context_parallel_attention(), with its default timeout. Raises ValueError."""
    dim = _groups.checked(group, 300.0, "unshard_sequence", lambda: _dim(tensor, dim))
    group = _groups.resolved(group)
    ranks = dist.get_world_size(group)
    rows = tensor.detach().movedim(dim, 0).contiguous()
    error, positions = None, torch.arange(0)
    try:
        positions = _order.positions_of(order, rows.shape[0] * ranks, ranks, "tensor").flatten()
    except ValueError as found:
        error = str(found)
    if not torch.compiler.is_compiling():
        message = {"error": error, "tensor": [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")], "dim": dim,
                   "order": order if isinstance(order, str) else _setup.digest(positions.numpy().tobytes())}
        _groups.agree(_groups.name_of(group), message, 300.0, "unshard_sequence", tensor.device.type == "cpu")
    elif error:
        raise ValueError(error)
    whole = rows.new_empty((ranks * rows.shape[0], *rows.shape[1:]))
    dist.all_gather_into_tensor(whole, rows, group=group)
    return whole.index_select(0, positions.argsort().to(whole.device)).movedim(0, dim).contiguous()


def _dim(tensor, dim):
    """`dim` counted from 0, of a tensor. Raises ValueError naming the wrong one."""
    expect_tensor("tensor", tensor)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim: expected a dimension of a tensor {list(tensor.shape)}, got {dim!r}")
    return dim % tensor.dim()
