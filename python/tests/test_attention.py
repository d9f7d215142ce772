# SPDX-License-Identifier: Apache-2.0
"""attention() and attention_backward() on NumPy arrays against fp64, over dtypes, masks, features and layouts."""
import tracemalloc

import ml_dtypes
import numpy
import pytest
from reference import Reference, check_gradient, check_lse, check_o

import tessera

DTYPES = {"float32": numpy.float32, "bfloat16": ml_dtypes.bfloat16, "float16": numpy.float16, "float64": numpy.float64}
# keyword arguments, with the lengths to try them at
CASES = {
    "plain": {},
    "bottom-right": dict(causal="bottom-right"),
    "top-left": dict(causal="top-left"),
    "window": dict(window=(9, 3)),
    "left window": dict(causal="bottom-right", window=(17, None)),
    "scale": dict(scale=0.3),
    "softcap": dict(softcap=1.5),
    "alibi": dict(alibi_slopes=numpy.array([0.5, 0.25, 0.125, 0.0625], numpy.float32)),
}


def inputs(rng, dtype, batch=2, len_q=70, len_kv=93, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=24):
    shapes = ((batch, len_q, heads_q, head_dim), (batch, len_kv, heads_kv, head_dim),
              (batch, len_kv, heads_kv, head_dim_v), (batch, len_q, heads_q, head_dim_v))
    return [rng.standard_normal(s).astype(DTYPES[dtype]) for s in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradient(rng, dtype, case):
    q, k, v, do = inputs(rng, dtype)
    scores = CASES[case]
    o, lse = tessera.attention(q, k, v, return_lse=True, **scores)
    ref = Reference(q, k, v, **scores)
    check_o(o, ref, dtype)
    check_lse(lse, ref)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    gradients = tessera.attention_backward(do, q, k, v, o, lse, dlse=dlse, **scores)
    for name, got, expected in zip(("dq", "dk", "dv"), gradients, ref.backward(do, dlse)):
        assert got.dtype == q.dtype
        check_gradient(name, got, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("len_q", [1, 4, 70, 120], ids=["decoding", "few", "more keys", "rows without a key"])
def test_sinks_and_their_gradient(rng, dtype, len_q):
    q, k, v, do = inputs(rng, dtype, len_q=len_q)
    sinks = numpy.array([-1.5, 0.3, 4, -numpy.inf], numpy.float32)
    scores = dict(causal="bottom-right", sinks=sinks)
    o, lse = tessera.attention(q, k, v, return_lse=True, **scores)
    ref = Reference(q, k, v, **scores)
    check_o(o, ref, dtype)
    check_lse(lse, ref)
    dlse = numpy.where(numpy.isfinite(lse), rng.standard_normal(lse.shape), 0).astype(lse.dtype)
    *gradients, dsinks = tessera.attention_backward(do, q, k, v, o, lse, dlse=dlse, sinks_gradient=True, **scores)
    for name, got, expected in zip(("dq", "dk", "dv"), gradients, ref.backward(do, dlse)):
        check_gradient(name, got, expected, dtype)
    assert dsinks.dtype == numpy.float32
    check_gradient("dsinks", dsinks, ref.dsinks, "float32")
    with pytest.raises(ValueError, match="^sinks_gradient: expected False, since there are no sinks"):
        tessera.attention_backward(do, q, k, v, o, lse, sinks_gradient=True)


@pytest.mark.parametrize("shape", [(70, 93), (4, 70, 93), (1, 4, 70, 93), (2, 4, 1, 93), (2, 1, 1, 93)])
def test_bias_and_its_gradient(rng, shape):
    q, k, v, do = inputs(rng, "float32")
    bias = rng.standard_normal(shape, dtype=numpy.float32)
    o, lse = tessera.attention(q, k, v, bias=bias, return_lse=True)
    ref = Reference(q, k, v, bias=bias)
    check_o(o, ref, "float32")
    check_lse(lse, ref)
    *_, dbias = tessera.attention_backward(do, q, k, v, o, lse, bias=bias, bias_gradient=True)
    expected = ref.backward(do)[3]
    padded = (1,) * (4 - bias.ndim) + shape
    expected = expected.sum(axis=tuple(a for a in range(4) if padded[a] == 1 != expected.shape[a]), keepdims=True)
    check_gradient("dbias", dbias, expected.reshape(shape), "float32")


MASKS = [(70, 93), (4, 70, 1), (2, 1, 1, 93), (2, 4, 70, 93)]


def mask_of(rng, shape):
    """Some queries see no key, and some keys are seen by no query."""
    mask = rng.random(shape) > 0.3
    if shape[-2] > 1:
        mask[..., :5, :] = False
    if shape[-1] > 1:
        mask[..., 60:] = False
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_a_mask_hides_keys(rng, dtype, shape):
    q, k, v, do = inputs(rng, dtype)
    scores = dict(mask=mask_of(rng, shape), causal="bottom-right", softcap=1.5)
    o, lse = tessera.attention(q, k, v, return_lse=True, **scores)
    ref = Reference(q, k, v, **scores)
    check_o(o, ref, dtype)
    check_lse(lse, ref)
    blind = ~numpy.isfinite(ref.lse)
    assert blind.any() == (shape[-2] > 1) and (o.swapaxes(1, 2)[blind] == 0).all() and (lse[blind] == -numpy.inf).all()
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype) * numpy.isfinite(lse)
    gradients = tessera.attention_backward(do, q, k, v, o, lse, dlse=dlse, **scores)
    for name, got, expected in zip(("dq", "dk", "dv"), gradients, ref.backward(do, dlse)):
        check_gradient(name, got, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("bias_shape", [(70, 93), (4, 1, 93), (2, 4, 70, 93)], ids=str)
def test_a_bias_beside_a_mask_gets_its_gradient(rng, dtype, shape, bias_shape):
    q, k, v, do = inputs(rng, dtype)
    bias = rng.standard_normal(bias_shape).astype(DTYPES[dtype])
    scores = dict(mask=mask_of(rng, shape), bias=bias)
    o, lse = tessera.attention(q, k, v, return_lse=True, **scores)
    ref = Reference(q, k, v, **scores)
    check_o(o, ref, dtype)
    check_lse(lse, ref)
    *_, dbias = tessera.attention_backward(do, q, k, v, o, lse, bias_gradient=True, **scores)
    padded = (1,) * (4 - bias.ndim) + bias_shape
    summed = tuple(d for d in range(4) if padded[d] == 1 != (2, 4, 70, 93)[d])
    expected = ref.backward(do)[3].sum(axis=summed, keepdims=True).reshape(bias_shape)
    assert dbias.dtype == bias.dtype
    check_gradient("dbias", dbias, expected, dtype)


def test_a_mask_means_what_its_bias_means(rng):
    """In every layout, with a ragged batch, and where it repeats elements."""
    q, k, v, _ = inputs(rng, "float32")
    mask = mask_of(rng, (2, 1, 70, 93))
    bias = numpy.where(mask, 0, -numpy.inf).astype(numpy.float32)
    want = tessera.attention(q, k, v, bias=bias, return_lse=True)

    def expect_equal(**options):
        got = tessera.attention(q, k, v, return_lse=True, **options)
        assert all((a == b).all() for a, b in zip(got, want))
    backwards = mask[:, :, ::-1].copy()[:, :, ::-1]
    for same in (mask, backwards, numpy.broadcast_to(mask, (2, 4, 70, 93)), mask.copy(order="F")):
        expect_equal(mask=same)
    ones = numpy.ones((1, 4, 1, 1), bool)
    expect_equal(mask=ones, bias=bias)
    expect_equal(mask=mask, bias=numpy.zeros((4, 1, 1), numpy.float32))
    o = tessera.attention(*(a.swapaxes(1, 2) for a in (q, k, v)), mask=mask, layout="bhsd")
    assert (o.swapaxes(1, 2) == want[0]).all()
    ragged = dict(cu_seqlens_q=numpy.arange(3) * 70, cu_seqlens_kv=numpy.arange(3) * 93, max_len_q=70, max_len_kv=93)
    o = tessera.attention(*(a.reshape(-1, *a.shape[2:]) for a in (q, k, v)), mask=mask, **ragged)
    assert (o.reshape(want[0].shape) == want[0]).all()


def test_dimensions_that_a_mask_repeats_take_no_memory():
    q, k = numpy.zeros((4, 2000, 8, 1), numpy.float32), numpy.zeros((4, 2000, 8, 1), numpy.float32)
    mask = numpy.broadcast_to(numpy.arange(2000) < 1000, (4, 8, 2000, 2000))  # 512 MB as a bias
    tracemalloc.start()
    o = tessera.attention(q, k, k, mask=mask)
    assert tracemalloc.get_traced_memory()[1] < 2 * o.nbytes
    tracemalloc.stop()


def test_masks_that_are_refused(rng):
    q, k, v, do = inputs(rng, "float32")
    shape = r"\[2, 4, 70, 93\], any size also 1, got "
    for mask, words in ((numpy.ones((70, 93)), "dtype bool, True where the key takes part, got float64"),
                        (numpy.ones((70, 93), "uint8"), "dtype bool, True where the key takes part, got uint8"),
                        (numpy.ones((70, 92), bool), shape + r"\[1, 1, 70, 92\]"),
                        (numpy.ones((3, 1, 1, 1), bool), shape + r"\[3, 1, 1, 1\]"),
                        (numpy.ones((1,) * 5, bool), "at most 4 dimensions, got 5"),
                        ([[True]], "a NumPy array or one with __dlpack__, got a list")):
        with pytest.raises(ValueError, match="^mask: expected " + words):
            tessera.attention(q, k, v, mask=mask)
    mask = numpy.ones((70, 93), bool)
    with pytest.raises(ValueError, match="^bias: .* got bool; mask= takes one, True where the key takes part"):
        tessera.attention(q, k, v, bias=mask)
    for bias, words in ((numpy.zeros((3, 1, 1, 1), "float32"), shape),
                        (numpy.zeros((1, 1), "int32"), "dtype .*32, got int32")):
        with pytest.raises(ValueError, match="^bias: expected " + words):
            tessera.attention(q, k, v, bias=bias, mask=mask)
    o, lse = tessera.attention(q, k, v, mask=mask, return_lse=True)
    with pytest.raises(ValueError, match="^bias_gradient: expected False, since there is no bias"):
        tessera.attention_backward(do, q, k, v, o, lse, mask=mask, bias_gradient=True)
    with pytest.raises(ValueError, match="^out: expected dtype .* got bool"):
        tessera.attention(q, k, v, out=numpy.empty(do.shape, bool))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rows_behind_the_last_offset_belong_to_no_sequence(rng, layout):
    cu_q, cu_kv = numpy.array([0, 5, 12]), numpy.array([0, 9, 20])
    q = rng.standard_normal((15, 4, 16), dtype=numpy.float32)
    k, v = (rng.standard_normal((40, 2, 16), dtype=numpy.float32) for _ in range(2))
    q[12:], k[20:], v[20:] = (numpy.nan,) * 3
    turn = (lambda x: x.swapaxes(0, 1)) if layout == "bhsd" else (lambda x: x)
    how = dict(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, layout=layout)
    o, lse = tessera.attention(*map(turn, (q, k, v)), return_lse=True, **how)
    want, want_lse = tessera.attention(*map(turn, (q[:12], k[:20], v[:20])), return_lse=True, **how)
    assert (turn(o)[:12] == turn(want)).all() and (turn(o)[12:] == 0).all()
    assert (lse[:, :12] == want_lse).all() and (lse[:, 12:] == -numpy.inf).all()
    do = rng.standard_normal(o.shape, dtype=numpy.float32)
    gradients = tessera.attention_backward(do, *map(turn, (q, k, v)), o, lse, **how)
    exact = tessera.attention_backward(turn(turn(do)[:12]), *map(turn, (q[:12], k[:20], v[:20])), want, want_lse, **how)
    for got, expected in zip(map(turn, gradients), map(turn, exact)):
        assert (got[:len(expected)] == expected).all() and (got[len(expected):] == 0).all()
    given = numpy.full(o.shape, 7, numpy.float32)
    tessera.attention(*map(turn, (q, k, v)), out=given, **how)
    assert (turn(given)[12:] == 7).all()


def test_ragged(rng):
    lengths_q, lengths_kv = [5, 0, 40, 1], [9, 3, 40, 0]
    cu_q, cu_kv = (numpy.cumsum([0, *lengths]).astype(numpy.int32) for lengths in (lengths_q, lengths_kv))
    q = rng.standard_normal((cu_q[-1], 4, 16), dtype=numpy.float32)
    k, v = (rng.standard_normal((cu_kv[-1], 2, 16), dtype=numpy.float32) for _ in range(2))
    ragged = dict(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, causal="bottom-right")
    o, lse = tessera.attention(q, k, v, return_lse=True, **ragged)
    do = rng.standard_normal(o.shape, dtype=numpy.float32)
    gradients = tessera.attention_backward(do, q, k, v, o, lse, max_len_q=40, max_len_kv=40, **ragged)
    assert lse.shape == (4, cu_q[-1])
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        ref = Reference(q[None, rows], k[None, keys], v[None, keys], causal="bottom-right")
        if lengths_q[b]:
            check_o(o[None, rows], ref, "float32")
            check_lse(lse[None, :, rows], ref)
        if lengths_q[b] > 1:
            for name, got, expected, part in zip(("dq", "dk", "dv"), gradients, ref.backward(do[None, rows]),
                                                 (rows, keys, keys)):
                check_gradient(name, got[None, part], expected, "float32")


def test_heads_first_is_the_same_call(rng):
    q, k, v, do = inputs(rng, "float32")
    o, lse = tessera.attention(q, k, v, causal="top-left", return_lse=True)
    swapped = [numpy.ascontiguousarray(a.swapaxes(1, 2)) for a in (q, k, v, do, o)]
    o2, lse2 = tessera.attention(*swapped[:3], causal="top-left", layout="bhsd", return_lse=True)
    assert (o2.swapaxes(1, 2) == o).all() and (lse2 == lse).all()
    first = tessera.attention_backward(do, q, k, v, o, lse, causal="top-left")
    second = tessera.attention_backward(swapped[3], *swapped[:3], swapped[4], lse, causal="top-left", layout="bhsd")
    assert all((a == b.swapaxes(1, 2)).all() for a, b in zip(first, second))


def test_kernels_by_name(rng):
    q, k, v, _ = inputs(rng, "float32")
    ref = Reference(q, k, v)
    for kernel in ("cpu.fa2", "cpu.fa1", "cpu.standard", "reference", "cpu.fa2.forward"):
        o, lse = tessera.attention(q, k, v, kernel=kernel, return_lse=True)
        check_o(o, ref, "float32")
        check_lse(lse, ref)


def test_dropout_is_a_function_of_the_seed(rng):
    q, k, v, do = inputs(rng, "float32", len_q=64, len_kv=64, head_dim_v=64)
    v[:] = numpy.eye(64, dtype=numpy.float32)[None, :, None, :]  # O is then P itself
    first = tessera.attention(q, k, v, dropout_p=0.25, seed=7)
    assert (first == tessera.attention(q, k, v, dropout_p=0.25, seed=7)).all()
    assert (first != tessera.attention(q, k, v, dropout_p=0.25, seed=2**64 - 1)).any()
    p = Reference(q, k, v).o
    kept = first != 0
    assert abs(kept.mean() - 0.75) < 0.01  # 32,768 draws: four standard deviations
    assert numpy.allclose(first[kept], p[kept] / 0.75, rtol=1e-5)
    reference = tessera.attention(q, k, v, dropout_p=0.25, seed=7, kernel="reference", return_lse=True)
    assert ((reference[0] != 0) == kept).all()
    gradients = [tessera.attention_backward(do, q, k, v, *reference, dropout_p=0.25, seed=7, kernel=kernel)
                 for kernel in (None, "reference")]
    for name, got, expected in zip(("dq", "dk", "dv"), *gradients):
        check_gradient(name, got, expected.astype(numpy.float64), "float32")


def test_rows_without_a_key_and_empty_arrays(rng):
    q, k, v, _ = inputs(rng, "float32", len_q=30, len_kv=10)
    o, lse = tessera.attention(q, k, v, causal="bottom-right", return_lse=True)
    assert (o[:, :20] == 0).all() and (lse[:, :, :20] == -numpy.inf).all()
    check_o(o, Reference(q, k, v, causal="bottom-right"), "float32")
    o, lse = tessera.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert (o == 0).all() and (lse == -numpy.inf).all()
    assert tessera.attention(q[:, :0], k, v).shape == (2, 0, 4, 24)
    assert tessera.attention(q[:0], k[:0], v[:0]).shape == (0, 30, 4, 24)


def test_out_is_written_and_given_back(rng):
    q, k, v, do = inputs(rng, "float32")
    out, out_lse = numpy.empty_like(do), numpy.empty((2, 4, 70), numpy.float32)
    o, lse = tessera.attention(q, k, v, out=out, out_lse=out_lse, return_lse=True)
    assert o is out and lse is out_lse
    check_o(o, Reference(q, k, v), "float32")
    gradients = [numpy.empty_like(a) for a in (q, k, v)]
    results = tessera.attention_backward(do, q, k, v, o, lse, out=gradients)
    assert all(a is b for a, b in zip(results, gradients))
    assert all((a == b).all() for a, b in zip(results, tessera.attention_backward(do, q, k, v, o, lse)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_residual_of_o_where_no_kernel_has_one(rng, dtype):
    q, k, v, do = inputs(rng, dtype)
    o, o_residual = tessera.attention(q, k, v, return_o_residual=True)
    assert o_residual is None and (o == tessera.attention(q, k, v)).all()
    o, lse, o_residual = tessera.attention(q, k, v, return_lse=True, return_o_residual=True)
    assert o_residual is None
    without = tessera.attention_backward(do, q, k, v, o, lse)
    with_none = tessera.attention_backward(do, q, k, v, o, lse, o_residual=o_residual)
    assert all((a == b).all() for a, b in zip(without, with_none))


def test_a_wrong_residual_of_o_is_refused(rng):
    q, k, v, do = inputs(rng, "bfloat16")
    o, lse = tessera.attention(q, k, v, return_lse=True)
    for wrong in (numpy.zeros(o.shape, numpy.int32), numpy.zeros(o.shape[:3], numpy.int8)):
        with pytest.raises(ValueError, match="o_residual: expected"):
            tessera.attention_backward(do, q, k, v, o, lse, o_residual=wrong)
    with pytest.raises(ValueError, match="^q: expected dtype float32, bfloat16, float16 or float64, got int8"):
        tessera.attention(q.astype(numpy.int8), k, v)


def test_an_array_without_dimensions_is_no_tensor_left_out(rng):
    q, k, v, do = inputs(rng, "float32")
    o, lse = tessera.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="dlse: expected 1..4 dimensions, got 0"):
        tessera.attention_backward(do, q, k, v, o, lse, dlse=numpy.array(1, numpy.float32))
