# SPDX-License-Identifier: Apache-2.0
"""What the operators of libtessera_torch need from Python: fake kernels, gradients, the vmap rule.

torch.ops.tessera.attention is the public operator: it differentiates, compiles and vmaps. attention_with_residual is the
same for calls that will have a backward: it gives the residual of O too (docs/numerics.md), which makes that faster. The
others are the bare kernels under them, for this package only: they have no gradients of their own, since a registered
one runs Python code in every call, with gradients or without. plain, plain_with_residual and plain_backward are for calls
without what most calls leave out, since each argument costs; plain_o gives no LSE, which most calls drop.

Arguments after q, k, v, in this order, the first five of them tensors:
    bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, max_len_q, max_len_kv, causal, window_left, window_right,
    scale, softcap, dropout_p, kernel, heads_first
and of the plain ones, with defaults:
    causal, heads_first, scale, window_left, window_right
"""
import contextlib

import torch

from . import _errors, _library

_library.require()

forward = torch.ops.tessera.forward.default
backward = torch.ops.tessera.backward.default
attention = torch.ops.tessera.attention.default
attention_with_residual = torch.ops.tessera.attention_with_residual.default
# What the Python class of an operator would call: a function of PyTorch's own.
_forward, _with_residual, _backward = forward._op, attention_with_residual._op, backward._op
_plain, _plain_o, _plain_with_residual, _plain_backward = (
    getattr(torch.ops.tessera, name).default._op for name in ("plain", "plain_o", "plain_with_residual", "plain_backward"))
_below_autograd = torch._C._AutoDispatchBelowAutograd

TENSORS = 8  # q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed
ARGUMENTS = 18
DROPOUT_P, KERNEL = 15, 16  # their places in the list of arguments
NO_FORWARD_MODE = "tessera: derivatives of attention by forward mode are not there"
LEAST_FOR_REST = 2**30  # elements of q times keys: a backward that takes an H200 some 30 us


def keeps_residual(q, dropout_p=0.0, kernel=None):
    """Whether a forward that will have a backward is to give the residual of O: where kernels write it and read it.

    (tessera.plan knows better, but a compiled graph has to know it of every problem that it may meet.)"""
    return (q.is_cuda and q.dtype == torch.bfloat16 and dropout_p == 0
            and (kernel is None or kernel.startswith(("cuda.fa2.", "cuda.fa3."))))


def pays_residual(q, k, heads_first):
    """Whether a call is large enough for a residual of O to save more than its making costs."""
    return k.dim() > 2 and q.numel() * k.shape[-2 if heads_first else -3] >= LEAST_FOR_REST


def is_plain(bias, rest):
    """Whether the plain operators can run a call; rest: the arguments after bias."""
    alibi_slopes, cu_q, cu_kv, seed, _, _, _, _, _, _, softcap, dropout_p, kernel, _ = rest
    return (bias is None and alibi_slopes is None and cu_q is None and cu_kv is None and kernel is None
            and seed is None and softcap == 0 and dropout_p == 0)


def _empty_like(tensor, shape, heads_first):
    """A new tensor as the libraries make it: contiguous, or with heads first as `tensor` lies in memory."""
    if heads_first and tensor.stride(1) < tensor.stride(2):
        batch, heads, length, dim = shape
        return tensor.new_empty((batch, length, heads, dim)).transpose(1, 2)
    return tensor.new_empty(shape)


def _expect_one_device(q, **tensors):
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got one on {tensor.device}")


def _fake_forward(q, k, v, bias, alibi_slopes, cu_seqlens_q, *rest):
    _expect_one_device(q, k=k, v=v, bias=bias, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q,
                       cu_seqlens_kv=rest[0] if rest else None)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads_first = len(rest) == ARGUMENTS - 6 and rest[-1]
    o = _empty_like(q, (*q.shape[:-1], v.shape[-1]), heads_first)
    if cu_seqlens_q is not None:
        return o, q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)
    rows = q.shape[1:3] if heads_first else (q.shape[2], q.shape[1])
    return o, q.new_empty((q.shape[0], *rows), dtype=lse_dtype)


def _fake_with_residual(q, *arguments):
    o, lse = _fake_forward(q, *arguments)
    if keeps_residual(q, arguments[DROPOUT_P - 1], arguments[KERNEL - 1]):
        return o, lse, torch.empty_like(o, dtype=torch.int8)
    return o, lse, q.new_empty((0,), dtype=torch.int8)


def plain(op, q, k, v, causal, heads_first, scale, window_left, window_right):
    """A plain operator that runs forward. What has its default is left out, since each argument costs."""
    if window_left != -1 or window_right != -1:
        return op(q, k, v, causal, heads_first, scale, window_left, window_right)
    if scale is not None:
        return op(q, k, v, causal, heads_first, scale)
    if heads_first:
        return op(q, k, v, causal, True)
    return op(q, k, v, causal) if causal else op(q, k, v)


def plain_settings(rest):
    """The arguments of the plain operators after v, from those of the others after bias."""
    return rest[6], rest[13], rest[9], rest[7], rest[8]


def all_arguments(q, k, v, causal=0, heads_first=False, scale=None, window_left=-1, window_right=-1):
    """Those of a plain operator as the others take them."""
    return q, k, v, *(None,) * 5, -1, -1, causal, window_left, window_right, scale, 0.0, 0.0, None, heads_first


def _fake_backward(d_o, dlse, q, k, v, o, lse, bias, *rest):
    _expect_one_device(q, do=d_o, dlse=dlse, k=k, v=v, o=o, lse=lse, bias=bias)
    bias_gradient, heads_first = rest[13], rest[14] if len(rest) > 14 else False
    gradients = (_empty_like(t, t.shape, heads_first) for t in (q, k, v))
    return *gradients, bias.new_empty(bias.shape) if bias_gradient else q.new_empty((0,))


def _fake_plain_backward(d_o, q, k, v, o, lse, o_residual, causal=0, heads_first=False, *_):
    _expect_one_device(q, do=d_o, k=k, v=v, o=o, lse=lse, o_residual=o_residual)
    return tuple(_empty_like(t, t.shape, heads_first) for t in (q, k, v))


for _name, _fake in (("forward", _fake_forward), ("attention", _fake_forward), ("attention_with_residual", _fake_with_residual),
                     ("plain", lambda *arguments: _fake_forward(*all_arguments(*arguments))),
                     ("plain_o", lambda *arguments: _fake_forward(*all_arguments(*arguments))[0]),
                     ("plain_with_residual", lambda *arguments: _fake_with_residual(*all_arguments(*arguments))),
                     ("backward", _fake_backward), ("plain_backward", _fake_plain_backward)):
    torch.library.register_fake("tessera::" + _name)(_fake)


def backward_kernel(kernel):
    """The kernel of the backward that belongs to a forward one: "cpu.fa2.forward" -> "cpu.fa2.backward"."""
    return None if kernel is None else kernel.removesuffix(".forward") + ".backward"


def gradients(run_backward, saved, settings, d_o, dlse, needs_bias):
    """Gradients of q, k, v and bias. `run_backward`: the operator or what stands for it; `saved`: the 8 input tensors,
    o, lse and, if it was kept, the residual of O; `settings`: the other arguments; d_o or dlse may be None."""
    q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, o, lse, *o_residual = saved
    if d_o is None:
        if dlse is None:
            return (None,) * 4
        d_o = o.new_zeros(()).expand(o.shape)
    dq, dk, dv, dbias = run_backward(
        d_o, dlse, q, k, v, o, lse, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, *settings[:8],
        backward_kernel(settings[8]), needs_bias, settings[9], *o_residual)
    return dq, dk, dv, dbias if needs_bias else None


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.settings = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def gradients_of_all(run_backward, ctx, d_o, dlse):
    """Of all arguments, for a context of setup_context()."""
    found = gradients(run_backward, ctx.saved_tensors, ctx.settings, d_o, dlse, bool(ctx.needs_input_grad[3]))
    return found + (None,) * (ARGUMENTS - 4)


def _compiled_backward(ctx, d_o, dlse, _=None):
    return gradients_of_all(backward, ctx, d_o, dlse)


def no_second_derivative(ctx, *grads):
    raise NotImplementedError("tessera: second derivatives of attention are not there")


def no_forward_mode(*_):
    raise NotImplementedError(NO_FORWARD_MODE)


for _name in ("attention", "attention_with_residual"):
    torch.library.register_autograd("tessera::" + _name, _compiled_backward, setup_context=setup_context)
torch.library.register_autograd("tessera::backward", no_second_derivative)


# The bare ones go past autograd: PyTorch's own fallback for operators without gradients costs as much as the rest.
_library_of_rules = torch.library.Library("tessera", "IMPL")
for _name in ("forward", "plain", "plain_o", "plain_with_residual", "plain_backward"):
    _library_of_rules.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def call(q, k, v, bias, rest):
    """O and LSE without gradients; rest: the arguments after bias."""
    if is_plain(bias, rest):
        return plain(_plain, q, k, v, *plain_settings(rest))
    return _forward(q, k, v, bias, *rest)


def _past_autograd():
    """For a backward: past the Python code of no_second_derivative, unless somebody builds a graph of the gradients."""
    return contextlib.nullcontext() if torch.is_grad_enabled() else _below_autograd()


class EagerAttention(torch.autograd.Function):
    """The operator for eager calls that need gradients. Context in forward: a separate setup_context would cost more
    than the rest of the call. What gets no gradient comes in one tuple, since each argument costs."""

    @staticmethod
    def forward(ctx, q, k, v, bias, rest):
        o_residual = None
        if keeps_residual(q, rest[11], rest[12]) and pays_residual(q, k, rest[13]):
            with _below_autograd():
                o, lse, o_residual = _with_residual(q, k, v, bias, *rest)
        else:
            o, lse = _forward(q, k, v, bias, *rest)
        ctx.save_for_backward(q, k, v, bias, *rest[:4], o, lse, o_residual)
        ctx.settings = rest[4:]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, d_o, dlse):
        try:
            with _past_autograd():
                return *gradients(_backward, ctx.saved_tensors, ctx.settings, d_o, dlse, ctx.needs_input_grad[3]), None
        except RuntimeError as error:
            raise _errors.translated(error) from None


class PlainAttention(torch.autograd.Function):
    """EagerAttention for the calls of the plain operators. settings: their arguments after v."""

    @staticmethod
    def forward(ctx, q, k, v, settings):
        if keeps_residual(q) and pays_residual(q, k, settings[1]):
            results = _plain_with_residual(q, k, v, *settings)
        else:
            results = *plain(_plain, q, k, v, *settings), None
        ctx.save_for_backward(q, k, v, *results)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return results[:2]

    @staticmethod
    def backward(ctx, d_o, dlse):
        try:
            q, k, v, *results = ctx.saved_tensors
            if dlse is None and d_o is not None and not torch.is_grad_enabled():
                return *_plain_backward(d_o, q, k, v, *results, *ctx.settings), None
            whole = all_arguments(q, k, v, *ctx.settings)
            saved = *whole[:TENSORS], *results
            with _past_autograd():
                return *gradients(_backward, saved, whole[TENSORS:], d_o, dlse, False)[:3], None
        except RuntimeError as error:
            raise _errors.translated(error) from None
