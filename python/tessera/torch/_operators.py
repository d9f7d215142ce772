# SPDX-License-Identifier: Apache-2.0
"""The operators of libtessera_torch: their arguments, fake kernels, gradients, and which of them a call runs.

torch.ops.tessera.attention is the operator that graphs contain: it has a gradient and a vmap rule.
attention_with_residual also returns the residual of O (docs/numerics.md), which makes the backward faster.
attention_with_sinks takes sinks after all other arguments, for tensors whose kernels take them. The
operators named forward or backward run the same kernels and have no gradient, since a gradient registered through
torch.library runs Python in every call, wanted or not. EagerAttention, EagerFewAttention and calls without gradients
use these. forward_few and forward_o (O alone) have 8 arguments instead of 18, because converting each one takes time.
"""
import typing

import torch

from . import _errors, _library, _shapes
from ._tensors import expect_tensor

_library.require()

forward = torch.ops.tessera.forward.default
forward_with_residual = torch.ops.tessera.forward_with_residual.default
forward_few = torch.ops.tessera.forward_few.default
forward_few_with_residual = torch.ops.tessera.forward_few_with_residual.default
forward_o = torch.ops.tessera.forward_o.default
backward = torch.ops.tessera.backward.default
attention = torch.ops.tessera.attention.default
attention_with_residual = torch.ops.tessera.attention_with_residual.default
attention_backward = torch.ops.tessera.attention_backward.default
attention_with_sinks = torch.ops.tessera.attention_with_sinks.default
attention_with_sinks_and_residual = torch.ops.tessera.attention_with_sinks_and_residual.default
attention_with_sinks_backward = torch.ops.tessera.attention_with_sinks_backward.default
# For context parallelism: they write into parts of tensors that exist (python/torch_ops/ranks.cc).
forward_to = torch.ops.tessera.forward_to.default
backward_to = torch.ops.tessera.backward_to.default
add_parts = torch.ops.tessera.add_parts.default
copy_rows = torch.ops.tessera.copy_rows.default

_WAY_OUT = ("math=True of tessera.torch.attention, varlen_attention and scaled_dot_product_attention computes them, "
            "slowly")
NO_FORWARD_MODE = f"tessera: its kernels have no derivatives by forward mode (jvp, jacfwd, hessian); {_WAY_OUT}"
NO_SECOND_DERIVATIVE = f"tessera: its kernels have no second derivatives; {_WAY_OUT}"


class Arguments(typing.NamedTuple):
    """The arguments of the forward operators, in their order."""
    q: torch.Tensor  # [batch, len_q, heads_q, head_dim]; with cu_seqlens [total_q, heads_q, head_dim]
    k: torch.Tensor
    v: torch.Tensor
    bias: typing.Optional[torch.Tensor] = None  # 4 dimensions
    alibi_slopes: typing.Optional[torch.Tensor] = None
    cu_seqlens_q: typing.Optional[torch.Tensor] = None
    cu_seqlens_kv: typing.Optional[torch.Tensor] = None
    seed: typing.Optional[torch.Tensor] = None  # int64 [1] in host memory
    max_len_q: int = -1  # -1: unknown
    max_len_kv: int = -1
    causal: int = 0  # 0: none, 1: bottom-right, 2: top-left
    window_left: int = -1  # -1: no limit
    window_right: int = -1
    scale: typing.Optional[float] = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    kernel: typing.Optional[str] = None
    heads_first: bool = False  # dense tensors are [batch, heads, len, head_dim]


TENSORS = 8  # Arguments begins with so many tensors
SINKS = 23  # their indices among the arguments of attention_with_sinks_backward
DROPOUT_P = Arguments._fields.index("dropout_p")


def dims_of(name, tensor):
    """The dimensions (batch, heads) of an optional tensor of Arguments; None where it has no such dimension."""
    if name == "bias":
        return tuple(dim if tensor.shape[dim] != 1 else None for dim in (0, 1))
    if name == "alibi_slopes":
        return (None, 0) if tensor.dim() == 1 else (0, 1)
    return None, None


def keeps_residual(q, dropout_p=0.0, kernel=None):
    """Whether a forward that will have a backward keeps the residual of O: where kernels write it and read it.

    The answer depends on no size: with the residual delta is computed in another way, which gives gradients other bits,
    and a sequence has the same bits in every batch. tessera.plan() knows more, but a compiled graph needs one answer
    for every problem that it may meet."""
    if not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)):
        return False
    if not (kernel is None or kernel.startswith(("cuda.fa2.", "cuda.fa3."))):
        return False
    if dropout_p == 0:
        return True
    # With dropout cuda.fa3.backward alone reads it (docs/numerics.md).
    return (dropout_p <= 0.9 and not (kernel or "").startswith("cuda.fa2.") and torch.cuda.is_available()
            and torch.cuda.get_device_capability(q.device) == (9, 0))


def _empty_like(tensor, shape, heads_first):
    """A fake of what the libraries allocate: contiguous, or with heads_first in the memory order of `tensor`."""
    if heads_first and tensor.stride(1) < tensor.stride(2):
        batch, heads, length, dim = shape
        return tensor.new_empty((batch, length, heads, dim)).transpose(1, 2)
    return tensor.new_empty(shape)


def _fake_forward(*arguments):
    a = Arguments(*arguments)
    _shapes.expect(a)
    lse_dtype = torch.float64 if a.q.dtype == torch.float64 else torch.float32
    o = _empty_like(a.q, (*a.q.shape[:-1], a.v.shape[-1]), a.heads_first)
    if a.cu_seqlens_q is not None:
        return o, a.q.new_empty((a.q.shape[1], a.q.shape[0]), dtype=lse_dtype)
    rows = a.q.shape[1:3] if a.heads_first else (a.q.shape[2], a.q.shape[1])
    return o, a.q.new_empty((a.q.shape[0], *rows), dtype=lse_dtype)


def _fake_forward_with_residual(*arguments):
    a = Arguments(*arguments)
    o, lse = _fake_forward(*arguments)
    if keeps_residual(a.q, a.dropout_p, a.kernel):
        return o, lse, torch.empty_like(o, dtype=torch.int8)
    return o, lse, a.q.new_empty((0,), dtype=torch.int8)


def _of_few(q, k, v, causal=0, heads_first=False, scale=None, window_left=-1, window_right=-1):
    """The Arguments of an operator with few."""
    return Arguments(q, k, v, causal=causal, heads_first=heads_first, scale=scale, window_left=window_left,
                     window_right=window_right)


def _fake_forward_few(*few):
    return _fake_forward(*_of_few(*few))


def _fake_forward_few_with_residual(*few):
    return _fake_forward_with_residual(*_of_few(*few))


def _fake_forward_o(*few):
    return _fake_forward_few(*few)[0]


def _fake_backward(d_o, dlse, q, k, v, o, lse, bias, *rest):
    bias_gradient, heads_first = rest[13], rest[14] if len(rest) > 14 else False
    _shapes.expect_backward(Arguments(q, k, v, bias, *rest[:13], heads_first), d_o, dlse, o, lse, bias_gradient)
    gradients = (_empty_like(t, t.shape, heads_first) for t in (q, k, v))
    return *gradients, bias.new_empty(bias.shape) if bias_gradient else q.new_empty((0,))


def _fake_with_sinks(*arguments):
    return _fake_forward(*arguments[:-1])


def _fake_with_sinks_and_residual(*arguments):
    return _fake_forward_with_residual(*arguments[:-1])


def _fake_with_sinks_backward(*arguments):
    before, sinks = arguments[:SINKS], arguments[SINKS]  # o_residual comes last
    return *_fake_backward(*before), sinks.new_empty(sinks.shape)


for _name, _fake in (("forward", _fake_forward), ("attention", _fake_forward), ("forward_o", _fake_forward_o),
                     ("forward_few", _fake_forward_few),
                     ("forward_few_with_residual", _fake_forward_few_with_residual),
                     ("forward_with_residual", _fake_forward_with_residual),
                     ("attention_with_residual", _fake_forward_with_residual),
                     ("backward", _fake_backward), ("attention_backward", _fake_backward),
                     ("attention_with_sinks", _fake_with_sinks),
                     ("attention_with_sinks_and_residual", _fake_with_sinks_and_residual),
                     ("attention_with_sinks_backward", _fake_with_sinks_backward)):
    torch.library.register_fake("tessera::" + _name)(_fake)


def backward_kernel(kernel):
    """The backward kernel of a forward one: "cpu.fa2.forward" -> "cpu.fa2.backward"."""
    return None if kernel is None else kernel.removesuffix(".forward") + ".backward"


def gradients(run_backward, saved, settings, d_o, dlse, needs_bias):
    """(dq, dk, dv, dbias or None); all None when neither O nor LSE has a gradient.

    run_backward: an operator with the schema of tessera::backward. saved: the 8 input tensors, o, lse and, if the
    forward kept it, o_residual. settings: the arguments after the tensors. d_o, dlse: each may be None."""
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
    """The gradients of all arguments, for a context of setup_context()."""
    found = gradients(run_backward, ctx.saved_tensors, ctx.settings, d_o, dlse, bool(ctx.needs_input_grad[3]))
    return found + (None,) * (len(Arguments._fields) - 4)


def _registered_backward(ctx, d_o, dlse, _=None):
    return gradients_of_all(attention_backward, ctx, d_o, dlse)


def no_second_derivative(ctx, *grads):
    raise NotImplementedError(NO_SECOND_DERIVATIVE)


def no_forward_mode(*_):
    raise NotImplementedError(NO_FORWARD_MODE)


for _name in ("attention", "attention_with_residual"):
    torch.library.register_autograd("tessera::" + _name, _registered_backward, setup_context=setup_context)
def _setup_context_with_sinks(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:TENSORS], *output, inputs[-1])
    ctx.settings = inputs[TENSORS:-1]
    ctx.set_materialize_grads(False)


def _backward_with_sinks(ctx, d_o, dlse, _=None):
    *saved, sinks = ctx.saved_tensors
    of_sinks = []

    def run_backward(*arguments):
        *arguments, o_residual = arguments if len(saved) > TENSORS + 2 else (*arguments, None)
        *found, dsinks = attention_with_sinks_backward(*arguments, sinks, o_residual)
        of_sinks.append(dsinks)
        return found

    found = gradients(run_backward, saved, ctx.settings, d_o, dlse, bool(ctx.needs_input_grad[3]))
    return *found, *(None,) * (len(Arguments._fields) - 4), of_sinks[0] if of_sinks else None


for _name in ("attention_with_sinks", "attention_with_sinks_and_residual"):
    torch.library.register_autograd("tessera::" + _name, _backward_with_sinks, setup_context=_setup_context_with_sinks)
for _name in ("attention_backward", "attention_with_sinks_backward"):
    torch.library.register_autograd("tessera::" + _name, no_second_derivative)

_without_gradient = torch.library.Library("tessera", "IMPL")
for _name in ("forward", "forward_with_residual", "forward_few", "forward_few_with_residual", "forward_o", "backward",
              "forward_to", "backward_to", "add_parts", "copy_rows"):
    _without_gradient.impl(_name, torch.library.fallthrough_kernel, "Autograd")


class EagerAttention(torch.autograd.Function):
    """(o, lse) of an eager call that needs gradients. settings: the arguments after bias in one tuple, since apply()
    takes time for each argument. forward() fills the context itself: PyTorch binds the arguments of a Function with a
    separate setup_context by inspect.signature, which takes longer than the whole call."""

    @staticmethod
    def forward(ctx, q, k, v, bias, settings):
        arguments = Arguments(q, k, v, bias, *settings)
        if keeps_residual(q, arguments.dropout_p, arguments.kernel):
            results = forward_with_residual(*arguments)
        else:
            results = forward(*arguments)
        setup_context(ctx, arguments, results)
        return results[:2]

    @staticmethod
    def backward(ctx, d_o, dlse):
        return *_eager_gradients(ctx.saved_tensors, ctx.settings, d_o, dlse, ctx.needs_input_grad[3]), None


class EagerFewAttention(torch.autograd.Function):
    """O of an eager call that needs gradients and has the arguments of forward_few only. few: those after v."""

    @staticmethod
    def forward(ctx, q, k, v, few):
        if q.is_cuda and keeps_residual(q):
            results = forward_few_with_residual(q, k, v, *few)
        else:
            results = forward_few(q, k, v, *few)
        ctx.save_for_backward(q, k, v, *results)
        ctx.few = few
        ctx.set_materialize_grads(False)
        return results[0]

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, *results = ctx.saved_tensors
        causal, heads_first, scale, left, right = ctx.few
        return *_eager_gradients((q, k, v, None, None, None, None, None, *results),
                                 (-1, -1, causal, left, right, scale, 0.0, 0.0, None, heads_first), d_o, None,
                                 False)[:3], None


def _eager_gradients(saved, settings, d_o, dlse, needs_bias):
    """gradients() in the backward of an eager call. Raises what the forward raises."""
    for tensor, name in ((d_o, "do"), (dlse, "dlse")):
        if tensor is not None:
            expect_tensor(name, tensor)
    # With create_graph=True gradients are enabled here, and the operator that refuses to be differentiated runs.
    run_backward = attention_backward if torch.is_grad_enabled() else backward
    try:
        return gradients(run_backward, saved, settings, d_o, dlse, needs_bias)
    except RuntimeError as error:
        raise _errors.translated(error) from None
