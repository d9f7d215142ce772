# SPDX-License-Identifier: Apache-2.0
"""What the operators of libtessera_torch need from Python: fake kernels, gradients, the vmap rule.

torch.ops.tessera.attention is the public operator: it differentiates, compiles and vmaps. forward and backward are
the bare kernels under it, for this package only: forward has no gradient of its own, since a registered one runs Python
code in every call, with gradients or without. plain is forward for calls without what most calls leave out.

Arguments after q, k, v, in this order, the first five of them tensors:
    bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, max_len_q, max_len_kv, causal, window_left, window_right,
    scale, softcap, dropout_p, kernel, heads_first
"""
import torch

from . import _errors, _library

_library.require()

forward = torch.ops.tessera.forward.default
backward = torch.ops.tessera.backward.default
attention = torch.ops.tessera.attention.default
# What the Python class of an operator would call: a function of PyTorch's own.
_forward, plain, _backward = forward._op, torch.ops.tessera.plain.default._op, backward._op

TENSORS = 8  # q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed
ARGUMENTS = 18
DROPOUT_P = 15  # its place in the list of arguments


def call(q, k, v, bias, rest):
    """O and LSE without gradients; rest: the arguments after bias."""
    alibi_slopes, cu_q, cu_kv, seed, _, _, causal, left, right, scale, softcap, dropout_p, kernel, heads_first = rest
    if (bias is None and alibi_slopes is None and cu_q is None and cu_kv is None and kernel is None and seed is None
            and softcap == 0 and dropout_p == 0):
        return plain(q, k, v, causal, left, right, scale, heads_first)
    return _forward(q, k, v, bias, *rest)


def _empty_like(tensor, shape, heads_first):
    """A new tensor as the libraries make it: contiguous, or with heads first as `tensor` lies in memory."""
    if heads_first and tensor.stride(1) < tensor.stride(2):
        batch, heads, length, dim = shape
        return tensor.new_empty((batch, length, heads, dim)).transpose(1, 2)
    return tensor.new_empty(shape)


def _fake_forward(q, k, v, bias, alibi_slopes, cu_seqlens_q, *rest):
    for name, tensor in (("k", k), ("v", v), ("bias", bias)):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got one on {tensor.device}")
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads_first = len(rest) == ARGUMENTS - 6 and rest[-1]
    o = _empty_like(q, (*q.shape[:-1], v.shape[-1]), heads_first)
    if cu_seqlens_q is not None:
        return o, q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)
    rows = q.shape[1:3] if heads_first else (q.shape[2], q.shape[1])
    return o, q.new_empty((q.shape[0], *rows), dtype=lse_dtype)


def _fake_plain(q, k, v, causal, window_left, window_right, scale, heads_first):
    return _fake_forward(q, k, v, None, None, None, *(None,) * 11, heads_first)


def _fake_backward(d_o, dlse, q, k, v, o, lse, bias, *rest):
    bias_gradient, heads_first = rest[13], rest[14] if len(rest) > 14 else False
    gradients = (_empty_like(t, t.shape, heads_first) for t in (q, k, v))
    return *gradients, bias.new_empty(bias.shape) if bias_gradient else q.new_empty((0,))


torch.library.register_fake("tessera::forward")(_fake_forward)
torch.library.register_fake("tessera::attention")(_fake_forward)
torch.library.register_fake("tessera::plain")(_fake_plain)
torch.library.register_fake("tessera::backward")(_fake_backward)


def backward_kernel(kernel):
    """The kernel of the backward that belongs to a forward one: "cpu.fa2.forward" -> "cpu.fa2.backward"."""
    return None if kernel is None else kernel.removesuffix(".forward") + ".backward"


def gradients(run_backward, saved, settings, d_o, dlse, needs_bias):
    """Gradients of q, k, v and bias. `run_backward`: the operator or what stands for it; `saved`: the 8 input tensors,
    o, lse; `settings`: the other arguments; d_o or dlse may be None."""
    q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, o, lse = saved
    if d_o is None:
        if dlse is None:
            return (None,) * 4
        d_o = o.new_zeros(()).expand(o.shape)
    dq, dk, dv, dbias = run_backward(
        d_o, dlse, q, k, v, o, lse, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, *settings[:8],
        backward_kernel(settings[8]), needs_bias, settings[9])
    return dq, dk, dv, dbias if needs_bias else None


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.settings = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def gradients_of_all(run_backward, ctx, d_o, dlse):
    """Of all arguments, for a context of setup_context()."""
    found = gradients(run_backward, ctx.saved_tensors, ctx.settings, d_o, dlse, bool(ctx.needs_input_grad[3]))
    return found + (None,) * (ARGUMENTS - 4)


def _compiled_backward(ctx, d_o, dlse):
    return gradients_of_all(backward, ctx, d_o, dlse)


def no_second_derivative(ctx, *grads):
    raise NotImplementedError("tessera: second derivatives of attention are not there")


torch.library.register_autograd("tessera::attention", _compiled_backward, setup_context=setup_context)
torch.library.register_autograd("tessera::backward", no_second_derivative)


# The bare forward goes past autograd: PyTorch's own fallback for operators without gradients costs as much as the rest.
_library_of_rules = torch.library.Library("tessera", "IMPL")
for _name in ("forward", "plain"):
    _library_of_rules.impl(_name, torch.library.fallthrough_kernel, "Autograd")


class EagerAttention(torch.autograd.Function):
    """The operator for eager calls that need gradients. Context in forward: a separate setup_context would cost more
    than the rest of the call. What gets no gradient comes in one tuple, since each argument costs."""

    @staticmethod
    def forward(ctx, q, k, v, bias, rest):
        o, lse = call(q, k, v, bias, rest)
        ctx.save_for_backward(q, k, v, bias, *rest[:4], o, lse)
        ctx.settings = rest[4:]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, dlse):
        try:
            with torch._C._AutoDispatchBelowAutograd():  # past the Python code of no_second_derivative
                return *gradients(_backward, ctx.saved_tensors, ctx.settings, d_o, dlse, ctx.needs_input_grad[3]), None
        except RuntimeError as error:
            raise _errors.translated(error) from None
