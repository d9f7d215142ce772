# SPDX-License-Identifier: Apache-2.0
"""The operators under torch.func: grad, vmap, and one inside the other.

A mapped dimension is folded into the batch. Ragged calls, and calls whose result depends on the index in the batch
(dropout), run once for each entry: vmap(f)(x)[i] == f(x[i])."""
import torch

from . import _operators

# Indices of tensors in the arguments of the forward and of the backward operator.
FORWARD_DENSE, FORWARD_BIAS, FORWARD_ALIBI = (0, 1, 2), 3, 4
BACKWARD_DENSE, BACKWARD_BIAS, BACKWARD_ALIBI = (0, 1, 2, 3, 4, 5, 6), 7, 8


def _front(tensor, dim, size):
    """[size, *shape of one entry]; a tensor that is not mapped is expanded without a copy."""
    return tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _folded(tensor, dim, size):
    return None if tensor is None else _front(tensor, dim, size).flatten(0, 1)


def _folded_bias(bias, dim, size, batch, whole):
    """[size * batch, ...], or [1, ...] if the bias is not mapped. whole: each entry needs a gradient of its own."""
    if bias is None or (dim is None and bias.shape[0] == 1 and not whole):
        return bias
    bias = _front(bias, dim, size)
    return bias.expand(size, batch, *bias.shape[2:]).flatten(0, 1)


def _folded_slopes(slopes, dim, size, batch):
    """fp32 [heads] or [size * batch, heads]."""
    if slopes is None or (dim is None and slopes.dim() == 1):
        return slopes
    slopes = _front(slopes, dim, size)
    if slopes.dim() == 2:
        slopes = slopes.unsqueeze(1)
    return slopes.expand(size, batch, slopes.shape[2]).flatten(0, 1)


def _each(op, size, in_dims, args):
    """One call for each entry."""
    results = [op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims))) for i in range(size)]
    return tuple(torch.stack(parts) for parts in zip(*results))


def _unfolded(result, size, batch):
    """[size, batch, ...] of [size * batch, ...]; the residual [0], which was not kept, becomes [size, 0]."""
    return result.expand(size, 0) if result.dim() == 1 else result.unflatten(0, (size, batch))


def _forward_rule_of(run, info, in_dims, args):
    size = info.batch_size
    if args[5] is not None or args[_operators.DROPOUT_P] != 0:
        results = _each(run, size, in_dims, args)
        return results, (0,) * len(results)
    folded = list(args)
    for place in FORWARD_DENSE:
        folded[place] = _folded(args[place], in_dims[place], size)
    batch = folded[0].shape[0] // size
    folded[FORWARD_BIAS] = _folded_bias(args[FORWARD_BIAS], in_dims[FORWARD_BIAS], size, batch, False)
    folded[FORWARD_ALIBI] = _folded_slopes(args[FORWARD_ALIBI], in_dims[FORWARD_ALIBI], size, batch)
    results = tuple(_unfolded(r, size, batch) for r in run(*folded))
    return results, (0,) * len(results)


def _forward_rule(info, in_dims, *args):
    return _forward_rule_of(attention, info, in_dims, args)


def _with_residual_rule(info, in_dims, *args):
    return _forward_rule_of(_operators.attention_with_residual, info, in_dims, args)


def _backward_rule_of(run, info, in_dims, args):
    size = info.batch_size
    if args[9] is not None or args[_operators.DROPOUT_P + 4] != 0:
        return _each(run, size, in_dims, args), (0,) * 4
    folded = list(args)
    for place in BACKWARD_DENSE:
        folded[place] = _folded(args[place], in_dims[place], size)
    batch = folded[2].shape[0] // size
    bias, bias_dim, bias_gradient = args[BACKWARD_BIAS], in_dims[BACKWARD_BIAS], args[-2]
    folded[BACKWARD_BIAS] = _folded_bias(bias, bias_dim, size, batch, bias_gradient)
    folded[BACKWARD_ALIBI] = _folded_slopes(args[BACKWARD_ALIBI], in_dims[BACKWARD_ALIBI], size, batch)
    dq, dk, dv, dbias = run(*folded)
    dq, dk, dv = (g.unflatten(0, (size, batch)) for g in (dq, dk, dv))
    if not bias_gradient:
        return (dq, dk, dv, dbias.unsqueeze(0).expand(size, 0)), (0,) * 4
    dbias = dbias.unflatten(0, (size, batch))
    one_for_all = (bias if bias_dim is None else bias.movedim(bias_dim, 0)[0]).shape[0] == 1
    return (dq, dk, dv, dbias.sum(1, keepdim=True) if one_for_all else dbias), (0,) * 4


def _backward_rule(info, in_dims, *args):
    return _backward_rule_of(_Backward.apply, info, in_dims, args)


def _operators_backward_rule(info, in_dims, *args):
    return _backward_rule_of(_operators.attention_backward, info, in_dims, args)


class _Attention(torch.autograd.Function):
    """The forward operator with a separate setup_context, which torch.func requires."""

    @staticmethod
    def forward(*args):
        return _operators.forward(*args)

    setup_context = staticmethod(_operators.setup_context)

    @staticmethod
    def backward(ctx, d_o, dlse):
        return _operators.gradients_of_all(_Backward.apply, ctx, d_o, dlse)

    jvp = staticmethod(_operators.no_forward_mode)
    vmap = staticmethod(_forward_rule)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*args):
        return _operators.backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        _operators.no_second_derivative(ctx, *grads)

    jvp = staticmethod(_operators.no_forward_mode)
    vmap = staticmethod(_backward_rule)


attention = _Attention.apply
torch.library.register_vmap("tessera::attention", _forward_rule)
torch.library.register_vmap("tessera::attention_with_residual", _with_residual_rule)
torch.library.register_vmap("tessera::attention_backward", _operators_backward_rule)
