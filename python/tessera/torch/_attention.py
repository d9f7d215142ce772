# SPDX-License-Identifier: Apache-2.0
"""Attention on PyTorch tensors, dense and ragged, and the choice of the operator that a call runs."""
import operator

import torch
import torch.autograd.forward_ad
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.jit import is_tracing

from . import _errors, _functorch, _operators
from ._operators import Arguments
from ._tensors import CausalBias, alignment_of, expect_arguments, expect_tensor

CAUSAL = {None: 0, False: 0, "bottom-right": 1, "top-left": 2}
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
    expect_arguments(arguments)
    compiling = is_compiling()
    if not compiling:  # a graph may have symbols there
        arguments = _with_numbers(arguments)
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
def _graph_may_draw_again():
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
    if dropout_p == 0:
        return None
    if seed is None:
        if is_compiling() and is_grad_enabled() and _graph_may_draw_again():
            raise ValueError("seed: expected a seed, since a graph compiled with an activation memory budget under 1 may "
                             "draw another one for its backward, got None")
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    if isinstance(seed, torch.Tensor):
        expect_tensor("seed", seed)
        if seed.numel() == 1:
            return seed.reshape(1)
    number = _integer(seed)
    if number is None or not -2**63 <= number < 2**63:
        raise ValueError(f"seed: expected an integer of 64 bits or a tensor with one, got {seed!r}")
    return torch.full((1,), number, dtype=torch.int64, device="cpu")


def causal_number(causal):
    number = CAUSAL.get(causal) if causal is None or isinstance(causal, (str, bool)) else None
    if number is None:
        raise ValueError(f"causal: expected None, \"bottom-right\" or \"top-left\", got {causal!r}")
    return number


def window_sides(window):
    if window is None:
        return -1, -1
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window: expected (left, right), each a number of keys or None, got {window!r}") from None
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
    if not isinstance(kernel, str) or not kernel.isprintable():  # PyTorch's strings end at a zero
        raise ValueError(f"kernel: expected a name or None, got {kernel!r}")
    return kernel.removesuffix(".forward") + ".forward"


def no_gradient(name, tensor):
    """Raises ValueError unless `tensor` is None or a tensor that requires no gradient."""
    if tensor is None:
        return
    expect_tensor(name, tensor)
    if tensor.requires_grad and is_grad_enabled():
        raise ValueError(f"{name}: expected a tensor without requires_grad, since it gets no gradient here")


def attention(q, k, v, *, causal=None, window=None, scale=None, softcap=0.0, alibi_slopes=None, bias=None,
              dropout_p=0.0, seed=None, layout="bshd", return_lse=False, deterministic=True, kernel=None):
    """Exact attention. Differentiable in q, k, v and bias, through O and LSE; torch.compile, torch.export, torch.func.

    q: [batch, len_q, heads_q, head_dim]; k: [batch, len_kv, heads_kv, head_dim]; v: [.., head_dim_v], heads_q a
        multiple of heads_kv. Any strides. float32, bfloat16, float16, float64 (by the reference). With
        layout="bhsd" heads come before len, in the inputs and in o.
    causal: None, "bottom-right" (the last query sees the last key) or "top-left" (the first sees the first only).
    window: (left, right), inclusive, relative to the bottom-right diagonal; None stands for no limit.
    scale: default 1 / sqrt(head_dim). softcap: c > 0 makes the score c * tanh(score / c).
    alibi_slopes: float32 [heads_q] or [batch, heads_q], no gradient.
    bias: broadcasts to [batch, heads_q, len_q, len_kv]; float32 or the dtype of q; added to the scores. A CausalBias of
        torch.nn.attention.bias (causal_upper_left, causal_lower_right) stands for its alignment, with causal=None.
    dropout_p, seed: seed is an int or an int64 tensor in host memory; default: drawn from torch's CPU generator. A
        graph of torch.compile that may recompute its random numbers (activation memory budget under 1) needs a seed.
    deterministic: every kernel of tessera gives the same bits in every run, so both values mean the same.
    kernel: a name of `tessera list` without its pass ("cpu.fa2", "reference"); default: the plan's choice.
    Returns o, of the shape of q with head_dim_v, and with return_lse (o, lse): the natural logarithm of the sum of
        exponentials, float32 [batch, heads_q, len_q] (float64 for float64); -inf, and o = 0, where a query sees no key.
    Raises ValueError that names the argument, what was expected and what came; tessera.Unsupported.
    Source: docs/numerics.md."""
    heads_first = layout == "bhsd"
    if not heads_first and layout != "bshd":
        raise ValueError(f"layout: expected \"bshd\" or \"bhsd\", got {layout!r}")
    left, right = (-1, -1) if window is None else window_sides(window)
    if (bias is alibi_slopes is kernel is None and not return_lse and type(softcap) is type(dropout_p) is float
            and softcap == dropout_p == 0.0):
        return run_few(q, k, v, 0 if causal is None else causal_number(causal), heads_first, scale, left, right)
    no_gradient("alibi_slopes", alibi_slopes)
    if bias is not None:
        causal, bias = _causal_and_bias(q, k, causal, bias, heads_first)
    return run(Arguments(q, k, v, bias, alibi_slopes, seed=seed_tensor(seed, dropout_p), causal=causal_number(causal),
                         window_left=left, window_right=right, scale=scale, softcap=softcap, dropout_p=dropout_p,
                         kernel=kernel_name(kernel), heads_first=heads_first), return_lse)


def _causal_and_bias(q, k, causal, bias, heads_first):
    """The causal alignment and the bias, of 4 dimensions or None, that `causal` and `bias` stand for."""
    if isinstance(bias, CausalBias):
        if causal_number(causal) != 0:
            raise ValueError(f"bias: expected no CausalBias with causal={causal!r}, got one")
        expect_tensor("q", q)
        expect_tensor("k", k)
        length = 2 if heads_first else 1
        return alignment_of("bias", bias, q.shape[length], k.shape[length]), None
    expect_tensor("bias", bias)
    return causal, bias[(None,) * (4 - bias.dim())]


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, *, max_len_q=None, max_len_kv=None, causal=None, window=None,
                     scale=None, softcap=0.0, alibi_slopes=None, dropout_p=0.0, seed=None, return_lse=False,
                     deterministic=True, kernel=None):
    """attention() of a ragged batch (varlen): sequence b has the rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1.

    q: [total_q, heads_q, head_dim]; k, v: [total_kv, heads_kv, ..]; cu_seqlens_q, cu_seqlens_kv: int32 or int64
        [batch + 1], from 0 to the total, on the device of q. On CUDA they are not read by the host.
    max_len_q, max_len_kv: bounds of the lengths; default: computed from cu_seqlens on the CPU, the totals on CUDA.
    causal, window, scale, softcap, alibi_slopes, dropout_p, seed, deterministic and kernel mean what they mean in
    attention().
    Returns o [total_q, heads_q, head_dim_v], and with return_lse (o, lse), lse float32 [heads_q, total_q]. Raises as
    attention() does."""
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        expect_tensor(name, lengths)
    no_gradient("alibi_slopes", alibi_slopes)
    left, right = window_sides(window)
    return run(Arguments(q, k, v, None, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed_tensor(seed, dropout_p),
                         _bound("max_len_q", max_len_q), _bound("max_len_kv", max_len_kv), causal_number(causal), left,
                         right, scale, softcap, dropout_p, kernel_name(kernel)), return_lse)
