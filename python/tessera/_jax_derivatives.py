# SPDX-License-Identifier: Apache-2.0
"""The calls of the handlers for XLA as functions with gradients and a rule for vmap."""
import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._arrays import expect
from ._jax_calls import varying
from ._jax_sharding import Shapes, with_automatic_axes

_NOT_DIFFERENTIABLE = ('tessera.jax.dot_product_attention: this derivative is not there. The kernels have reverse '
                       'mode, once; implementation="xla" has every derivative, and takes the memory of all weights')


def _refuse(*_, **__):
    raise NotImplementedError(_NOT_DIFFERENTIABLE)


# An argument of a call passes _argument, which leaves it as it is, and its tangent passes _tangent. Reverse mode
# transposes that, and nothing of it is left. Forward mode computes it, under jit when the graph is lowered, where the
# error of JAX's own would name nobody.
_argument, _tangent = Primitive("tessera_argument"), Primitive("tessera_tangent")
for _primitive in (_argument, _tangent):
    _primitive.def_abstract_eval(lambda array: array)
_argument.def_impl(lambda array: array)
mlir.register_lowering(_argument, lambda context, array: [array])
batching.primitive_batchers[_argument] = lambda arrays, dims: (_argument.bind(*arrays), *dims)
ad.primitive_jvps[_argument] = lambda primals, tangents: (_argument.bind(*primals), _tangent.bind(*tangents))
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse
ad.deflinear(_tangent, lambda cotangent: [cotangent])


def same_axes(arrays):
    """The arrays, each marked as varying over all axes of jax.shard_map over which one of them varies."""
    axes_of = [varying(jax.typeof(a)) for a in arrays]
    every = frozenset().union(*axes_of)
    cast = getattr(jax.lax, "pcast", None)
    missing = [tuple(sorted(every - has)) for has in axes_of]
    return [a if not axes else cast(a, axes, to="varying") if cast else jax.lax.pvary(a, axes)
            for a, axes in zip(arrays, missing)]


def _batched(scores, backward, with_bias, o_residual=False):
    """The call as a function of its arrays, with a rule for vmap that adds a dimension to the batch."""
    @jax.custom_batching.custom_vmap
    def call(*arrays):
        arrays = same_axes(arrays)
        q, k, v = (a.shape for a in arrays[:3])
        bias = arrays[-1].shape if with_bias else None
        return tuple(with_automatic_axes(Shapes(scores, backward, q, k, v, bias, o_residual), arrays)(*arrays))

    @call.def_vmap
    def rule(size, batched, *arrays):
        arrays = [a if is_batched else jnp.broadcast_to(a, (size, *a.shape)) for a, is_batched in zip(arrays, batched)]
        results = call(*arrays)
        return results, (True,) * len(results)

    function = jax.custom_jvp(call)
    function.defjvp(_refuse)
    return function


@functools.lru_cache(maxsize=1024)
def differentiable(scores, with_bias, o_residual):
    """(q, k, v[, bias]) -> (o, lse), with gradients of both results for every argument. o_residual: a forward that
    will have a backward keeps the residual of O."""
    forward = _batched(scores, False, with_bias)
    kept, backward = (_batched(scores, is_backward, with_bias, o_residual) for is_backward in (False, True))

    @jax.custom_vjp
    def function(*arrays):
        return forward(*arrays)

    def forward_rule(*arrays):
        o, lse, *residual = kept(*arrays)
        return (o, lse), (arrays, o, lse, residual)

    def backward_rule(saved, gradients):
        (q, k, v, *bias), o, lse, residual = saved
        return backward(q, k, v, o, lse, *gradients, *residual, *bias)

    function.defvjp(forward_rule, backward_rule)

    return lambda *arrays: function(*map(_argument.bind, arrays))


def expect_numbers(name, shape):
    """Raises ValueError unless a shape has numbers alone, since the size of the workspace depends on them."""
    if not all(isinstance(size, int) for size in shape):
        expect(name, 'a shape of numbers, since only implementation="xla" takes symbolic ones',
               f"({', '.join(map(str, shape))})")
