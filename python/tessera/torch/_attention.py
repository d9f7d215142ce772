# SPDX-License-Identifier: Apache-2.0
"""Attention on PyTorch tensors, dense and ragged, and the choice of the operator that a call runs."""
from __future__ import annotations

import operator
import typing
from typing import Literal, overload

import torch
import torch.autograd.forward_ad
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.jit import is_tracing

from .. import _native
from . import _distributed, _errors, _functorch, _math, _operators, _sinks
from ._masks import causal_and_bias, causal_number
from ._operators import Arguments
from ._tensors import CausalBias, expect_arguments, expect_tensor, under_autocast

if typing.TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Options(typing.TypedDict, total=False):
        """The keywords of attention() and varlen_attention() but for return_lse."""
        causal: str | bool | None
        window: tuple[int | None, int | None] | None
        scale: float | None
        softcap: float
        alibi_slopes: Tensor | None
        sinks: Tensor | None
        dropout_p: float
        seed: int | Tensor | None
        deterministic: bool
        kernel: str | None
        math: bool

    class _DenseOptions(_Options, total=False):
        bias: Tensor | None
        mask: Tensor | None
        layout: str

    class _RaggedOptions(_Options, total=False):
        max_len_q: int | None
        max_len_kv: int | None

_forward_o, _with_gradient = _operators.forward_o, _operators.EagerFewAttention.apply
_FLOATS = frozenset((type(None), float))
# PyTorch documents no way to ask these two. If one is missing the answer is yes, which costs time and is never wrong.
_functorch_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def _forward_mode():
    """Whether tensors may have tangents, which no kernel computes and operators without a gradient would drop."""
    return getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0


def _needs_gradients(arguments):
    q, k, v, bias = arguments[:4]
    return is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad
                                  or (bias is not None and bias.requires_grad))


def number(name, value):
    """`value` as a float; None and a number of a compiled graph stay as they are. Raises ValueError for a
    value that is no number or too large for a float, and for a tensor that requires a gradient: it would get none."""
    if value is None or isinstance(value, torch.SymFloat):
        return value
    if isinstance(value, torch.Tensor) and value.requires_grad and is_grad_enabled():
        raise ValueError(f"{name}: expected a number, got a tensor with requires_grad, which gets no gradient here")
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        shown = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
        raise ValueError(f"{name}: expected a number that is finite in fp32, got {shown}") from None


def _with_numbers(arguments):
    """Arguments whose scale, softcap and dropout_p are floats, as the operators' schema has them."""
    if type(arguments.scale) in _FLOATS and type(arguments.softcap) is type(arguments.dropout_p) is float:
        return arguments
    return arguments._replace(**{name: number(name, getattr(arguments, name))
                                 for name in ("scale", "softcap", "dropout_p")})


def _explained(error, arguments):
    """The exception to raise for `error`, which an operator raised."""
    if isinstance(error, NotImplementedError):  # the dispatcher found no kernel for these tensors
        if _forward_mode():
            return NotImplementedError(_operators.NO_FORWARD_MODE)
        return _errors.without_kernel(dict(zip(Arguments._fields, arguments[:_operators.TENSORS])))
    return _errors.translated(error)


def run(arguments, with_lse=True):
    """(O, LSE), or O without with_lse, of the operators' Arguments.

    A graph gets the operator that has a gradient. An eager call runs one without where no gradient is wanted, and an
    autograd.Function of its own where one is, since both take a fraction of the time.
    Raises ValueError naming the argument; tessera.Unsupported, tessera.DeviceUnavailable."""
    plain = expect_arguments(arguments)
    compiling = is_compiling()
    if not compiling:  # a graph may have symbols there
        arguments = _with_numbers(arguments)
    if not plain and _distributed.are_in(arguments):
        return _distributed.run(lambda parts: run(parts, with_lse), arguments, _distributed.of_o_and_lse(arguments))
    try:
        if compiling or is_tracing():
            keeps = _needs_gradients(arguments) and _operators.keeps_residual(arguments.q, arguments.dropout_p,
                                                                              arguments.kernel)
            results = (_operators.attention_with_residual if keeps else _operators.attention)(*arguments)
        elif _functorch_active():
            results = _functorch.attention(*arguments)
        elif _needs_gradients(arguments) or _forward_mode():
            results = _operators.EagerAttention.apply(*arguments[:4], arguments[4:])
        else:
            results = _operators.forward(*arguments)
    except (RuntimeError, AttributeError) as error:
        raise _explained(error, arguments) from None
    return results[:2] if with_lse else results[0]


def run_math(arguments, with_lse=True):
    """run() by PyTorch's own operators (_math.py). Raises ValueError naming the argument."""
    if arguments.kernel is not None:
        raise ValueError(f"kernel: expected None with math=True, got {arguments.kernel!r}")
    if not expect_arguments(arguments) and _distributed.are_in(arguments):
        return _distributed.run(lambda parts: run_math(parts, with_lse), _with_numbers(arguments),
                                _distributed.of_o_and_lse(arguments))
    try:
        return _math.attention(_with_numbers(arguments), with_lse)
    except RuntimeError as error:
        raise _errors.translated(error) from None


def run_few(q, k, v, causal, heads_first, scale, window_left=-1, window_right=-1):
    """O of a call with these arguments only. They have the operators' types, except that scale may be any number.

    An eager call on plain tensors runs an operator with few arguments, which takes the least time. All other calls go
    through run(), which explains its choices."""
    if not (is_compiling() or is_tracing() or _functorch_active() or _forward_mode()) and (
            type(q) is type(k) is type(v) is Tensor and (scale is None or type(scale) is float)):
        try:
            if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                return _with_gradient(q, k, v, (causal, heads_first, scale, window_left, window_right))
            return _forward_o(q, k, v, causal, heads_first, scale, window_left, window_right)
        except (RuntimeError, AttributeError) as error:
            raise _explained(error, Arguments(q, k, v)) from None
    return run(Arguments(q, k, v, causal=causal, window_left=window_left, window_right=window_right, scale=scale,
                         heads_first=heads_first), False)


def _integer(value):
    """`value` as an integer (of Python, NumPy or a compiled graph), or None when it is none."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


@torch.compiler.assume_constant_result
def _backward_may_redraw_seed():
    """Whether AOTAutograd may recompute a random number in the backward of the graph that is being traced: its settings
    or torch.autograd.graph.region_activation_memory_budget ask for less memory."""
    import torch._functorch.config as config
    import torch.fx.traceback as traceback
    annotations = getattr(traceback, "current_meta", {}).get("custom") or {}
    of_region = annotations.get(getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None))
    budget = getattr(config, "activation_memory_budget", 1) if of_region is None else of_region
    return (budget < 1 or getattr(config, "aggressive_recomputation", False)
            or not getattr(config, "ban_recompute_not_in_allowlist", True))


def seed_tensor(seed, dropout_p):
    """int64 [1] in host memory, or None without dropout. Without a seed one is drawn from torch's CPU generator.

    Raises ValueError where a compiled graph would draw it, and might draw another one for its backward."""
    if seed is None:
        if dropout_p == 0:
            return None
        if is_compiling() and is_grad_enabled() and _backward_may_redraw_seed():
            raise ValueError("seed: expected an integer or a tensor, since a graph compiled with an activation memory "
                             "budget under 1 may draw another seed for its backward, got None")
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    if isinstance(seed, torch.Tensor):
        expect_tensor("seed", seed)
        if seed.numel() == 1:
            return None if dropout_p == 0 else seed.reshape(1)
    number = _integer(seed)
    if number is None or not -2**63 <= number < 2**64:
        raise ValueError(f"seed: expected an integer of 64 bits or a tensor with one, got {seed!r}")
    if dropout_p == 0:
        return None
    if isinstance(number, int) and number >= 2**63:
        number -= 2**64  # the int64 of the same bits
    return torch.full((1,), number, dtype=torch.int64, device="cpu")


def window_sides(window):
    if window is None:
        return -1, -1
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window: expected None or (left, right), got {window!r}") from None
    return _bound("window", left), _bound("window", right)


def _bound(name, number):
    """A length or a window side for the operators: an integer from 0 on, or -1 (no limit, unknown) for None."""
    if number is None:
        return -1
    found = _integer(number)
    if found is None or found < 0:
        raise ValueError(f"{name}: expected an integer from 0 on or None, got {number!r}")
    if isinstance(found, int) and found >= 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {number!r}")
    return found


def kernel_name(kernel):
    """The name of the forward kernel, for a name with or without its pass."""
    if kernel is None:
        return None
    if not isinstance(kernel, str):
        raise ValueError(f"kernel: expected a name or None, got {kernel!r}")
    name = kernel.removesuffix(".forward") + ".forward"
    if not is_compiling() and name not in _native.kernel_names():
        names = ", ".join(n for n in _native.kernel_names() if n.endswith(".forward"))
        raise ValueError(f"kernel: expected one of {names}, or one without its pass, got {kernel!r}")
    return name


def no_gradient(name, tensor):
    """Raises ValueError unless `tensor` is None or a tensor that requires no gradient."""
    if tensor is None:
        return
    expect_tensor(name, tensor)
    if tensor.requires_grad and is_grad_enabled():
        raise ValueError(f"{name}: expected a tensor without requires_grad, since it gets no gradient here")


# The type of the result follows from return_lse.
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False,
              **options: Unpack[_DenseOptions]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
              **options: Unpack[_DenseOptions]) -> tuple[Tensor, Tensor]: ...


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: str | bool | None = None,
              window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float = 0.0,
              alibi_slopes: Tensor | None = None, bias: Tensor | None = None, mask: Tensor | None = None,
              sinks: Tensor | None = None, dropout_p: float = 0.0, seed: int | Tensor | None = None,
              layout: str = "bshd", return_lse: bool = False, deterministic: bool = True, kernel: str | None = None,
              math: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, differentiable in q, k, v, bias and sinks through O and LSE; torch.compile, .export, .func.

    q: [batch, len_q, heads_q, head_dim]; k: [batch, len_kv, heads_kv, head_dim]; v: [.., head_dim_v], heads_q a
        multiple of heads_kv. Any strides. float32, bfloat16, float16, float64 (by the reference). With
        layout="bhsd" heads come before len, in the inputs and in o. A tensor [batch, heads, len, head_dim], which
        torch's attention takes, often fits the default layout too, but then the heads of each token attend to one
        another: layout="bhsd" says that heads come first. Under autocast they are cast as the inputs of torch's
        attention are.
    causal: None, "bottom-right" (the last query sees the last key) or "top-left" (the first sees the first only).
    window: (left, right), inclusive, relative to the bottom-right diagonal; None stands for no limit.
    scale: default 1 / sqrt(head_dim). softcap: c > 0 makes the score c * tanh(score / c).
    alibi_slopes: float32 [heads_q] or [batch, heads_q], no gradient.
    bias: broadcasts to [batch, heads_q, len_q, len_kv]; float32 or the dtype of q; added to the scores. A CausalBias of
        torch.nn.attention.bias (causal_upper_left, causal_lower_right) stands for its alignment, with causal=None.
    mask: bool, True where the key takes part; broadcasts likewise, no gradient. It becomes a bias of 0 and -inf in the
        dtype of q, or joins `bias`; dimensions that it repeats take no memory.
    sinks: [heads_q]: logits that take part in the softmax as keys without a value.
    dropout_p, seed: seed is an int of 64 bits or an int64 tensor in host memory; default: drawn from torch's CPU
        generator. A graph of torch.compile that may recompute its random numbers (activation memory budget under 1)
        needs a seed.
    deterministic: every kernel of tessera gives the same bits in every run, so both values mean the same.
    kernel: a name of `tessera list` without its pass ("cpu.fa2", "reference"); default: the plan's choice.
    math: True composes the call of PyTorch's own operators. That is slow and takes the memory of all weights, and has
        second derivatives, forward mode (jvp, hessian) and the draws of dropout that the kernels have.
    Returns o, of the shape of q with head_dim_v, and with return_lse (o, lse): the natural logarithm of the sum of
        exponentials, float32 [batch, heads_q, len_q] (float64 for float64); 0 and -inf (the sink) without a key.
    Raises ValueError that names the argument, what was expected and what came; tessera.Unsupported.
    Source: docs/numerics.md."""
    heads_first = layout == "bhsd"
    if not heads_first and layout != "bshd":
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
    left, right = (-1, -1) if window is None else window_sides(window)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        q, k, v, bias = _cast(q, k, v, bias)
    if (bias is mask is alibi_slopes is sinks is kernel is seed is None and not (return_lse or math)
            and type(softcap) is type(dropout_p) is float and softcap == dropout_p == 0.0):
        return run_few(q, k, v, 0 if causal is None else causal_number(causal), heads_first, scale, left, right)
    no_gradient("alibi_slopes", alibi_slopes)
    if bias is not None or mask is not None:
        causal, bias = causal_and_bias(q, k, causal, bias, mask, heads_first)
    arguments = Arguments(q, k, v, bias, alibi_slopes, seed=seed_tensor(seed, dropout_p), causal=causal_number(causal),
                          window_left=left, window_right=right, scale=scale, softcap=softcap, dropout_p=dropout_p,
                          kernel=kernel_name(kernel), heads_first=heads_first)
    return _sinks.run(arguments, sinks, return_lse, math)


def attention_weights(q: Tensor, k: Tensor, *, causal: str | bool | None = None,
                      window: tuple[int | None, int | None] | None = None, scale: float | None = None,
                      softcap: float = 0.0, alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
                      mask: Tensor | None = None, layout: str = "bshd") -> Tensor:
    """The weights of attention(), [batch, heads_q, len_q, len_kv]: float32, or float64 for float64 inputs.

    The arguments mean what they mean in attention(). PyTorch's own operators compute them, with derivatives of every
    order. A query that sees no key has weights of 0. No kernel is involved: this is slow, and takes the memory of all
    weights. Raises ValueError that names the argument."""
    heads_first = layout == "bhsd"
    if not heads_first and layout != "bshd":
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
    left, right = window_sides(window)
    q, k, _, bias = _cast(q, k, k, bias)
    no_gradient("alibi_slopes", alibi_slopes)
    if bias is not None or mask is not None:
        causal, bias = causal_and_bias(q, k, causal, bias, mask, heads_first)
    arguments = _with_numbers(Arguments(
        q, k, k, bias, alibi_slopes, causal=causal_number(causal), window_left=left, window_right=right, scale=scale,
        softcap=softcap, heads_first=heads_first))
    if not expect_arguments(arguments) and _distributed.are_in(arguments):
        return _distributed.run(_math.weights, arguments, _distributed.OF_WEIGHTS)
    try:
        return _math.weights(arguments)
    except RuntimeError as error:
        raise _errors.translated(error) from None


def _cast(q, k, v, bias=None):
    """The tensors of a call under autocast. Raises ValueError naming what is no tensor."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, tensor)
    of_values = None if isinstance(bias, CausalBias) or not isinstance(bias, torch.Tensor) else bias
    q, k, v, of_values = under_autocast(q, k, v, of_values)
    return q, k, v, bias if of_values is None else of_values


@overload
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, *,
                     return_lse: Literal[False] = False, **options: Unpack[_RaggedOptions]) -> Tensor: ...


@overload
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, *,
                     return_lse: Literal[True], **options: Unpack[_RaggedOptions]) -> tuple[Tensor, Tensor]: ...


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, *,
                     max_len_q: int | None = None, max_len_kv: int | None = None, causal: str | bool | None = None,
                     window: tuple[int | None, int | None] | None = None, scale: float | None = None,
                     softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
                     dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False,
                     deterministic: bool = True, kernel: str | None = None,
                     math: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """attention() of a ragged batch (varlen): sequence b has the rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1.

    q: [total_q, heads_q, head_dim]; k, v: [total_kv, heads_kv, ..]; cu_seqlens_q, cu_seqlens_kv: int32 or int64
        [batch + 1], from 0 to the total, on the device of q. On CUDA they are not read by the host.
    max_len_q, max_len_kv: bounds of the lengths; default: computed from cu_seqlens on the CPU, the totals on CUDA.
    causal, window, scale, softcap, alibi_slopes, sinks, dropout_p, seed, deterministic, kernel and math mean what they
    mean in attention(). With math=True the host reads cu_seqlens.
    Returns o [total_q, heads_q, head_dim_v], and with return_lse (o, lse), lse float32 [heads_q, total_q]. Raises as
    attention() does."""
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        expect_tensor(name, lengths)
    no_gradient("alibi_slopes", alibi_slopes)
    left, right = window_sides(window)
    q, k, v, _ = _cast(q, k, v)
    arguments = Arguments(q, k, v, None, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed_tensor(seed, dropout_p),
                          _bound("max_len_q", max_len_q), _bound("max_len_kv", max_len_kv), causal_number(causal), left,
                          right, scale, softcap, dropout_p, kernel_name(kernel))
    return _sinks.run(arguments, sinks, return_lse, math)
