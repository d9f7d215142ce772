# SPDX-License-Identifier: Apache-2.0
"""Attention on PyTorch tensors: dense, ragged, and with the meaning of torch's own function."""
import operator
import types

import torch
import torch.autograd.forward_ad as _forward_ad

from . import _direct, _errors, _functorch, _node, _operators

CAUSAL = {None: 0, False: 0, "bottom-right": 1, "top-left": 2}
_functorch_active = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_is_traced = torch._C._get_tracing_state  # by torch.jit.trace
# Where forward mode says how many of its levels are open: -1 for none.
_levels = _forward_ad if hasattr(_forward_ad, "_current_level") else types.SimpleNamespace(_current_level=-1)
_FLOATS = frozenset((type(None), float))
_call, _plain, _plain_o, _fewest = _operators.call, _operators._plain, _operators._plain_o, _operators.plain
_past_dispatcher, _modes, _function_modes, _profiled = (_direct.attention, _direct.modes, _direct.function_modes,
                                                        _direct.profiled)
# Past the Python code of Function.apply, which is for torch.func.
_eager = super(torch.autograd.Function, _operators.EagerAttention).apply
_plain_eager = super(torch.autograd.Function, _operators.PlainAttention).apply


def _needs_gradients(q, k, v, bias):
    return _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or
                                   (bias is not None and bias.requires_grad))


def _forward_mode():
    """Whether there may be tangents, which no kernel computes: autograd says so where the bare operators would drop
    them."""
    return _levels._current_level >= 0


def number(name, value):
    """The float that `value` is, or None; a number of a compiled graph stays one."""
    if value is None or isinstance(value, torch.SymFloat):
        return value
    if isinstance(value, torch.Tensor) and value.requires_grad and _is_grad_enabled():
        raise ValueError(f"{name}: expected a number, got a tensor with requires_grad, which gets no gradient here")
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        shown = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
        raise ValueError(f"{name}: expected a number that is finite in fp32, got {shown}") from None


def _explained(error, q, k, v):
    """The exception to raise for one of an operator."""
    try:
        for name, tensor in zip(("q", "k", "v"), (q, k, v)):
            expect_tensor(name, tensor)
    except ValueError as reason:
        return reason
    if isinstance(error, NotImplementedError) and _forward_mode():
        return NotImplementedError(_operators.NO_FORWARD_MODE)
    if isinstance(error, NotImplementedError):  # PyTorch's dispatcher knows no operator for these tensors
        return _errors.of_the_place(q, k, v)
    return _errors.translated(error)


def run(q, k, v, bias, *rest):
    """O and LSE of the operators' arguments, by the cheapest way that gives what the surroundings need.

    Raises ValueError naming the argument; tessera.Unsupported, tessera.DeviceUnavailable."""
    compiling = _is_compiling()
    if not compiling and not (rest[9].__class__ in _FLOATS and rest[10].__class__ in _FLOATS
                              and rest[11].__class__ in _FLOATS):  # not asked of a graph: it may have symbols there
        rest = *rest[:9], *map(number, ("scale", "softcap", "dropout_p"), rest[9:12]), *rest[12:]
    if compiling or _is_traced():
        if _needs_gradients(q, k, v, bias) and _operators.keeps_residual(q, rest[11], rest[12]):
            return _operators.attention_with_residual(q, k, v, bias, *rest)[:2]
        return _operators.attention(q, k, v, bias, *rest)
    if _functorch_active():
        return _functorch.attention(q, k, v, bias, *rest)
    try:
        if not _needs_gradients(q, k, v, bias) and not _forward_mode():
            return _call(q, k, v, bias, rest)
        if _operators.is_plain(bias, rest):
            return _plain_eager(q, k, v, _operators.plain_settings(rest))
        return _eager(q, k, v, bias, rest)
    except (RuntimeError, AttributeError) as error:
        raise _explained(error, q, k, v) from None


def run_plain(q, k, v, *settings):
    """run() of the arguments of the plain operators, all of them."""
    if _is_compiling() or _functorch_active() or _is_traced() or settings[2].__class__ not in _FLOATS:
        return run(*_operators.all_arguments(q, k, v, *settings))
    try:
        if (_is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)) or _forward_mode():
            return _plain_eager(q, k, v, settings)
        return _fewest(_plain, q, k, v, *settings)
    except (RuntimeError, AttributeError) as error:
        raise _explained(error, q, k, v) from None


def run_o(q, k, v, causal, heads_first, scale, left, right):
    """O alone of run_plain(), which costs less."""
    if _is_compiling() or _functorch_active() or _is_traced():
        return run(*_operators.all_arguments(q, k, v, causal, heads_first, scale, left, right))[0]
    if scale.__class__ not in _FLOATS:
        scale = number("scale", scale)
    try:
        if _levels._current_level >= 0:
            return _plain_eager(q, k, v, (causal, heads_first, scale, left, right))[0]
        if not (_is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
            # Not where anybody listens to the dispatcher, who would miss the operator.
            if _past_dispatcher is not None and not (_modes() or _function_modes() or _profiled()):
                o = _past_dispatcher(q, k, v, causal, heads_first, scale, left, right)
                if o is not None:
                    return o
            return _fewest(_plain_o, q, k, v, causal, heads_first, scale, left, right)
        o = _node.attention(q, k, v, causal, heads_first, scale, left, right)
        if o is not None:
            return o
        return _plain_eager(q, k, v, (causal, heads_first, scale, left, right))[0]
    except (RuntimeError, AttributeError) as error:
        raise _explained(error, q, k, v) from None


def expect_tensor(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got a {type(tensor).__name__}")


def _integer(value):
    """`value` if it is an integer, one of a compiled graph or of NumPy, too; else None."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def seed_tensor(seed, dropout_p):
    """int64 [1] in host memory, or None without dropout. Without a seed one is drawn from torch's CPU generator."""
    if dropout_p == 0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    if isinstance(seed, torch.Tensor) and seed.numel() == 1:
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
    """-1, which the operators take for unknown or without limit, for None."""
    if number is None:
        return -1
    found = _integer(number)
    if found is None or found < 0:
        raise ValueError(f"{name}: expected an integer from 0 on or None, got {number!r}")
    if isinstance(found, int) and found >= 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {number!r}")
    return found


def kernel_name(kernel):
    """The forward kernel of a name with or without its pass."""
    if kernel is None:
        return None
    if not isinstance(kernel, str) or not kernel.isprintable():  # PyTorch's strings end at a zero
        raise ValueError(f"kernel: expected a name or None, got {kernel!r}")
    return kernel.removesuffix(".forward") + ".forward"


def no_gradient(name, tensor):
    if tensor is None:
        return
    expect_tensor(name, tensor)
    if tensor.requires_grad and _is_grad_enabled():
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
    bias: broadcasts to [batch, heads_q, len_q, len_kv]; float32 or the dtype of q; added to the scores.
    dropout_p, seed: seed is an int or an int64 tensor in host memory; default: drawn from torch's CPU generator.
    deterministic: every kernel of tessera gives the same bits in every run, so both values mean the same.
    kernel: a name of `tessera list` without its pass ("cpu.fa2", "reference"); default: the plan's choice.
    Returns o, of the shape of q with head_dim_v, and with return_lse (o, lse): the natural logarithm of the sum of
        exponentials, float32 [batch, heads_q, len_q] (float64 for float64); -inf, and o = 0, where a query sees no key.
    Raises ValueError that names the argument, what was expected and what came; tessera.Unsupported.
    Source: docs/numerics.md."""
    heads_first = layout == "bhsd"
    if not heads_first and layout != "bshd":
        raise ValueError(f"layout: expected \"bshd\" or \"bhsd\", got {layout!r}")
    if alibi_slopes is not None:
        no_gradient("alibi_slopes", alibi_slopes)
    if bias is not None:
        expect_tensor("bias", bias)
        bias = bias[(None,) * (4 - bias.dim())]
    left, right = (-1, -1) if window is None else window_sides(window)
    causal = 0 if causal is None else causal_number(causal)
    if bias is None and alibi_slopes is None and kernel is None and softcap == 0 and dropout_p == 0:
        if not return_lse:
            return run_o(q, k, v, causal, heads_first, scale, left, right)
        o, lse = run_plain(q, k, v, causal, heads_first, scale, left, right)
    else:
        o, lse = run(q, k, v, bias, alibi_slopes, None, None, seed_tensor(seed, dropout_p), -1, -1, causal, left, right,
                     scale, softcap, dropout_p, kernel_name(kernel), heads_first)
    return (o, lse) if return_lse else o


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_kv, *, max_len_q=None, max_len_kv=None, causal=None, window=None,
                     scale=None, softcap=0.0, alibi_slopes=None, dropout_p=0.0, seed=None, return_lse=False,
                     deterministic=True, kernel=None):
    """attention() of a ragged batch: member b has the rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1.

    q: [total_q, heads_q, head_dim]; k, v: [total_kv, heads_kv, ..]; cu_seqlens_q, cu_seqlens_kv: int32 or int64
        [batch + 1], from 0 to the total, on the device of q. On CUDA they are not read by the host.
    max_len_q, max_len_kv: bounds of the lengths; by default found from cu_seqlens on the CPU, and the total on CUDA.
    Returns o [total_q, heads_q, head_dim_v], and with return_lse (o, lse), lse float32 [heads_q, total_q].
    Everything else as in attention()."""
    no_gradient("alibi_slopes", alibi_slopes)
    left, right = window_sides(window)
    o, lse = run(q, k, v, None, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed_tensor(seed, dropout_p),
                 _bound("max_len_q", max_len_q), _bound("max_len_kv", max_len_kv),
                 causal_number(causal), left, right, scale, softcap, dropout_p, kernel_name(kernel), False)
    return (o, lse) if return_lse else o
