# SPDX-License-Identifier: Apache-2.0
"""merge(): attention over all keys from attention over two parts of them."""
from __future__ import annotations

import sys
from typing import Any

from ._arrays import expect

_INFINITY = float("inf")


def merge(o1: Any, lse1: Any, o2: Any, lse2: Any, *, layout: str = "bshd") -> tuple[Any, Any]:
    """(O, LSE) over the keys of two calls with the same queries, each of which saw some of them.

    o1, o2: [batch, len_q, heads_q, head_dim_v], or [total_q, heads_q, head_dim_v] of a ragged batch; with layout="bhsd"
        heads before rows. All four are arrays of NumPy, PyTorch or JAX.
    lse1, lse2: [batch, heads_q, len_q] or [heads_q, total_q], the natural logarithm of a sum of exponentials, as
        attention() returns it. FlashInfer's have base 2: multiply them by log(2).
    A row of -inf has no key, and its O is not read. +inf, which flash_attn 2.8 gives such a row, counts as -inf.

    Returns O in the dtype of o1, and LSE in that of lse1, -inf where neither part has a key. The result is that of one
    call, to rounding: the weights exp(LSE of a part - LSE) are computed in the dtype of LSE, and O is rounded once.
    With sinks, one part has them, and so has the result. PyTorch and JAX give gradients of all four.
    Calls merge in any order and number: merge(*merge(o1, lse1, o2, lse2), o3, lse3).
    Raises ValueError that names the argument."""
    library = _library_of(o1)
    named = dict(o1=o1, lse1=lse1, o2=o2, lse2=lse2)
    _expect(library, named, layout)
    dtype = o1.dtype
    xp, wide = library.xp, library.wide(lse1.dtype)
    o1, lse1, o2, lse2 = (library.cast(named[name], wide) for name in named)
    empty1, empty2 = (abs(lse) == _INFINITY for lse in (lse1, lse2))
    # Rows without a key get numbers that are finite in their place: a gradient of 0 times infinity would be NaN.
    finite1, finite2 = xp.where(empty1, 0.0, lse1), xp.where(empty2, 0.0, lse2)
    lse = xp.where(empty1, finite2, xp.where(empty2, finite1, xp.logaddexp(finite1, finite2)))
    lse = xp.where(empty1 & empty2, -_INFINITY, lse)
    # Each weight from the difference: 1 - (the other weight) has no digits of a small one.
    weight1 = xp.where(empty1, 0.0, xp.where(empty2, 1.0, library.sigmoid(finite1 - finite2)))
    weight2 = xp.where(empty2, 0.0, xp.where(empty1, 1.0, library.sigmoid(finite2 - finite1)))

    def of_rows(values):
        """[.., rows, heads, 1], or heads before rows with "bhsd"."""
        return (values if layout == "bhsd" else xp.swapaxes(values, -1, -2))[..., None]

    o = (of_rows(weight1) * xp.where(of_rows(empty1), 0.0, o1)
         + of_rows(weight2) * xp.where(of_rows(empty2), 0.0, o2))
    return library.cast(o, dtype), library.cast(lse, named["lse1"].dtype)


class _Numpy:
    def __init__(self):
        import numpy
        self.xp, self.kind = numpy, numpy.ndarray

    def wide(self, dtype):
        return self.xp.promote_types(dtype, self.xp.float32) if dtype.kind == "f" else self.xp.dtype("float32")

    def cast(self, array, dtype):
        return array.astype(dtype, copy=False)

    def is_floating(self, array):
        return array.dtype.kind == "f" or array.dtype.name == "bfloat16"

    def sigmoid(self, x):
        small = self.xp.exp(-abs(x))
        return self.xp.where(x >= 0, 1, small) / (1 + small)


class _Torch:
    def __init__(self):
        import torch
        self.xp, self.kind, self.sigmoid = torch, torch.Tensor, torch.sigmoid

    def wide(self, dtype):
        return self.xp.promote_types(dtype, self.xp.float32)

    def cast(self, array, dtype):
        return array.to(dtype)

    def is_floating(self, array):
        return array.is_floating_point()


class _Jax:
    def __init__(self):
        import jax
        self.xp, self.kind, self.sigmoid = jax.numpy, jax.Array, jax.nn.sigmoid

    def wide(self, dtype):
        return self.xp.promote_types(dtype, self.xp.float32)

    def cast(self, array, dtype):
        return array.astype(dtype)

    def is_floating(self, array):
        return self.xp.issubdtype(array.dtype, self.xp.floating)


def _library_of(array):
    for package, library in (("numpy", _Numpy), ("torch", _Torch), ("jax", _Jax)):
        if package in sys.modules:
            found = library()
            if isinstance(array, found.kind):
                return found
    expect("o1", "an array of NumPy, PyTorch or JAX", f"a {type(array).__name__}")


def _expect(library, named, layout):
    """Raises ValueError unless the four fit together."""
    if layout not in ("bshd", "bhsd"):
        expect("layout", "'bshd' or 'bhsd'", repr(layout))
    o1 = named["o1"]
    if o1.ndim not in (3, 4):
        expect("o1", "[batch, len_q, heads_q, head_dim_v] or [total_q, heads_q, head_dim_v]", list(o1.shape))
    rows = list(o1.shape[:-1])
    if layout == "bshd":
        rows[-2:] = rows[:-3:-1]
    shapes = dict(o1=list(o1.shape), o2=list(o1.shape), lse1=rows, lse2=rows)
    for name, array in named.items():
        if not isinstance(array, library.kind):
            expect(name, f"a {library.kind.__name__}, as o1 is one", f"a {type(array).__name__}")
        if list(array.shape) != shapes[name]:
            expect(name, f"shape {shapes[name]}", list(array.shape))
        if not library.is_floating(array):
            expect(name, "a floating dtype", array.dtype)
