# SPDX-License-Identifier: Apache-2.0
"""Broadcasting of batch and heads as torch.nn.functional.scaled_dot_product_attention has it."""
import torch


def four_dimensions(tensor):
    """[batch, heads, len, head_dim] from [..., len, head_dim]; the batch has all leading dimensions but the last."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() > 4:
        return tensor.flatten(0, -4)
    return tensor[(None,) * (4 - tensor.dim())]


def heads_first(query, key, value, grouped):
    """q, k and v, each [batch, heads, len, dim], and the leading dimensions of O, which end with its heads.

    query, key, value: [..., heads, len, dim]. The leading dimensions broadcast. With `grouped` the heads do not: those
    of key and of value each divide those of query. Numbers that repeat are not copied (stride 0), unless key and value
    differ in their heads. Raises ValueError that names query, key or value."""
    kept = 3 if grouped else 2  # trailing dimensions that do not broadcast
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < kept:
            raise ValueError(f"{name}: expected {kept} dimensions or more, got {tensor.dim()}")
    if grouped:
        key, value = _with_equal_heads(query.shape[-3], key, value)
    leading = _broadcast_shape(query, key, value, kept)
    q = query.expand(*leading, *query.shape[-kept:])
    if not grouped and len(leading) > 0 and _heads(key) == _heads(value) == 1:
        leading_kv = (*leading[:-1], 1)  # one head of keys for all queries is what kernels have anyway
    else:
        leading_kv = leading
    k, v = (t.expand(*leading_kv, *t.shape[-kept:]) for t in (key, value))
    return four_dimensions(q), four_dimensions(k), four_dimensions(v), q.shape[:-2]


def _heads(tensor):
    return tensor.shape[-3] if tensor.dim() > 2 else 1


def _with_equal_heads(heads, key, value):
    """key and value with as many heads as each other, a divisor of `heads`."""
    for name, tensor in (("key", key), ("value", value)):
        if heads % max(tensor.shape[-3], 1) != 0:
            raise ValueError(f"{name}: expected a number of heads that divides the {heads} of query, got "
                             f"{tensor.shape[-3]}")
    if key.shape[-3] == value.shape[-3]:
        return key, value
    larger, smaller = max(key.shape[-3], value.shape[-3]), min(key.shape[-3], value.shape[-3])
    common = larger if smaller > 0 and larger % smaller == 0 else heads
    return tuple(t.repeat_interleave(common // max(t.shape[-3], 1), -3) for t in (key, value))


def _broadcast_shape(query, key, value, kept):
    """The shape to which all dimensions before the last `kept` broadcast."""
    shape = query.shape[:-kept]
    for name, tensor in (("key", key), ("value", value)):
        own = tensor.shape[:-kept]
        try:
            shape = torch.broadcast_shapes(shape, own)
        except RuntimeError:
            if kept == 2 and own[-1] not in (1, shape[-1]) and shape[-1] != 1:
                raise ValueError(f"{name}: expected {shape[-1]} heads as query has, or 1 (enable_gqa=False), got "
                                 f"{own[-1]}") from None
            raise ValueError(f"{name}: expected a batch that broadcasts with {list(shape)}, got {list(own)}") from None
    return shape
