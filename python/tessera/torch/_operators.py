# SPDX-License-Identifier: Apache-2.0
"""What the operators of libtessera_torch need from Python: fake kernels, gradients, the vmap rule.

torch.ops.tessera.attention is the public operator: it differentiates, compiles and vmaps. forward and backward are
the bare kernels under it, for this package only: forward has no gradient of its own, since a registered one runs Python
code in every call, with gradients or without.

Arguments after the first tensors, in this order (RECOMPUTED of them are tensors):
    bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, max_len_q, max_len_kv, causal, window_left, window_right,
    scale, softcap, dropout_p, kernel
"""
import torch

from . import _errors, _library

_library.require()

forward = torch.ops.tessera.forward.default
backward = torch.ops.tessera.backward.default
attention = torch.ops.tessera.attention.default

TENSORS = 8  # q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed
DROPOUT_P, KERNEL = 15, 16  # places in the list of arguments


def _fake_forward(q, k, v, bias, alibi_slopes, cu_seqlens_q, *rest):
    for name, tensor in (("k", k), ("v", v), ("bias", bias)):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, where q is, got one on {tensor.device}")
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if cu_seqlens_q is not None:
        return o, q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)
    return o, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype)


def _fake_backward(d_o, dlse, q, k, v, o, lse, bias, *rest):
    def like(tensor):
        return tensor.new_empty(tensor.shape)
    return like(q), like(k), like(v), like(bias) if rest[-1] else q.new_empty((0,))


torch.library.register_fake("tessera::forward")(_fake_forward)
torch.library.register_fake("tessera::attention")(_fake_forward)
torch.library.register_fake("tessera::backward")(_fake_backward)


def backward_kernel(kernel):
    """The kernel of the backward that belongs to a forward one: "cpu.fa2.forward" -> "cpu.fa2.backward"."""
    return None if kernel is None else kernel.removesuffix(".forward") + ".backward"


def gradients(run_backward, saved, settings, d_o, dlse, needs):
    """Gradients of all 17 arguments. `run_backward`: the operator or what stands for it; `saved`: the 8 input tensors,
    o, lse; `settings`: the other arguments; d_o or dlse may be None; needs[3] says whether bias is to have one."""
    q, k, v, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, o, lse = saved
    if d_o is None:
        if dlse is None:
            return (None,) * 17
        d_o = o.new_zeros(()).expand(o.shape)
    bias_gradient = bool(needs[3])
    dq, dk, dv, dbias = run_backward(
        d_o, dlse, q, k, v, o, lse, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seed, *settings[:-1],
        backward_kernel(settings[-1]), bias_gradient)
    return (dq, dk, dv, dbias if bias_gradient else None) + (None,) * 13


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.settings = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx, d_o, dlse):
    return gradients(backward, ctx.saved_tensors, ctx.settings, d_o, dlse, ctx.needs_input_grad)


def no_second_derivative(ctx, *grads):
    raise NotImplementedError("tessera: second derivatives of attention are not there")


torch.library.register_autograd("tessera::attention", _backward, setup_context=setup_context)
torch.library.register_autograd("tessera::backward", no_second_derivative)


# The bare forward goes past autograd: PyTorch's own fallback for operators without gradients costs as much as the rest.
_library_of_rules = torch.library.Library("tessera", "IMPL")
_library_of_rules.impl("forward", torch.library.fallthrough_kernel, "Autograd")


class EagerAttention(torch.autograd.Function):
    """The operator for eager calls that need gradients. Context in forward: a separate setup_context would cost more
    than the rest of the call."""

    @staticmethod
    def forward(ctx, *args):
        o, lse = forward(*args)
        ctx.save_for_backward(*args[:TENSORS], o, lse)
        ctx.settings = args[TENSORS:]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, dlse):
        try:
            with torch._C._AutoDispatchBelowAutograd():  # past the Python code of no_second_derivative
                return gradients(backward, ctx.saved_tensors, ctx.settings, d_o, dlse, ctx.needs_input_grad)
        except RuntimeError as error:
            raise _errors.translated(error) from None
