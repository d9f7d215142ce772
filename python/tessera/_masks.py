# SPDX-License-Identifier: Apache-2.0
"""A bool mask as the C ABI takes it: a bias of 0 and -inf, or the caller's bias with -inf where the mask is False."""
from __future__ import annotations

from . import _native
from ._arrays import ITEM_SIZE, Array, borrow, expect
from ._results import dlpack_stream, library_of, working_on


def expect_broadcasts(array: Array, full) -> None:
    """Raises ValueError unless an array of 4 dimensions broadcasts to this shape."""
    if any(size not in (1, wanted) for size, wanted in zip(array.shape, full)):
        expect(array.name, f"{list(full)}, any size also 1", list(array.shape))


def bias_of(mask: Array, bias: Array | None, q: Array, full, bias_gradient, stream, given_stream) -> Array:
    """The bias that a mask and a bias (None: 0) make together; full: [batch, heads_q, len_q, len_kv].

    It is of the library of the mask and in the dtype of the bias or of q, or in fp32 where NumPy has no such dtype.
    Dimensions that the mask repeats are there once. stream: of the kernels; given_stream: the caller's, or None."""
    expect_broadcasts(mask.padded(), full)
    library, like, numbers = library_of(mask.source), q, None
    if bias is not None:
        expect_broadcasts(bias.padded(), full)
        if bias.dtype not in (_native.FP32, q.dtype):
            return bias  # the call refuses it
        if library_of(bias.source) is not library:
            expect("mask", f"a {type(bias.source).__name__}, as the bias is", f"a {type(mask.source).__name__}")
        like, numbers = bias, bias.source
    dtype = like.dtype
    if library_of(like.source) is not library:
        like, dtype = mask, _native.FP32
    elif bias is not None and bias_gradient and ITEM_SIZE[dtype] == 2 and summed_dims(mask, bias):
        dtype = _native.FP32  # the gradient of the bias is a sum of these, which is rounded once
    once = mask.source
    if 0 in mask.strides:
        once = once[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.strides)]
    # Memory that the result frees is used again in the order of this stream.
    with working_on(mask, given_stream if library_of(q.source) is library else stream):
        source = library.masked(like, once, numbers, dtype)
    return borrow("bias", source, None if stream is None else dlpack_stream(stream))


def summed_dims(larger: Array, bias: Array):
    """The dimensions, counted from the end, in which the bias has size 1 and the other array has not."""
    pairs = zip(larger.padded().shape, bias.padded().shape)
    return tuple(d - _native.MAX_RANK for d, (size, own) in enumerate(pairs) if own == 1 != size)


def gradient_of(bias: Array, made: Array, gradient: Array, given_stream) -> Array:
    """The gradient of the caller's bias, from that of the bias that bias_of() made."""
    with working_on(bias, given_stream):
        summed = library_of(bias.source).summed(bias, gradient.source, summed_dims(made, bias), bias.shape)
    return borrow("dbias", summed)
