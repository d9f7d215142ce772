# SPDX-License-Identifier: Apache-2.0
"""Arrays as they come: strides, read-only, bf16, old and new capsules, streams; and every one that is refused."""
import ctypes
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy
import pytest
from reference import Reference, check_lse, check_o

import tessera
from tessera import _arrays


class Lent:
    """A NumPy array that only speaks DLPack. `old`: as before DLPack 1.0. `change`: edits the tensor that is lent."""

    device = "cpu"  # as NumPy's namespace takes it

    def __init__(self, array, old=False, change=None, place=(1, 0)):
        self.array, self.old, self.change, self.place, self.asked = array, old, change, place, []

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, **asked):
        self.asked.append(asked)
        if self.old and "max_version" in asked:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        capsule = self.array.__dlpack__(**({} if self.old else {"max_version": (1, 0)}))
        if self.change is not None:
            self.change(_arrays._tensor_of("test", capsule)[0])
        return capsule

    def __array_namespace__(self):
        return numpy


@pytest.fixture
def qkv(rng):
    return [rng.standard_normal(s, dtype=numpy.float32) for s in ((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16))]


def expect_error(pattern, *arrays, **keywords):
    with pytest.raises(ValueError, match=pattern):
        tessera.attention(*arrays, **keywords)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_gives_numpys_result(qkv, old):
    o = tessera.attention(*(Lent(a, old) for a in qkv))
    assert type(o) is numpy.ndarray and (o == tessera.attention(*qkv)).all()


def test_any_strides(qkv):
    q, k, v = qkv
    big = numpy.zeros((2, 40, 8, 32), numpy.float32)
    views = [big[:, ::2, ::-2, 3:19], k[:, ::-1].copy()[:, ::-1], numpy.asfortranarray(v)]
    views[0][:] = q
    expected = tessera.attention(*qkv)
    assert (tessera.attention(*views) == expected).all()
    assert (tessera.attention(*map(Lent, views)) == expected).all()
    one_key = numpy.broadcast_to(k[:, :1], k.shape)  # stride 0, and NumPy's is read-only
    assert (tessera.attention(q, one_key, v) == tessera.attention(q, one_key.copy(), v)).all()


def test_inputs_may_be_read_only_and_stay_as_they_are(qkv):
    before = [a.copy() for a in qkv]
    for a in qkv:
        a.flags.writeable = False
    tessera.attention(*qkv)
    tessera.attention(*map(Lent, qkv))
    assert all((a == b).all() for a, b in zip(qkv, before))


def test_tensors_without_strides_and_with_an_offset(qkv):
    def without_strides(tensor):
        tensor.strides = None

    def shifted(tensor):
        tensor.data -= 8
        tensor.byte_offset += 8
    expected = tessera.attention(*qkv)
    assert (tessera.attention(*(Lent(a, change=without_strides) for a in qkv)) == expected).all()
    assert (tessera.attention(*(Lent(a, change=shifted) for a in qkv)) == expected).all()


def test_bf16_of_numpy_and_of_jax(qkv):
    rounded = [a.astype(ml_dtypes.bfloat16) for a in qkv]
    o, lse = tessera.attention(*rounded, return_lse=True)
    ref = Reference(*rounded)
    check_o(o, ref, "bfloat16")
    check_lse(lse, ref)
    with jax.default_device(jax.devices("cpu")[0]):  # arrays of a GPU are not an array interface's matter
        arrays = [jnp.asarray(a) for a in rounded]
    o2, lse2 = tessera.attention(*arrays, return_lse=True)
    assert isinstance(o2, jax.Array) and o2.dtype == jnp.bfloat16
    assert (numpy.asarray(o2) == o).all() and (numpy.asarray(lse2) == lse).all()


class Standard(Lent):
    """An array with no more than the Python array API standard's namespace, indices and dtype."""

    def __array_namespace__(self):
        return types.SimpleNamespace(**{n: getattr(numpy, n) for n in ("empty", "float32", "full", "zeros")},
                                     where=lambda mask, *a: numpy.where(mask.array, *a),
                                     astype=lambda a, dtype: a.array.astype(dtype))

    @property
    def dtype(self):
        return self.array.dtype

    def __getitem__(self, index):
        return Standard(self.array[index])


def of_torch(array):
    return pytest.importorskip("torch", reason="PyTorch is not installed").from_numpy(array)


LIBRARIES = {"numpy": numpy.asarray, "torch": of_torch, "jax": jnp.asarray, "standard": Standard}


@pytest.mark.parametrize("name", LIBRARIES)
def test_masks_of_every_library(qkv, rng, name):
    mask, bias = rng.random((2, 1, 20, 30)) > 0.3, rng.standard_normal((4, 1, 30), dtype=numpy.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        made = [LIBRARIES[name](a) for a in (*qkv, mask, bias, mask[:, :, :1].copy())]
    q, k, v, given, given_bias, of_keys = made
    wanted = tessera.attention(*qkv, mask=mask, bias=bias, return_lse=True)
    o, lse = tessera.attention(q, k, v, mask=given, bias=given_bias, return_lse=True)
    assert all((numpy.asarray(a) == b).all() for a, b in zip((o, lse), wanted))
    got = tessera.attention(q, k, v, mask=of_keys)
    assert (numpy.asarray(got) == tessera.attention(*qkv, mask=mask[:, :, :1])).all()
    do = rng.standard_normal(wanted[0].shape, dtype=numpy.float32)
    want = tessera.attention_backward(do, *qkv, *wanted, mask=mask, bias=bias, bias_gradient=True)[3]
    got = tessera.attention_backward(do, q, k, v, o, lse, mask=given, bias=given_bias, bias_gradient=True)[3]
    if name in ("torch", "jax"):
        assert type(got) is type(given_bias)
    assert numpy.asarray(got).shape == bias.shape and numpy.asarray(got).dtype == numpy.float32
    assert (numpy.asarray(got) == want).all()
    if name != "numpy":
        assert (numpy.asarray(tessera.attention(q, k, v, mask=mask)) == tessera.attention(*qkv, mask=mask)).all()
        expect_error("^mask: expected a .*, as the bias is, got a ", q, k, v, mask=mask, bias=given_bias)


def test_a_mask_that_no_library_can_turn_into_a_bias(qkv):
    class Plain(Lent):
        __array_namespace__ = None
    expect_error("^mask: expected an array of a library whose arrays have __array_namespace__, got a Plain", *qkv,
                 mask=Plain(numpy.ones((20, 30), bool)))
    read_only = numpy.ones((20, 30), bool)
    read_only.flags.writeable = False
    assert (tessera.attention(*qkv, mask=read_only) == tessera.attention(*qkv)).all()
    expect_error("^mask: expected an array whose memory holds its numbers", *qkv, mask=numpy.ma.masked_array(read_only))
    expect_error("^k: expected dtype float32, bfloat16, float16 or float64, got bool", qkv[0], Lent(read_only), qkv[2])


def test_capsules_are_given_back(qkv):
    freed = []

    class Counted(numpy.ndarray):
        def __del__(self):
            freed.append(1)
    arrays = [a.copy().view(Counted) for a in qkv]
    tessera.attention(*map(Lent, arrays))
    del arrays
    assert len(freed) >= 3


def test_stream_is_handed_over(qkv):
    """No kernel runs: k is refused. q must have been told of the stream by then."""
    def on_cuda(tensor):
        tensor.device_type = 2
    for given, told in ((None, 1), (0, 1), (4711, 4711)):
        q = Lent(qkv[0], change=on_cuda, place=(2, 0))
        expect_error("^k: expected an array on cuda:0, where q is, got one on the host", q, *qkv[1:], stream=given)
        assert q.asked == [{"max_version": (1, 0), "stream": told}]
    on_host = Lent(qkv[0])
    tessera.attention(on_host, *qkv[1:])
    assert on_host.asked == [{"max_version": (1, 0)}]


def test_arrays_that_are_refused(qkv):
    q, k, v = qkv
    expect_error("^q: expected a NumPy array or one with __dlpack__, got a list", [[1.0]], k, v)
    expect_error("^k: expected a NumPy array or one with __dlpack__, got a NoneType", q, None, v)
    for name in ("scale", "softcap", "dropout_p"):
        expect_error(f"^{name}: expected a number that is finite in fp32, got an integer of 1329 bits", *qkv,
                     **{name: 10**400})
    for dtype in (numpy.int8, numpy.int32, numpy.int16, numpy.complex64, bool):
        expect_error("^q: expected dtype float32, bfloat16, float16 or float64", q.astype(dtype), k, v)
    expect_error("^q: expected dtype .* got DLPack type code 1 with 8 bits", Lent(q.astype(numpy.uint8)), k, v)
    expect_error("^q: expected dtype .*byte order, got >f4", q.astype(">f4"), k, v)
    expect_error("^v: expected fp32, got fp16|^v: expected dtype fp32", q, k, v.astype(numpy.float16))
    expect_error(r"^q: expected 4 dimensions \(\[batch, len, heads, head_dim\]\), got 3", q[0], k, v)
    expect_error(r"^k: expected shape \[2, 30, 2, 16\], got \[1, 30, 2, 16\]", q, k[:1], v)
    expect_error("^q: expected at most 4 dimensions, got 5", q[None], k, v)
    unaligned = numpy.zeros(q.nbytes + 1, numpy.uint8)[1:].view(numpy.float32).reshape(q.shape)
    expect_error("^q: expected elements aligned to their 4 bytes", unaligned, k, v)
    records = numpy.zeros(q.shape, [("x", numpy.float32), ("y", numpy.int8)])["x"]
    expect_error("^q: expected elements aligned to their 4 bytes", records, k, v)


def test_lenders_that_are_refused(qkv):
    q, k, v = qkv

    def elsewhere(tensor):
        tensor.device_type = 7

    class Unwilling(Lent):
        def __dlpack__(self, **asked):
            raise BufferError("can't export tensors that require gradient")

    class Used(Lent):
        def __dlpack__(self, **asked):
            capsule = super().__dlpack__(**asked)
            ctypes.pythonapi.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
            ctypes.pythonapi.PyCapsule_SetName(capsule, b"used_dltensor_versioned")
            return capsule
    expect_error("^q: expected memory of the host or of a CUDA device, got DLPack device type 7",
                 Lent(q, change=elsewhere), k, v)
    expect_error("^q: expected an array that its library can export by DLPack, got the error: can't export",
                 Unwilling(q), k, v)
    expect_error("^q: expected a DLPack capsule that nobody has used", Used(q), k, v)


def test_outputs_that_are_refused(qkv):
    q, k, v = qkv
    out = numpy.full(q.shape, 7, numpy.float32)
    expect_error("^out: ", q, k, v, out=q)  # aliasing an input
    expect_error("^out: expected shape", q, k, v, out=out[:1])
    expect_error("^out: ", q, k, v, out=out.astype(numpy.float16))
    expect_error("^out: ", q, k, v, out=numpy.broadcast_to(out[:, :1], out.shape))
    expect_error("^out: ", q, k, v, out=numpy.lib.stride_tricks.as_strided(out, out.shape, (0, 0, 64, 4)))
    expect_error("^out_lse: ", q, k, v, out=out, out_lse=out.reshape(-1)[:160].reshape(2, 4, 20))
    read_only = out.copy()
    read_only.flags.writeable = False
    expect_error("^out: expected an array that may be written, got one that is read-only", q, k, v, out=read_only)
    expect_error("^out: expected an array that may be written", q, k, v, out=Lent(read_only))
    assert (out == 7).all(), "a call that fails writes nothing"


def test_results_where_the_library_is_unknown(qkv):
    class Plain(Lent):
        __array_namespace__ = None
    arrays = list(map(Plain, qkv))
    expect_error("^out: expected arrays for the results, since a Plain does not tell how to make one", *arrays)
    out = numpy.empty(qkv[0].shape, numpy.float32)
    assert tessera.attention(*arrays, out=out) is out and (out == tessera.attention(*qkv)).all()
