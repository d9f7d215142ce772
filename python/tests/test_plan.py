# SPDX-License-Identifier: Apache-2.0
"""plan() says what a call would do, predict() what it would take, and both refuse what attention() refuses."""
import types

import numpy
import pytest

import tessera
from tessera import Spec

HALF = Spec((1, 4096, 16, 128), "bfloat16")


def test_plan_names_the_kernel_and_every_refusal():
    q = numpy.zeros((1, 64, 4, 32), numpy.float32)
    plan = tessera.plan(q, q, q, causal="top-left")
    assert plan.kernel == "cpu.fa2.forward" and plan.threads >= 1 and plan.workspace_bytes > 0
    assert {r.kernel for r in plan.refused} >= {"cpu.fa1.forward", "cpu.standard.forward", "reference.forward"}
    assert all(r.reason for r in plan.refused)
    assert all(r.capable for r in plan.refused if r.kernel.startswith("cpu"))
    assert plan.kernel in str(plan) and "causal top-left" in str(plan)
    assert plan.predicted is None, "the model knows no name for a host"
    assert tessera.plan(q, q, q, kernel="reference", backward=True).kernel == "reference.backward"
    assert tessera.plan(q, q, q, threads=1).threads == 1


def test_plan_of_a_spec_allocates_nothing():
    huge = Spec((1, 2**26, 64, 128), "bfloat16")  # a terabyte
    assert tessera.plan(huge, huge, huge, threads=1).kernel == "cpu.fa2.forward"


def test_a_mask_is_planned_as_the_bias_that_it_becomes():
    mask = Spec((1, 1, 4096, 4096), "bool")
    biased = tessera.plan(HALF, HALF, HALF, bias=Spec((1, 1, 4096, 4096), "bfloat16"), threads=1)
    assert str(tessera.plan(HALF, HALF, HALF, mask=mask, threads=1)) == str(biased) and "bias" in str(biased)
    q = numpy.zeros((1, 64, 4, 32), numpy.float32)
    ones = numpy.ones((64, 64), bool)
    assert str(tessera.plan(q, q, q, mask=ones)) == str(tessera.plan(q, q, q, mask=Spec((64, 64), "bool")))
    with pytest.raises(ValueError, match="^mask: expected dtype bool, True where the key takes part, got bfloat16"):
        tessera.plan(HALF, HALF, HALF, mask=HALF)
    with pytest.raises(ValueError, match=r"^mask: expected \[1, 16, 4096, 4096\], any size also 1, got"):
        tessera.plan(HALF, HALF, HALF, mask=Spec((4, 4096), "bool"))
    with pytest.raises(ValueError, match="^k: expected dtype .*, got bool"):
        tessera.plan(HALF, Spec((1, 4096, 16, 128), "bool"), HALF)


def test_a_kernel_that_can_not_run_it_says_why():
    q = Spec((1, 64, 4, 32), "float64")
    assert tessera.plan(q, q, q).kernel == "reference.forward"
    with pytest.raises(tessera.Unsupported, match="cpu.fa2.forward: does not take fp64"):
        tessera.plan(q, q, q, kernel="cpu.fa2")


def test_cuda_plans_or_says_why_not():
    q = Spec((1, 64, 4, 64), "bfloat16", "cuda:0")
    try:
        assert tessera.plan(q, q, q).kernel.startswith("cuda.")
    except tessera.DeviceUnavailable as error:
        assert "CUDA" in str(error)


def test_predict():
    forward = tessera.predict(HALF, HALF, HALF, machine="h200", causal="bottom-right")
    assert forward.machine == "h200" and forward.schedule == "fa3" and 0 < forward.ms < 1
    assert 0 < forward.error < 0.5
    standard = tessera.predict(HALF, HALF, HALF, machine="h200", causal="bottom-right", schedule="standard")
    backward = tessera.predict(HALF, HALF, HALF, machine="h200", causal="bottom-right", backward=True)
    assert standard.schedule == "standard" and standard.ms > forward.ms and backward.ms > forward.ms
    named = tessera.predict(HALF, HALF, HALF, machine="xeon-16", kernel="cpu.fa1")
    assert named.schedule == "fa1"
    on_host = tessera.predict(HALF, HALF, HALF, machine="xeon-16", threads=1)
    assert on_host.ms > tessera.predict(HALF, HALF, HALF, machine="xeon-16", threads=16).ms


@pytest.mark.parametrize("function", [tessera.plan, lambda *a, **k: tessera.predict(*a, machine="h200", **k),
                                      tessera.attention])
@pytest.mark.parametrize("pattern, keywords", [
    ("^causal: expected None, 'bottom-right' or 'top-left'", dict(causal=True)),
    ("^causal: ", dict(causal="bottom_right")),
    ("^causal: ", dict(causal=numpy.ones(3))),
    (r"^window: expected None or \(left, right\), got 3", dict(window=3)),
    ("^window: expected an integer", dict(window=(1.5, None))),
    ("^window: expected an integer from 0 on or None, got -1", dict(window=(-1, 3))),
    ("^scale: expected a number", dict(scale="1")),
    ("^scale: expected a number that is finite in fp32", dict(scale=float("nan"))),
    ("^softcap: ", dict(softcap=-2)),
    (r"^dropout_p: expected a probability in \[0, 1\), got 1", dict(dropout_p=1)),
    ("^seed: expected an integer", dict(seed=0.5)),
    ("^seed: expected an integer of 64 bits", dict(seed=-2**63 - 1)),
    ("^window: expected an integer of 64 bits", dict(window=(2**70, None))),
    ("^max_len_q: expected None without cu_seqlens, got 3", dict(max_len_q=3)),
    ("^scale: expected a number that is finite in fp32, got 1j", dict(scale=1j)),
    ("^kernel: expected one of cpu.fa2.forward", dict(kernel="cpu.fa2\0x")),
    ("^layout: expected 'bshd' or 'bhsd'", dict(layout="sbhd")),
    ("^kernel: expected one of cpu.fa2.forward", dict(kernel="cuda.fa9")),
    ("^cu_seqlens_kv: expected an array, since the other one is given", dict(cu_seqlens_q=numpy.zeros(2, "int32"))),
])
def test_wrong_arguments_are_named(function, pattern, keywords):
    q = numpy.zeros((1, 64, 4, 32), numpy.float32)
    if "cu_seqlens_q" in keywords:
        q = q[0]
    with pytest.raises(ValueError, match=pattern):
        function(q, q, q, **keywords)


@pytest.mark.parametrize("pattern, keywords", [
    ("^threads: expected 0..1024", dict(threads=-1)),
    ("^stream: expected an integer, got 'x'", dict(stream="x")),
    ("^bias: expected dtype fp32, got int32", dict(bias=numpy.zeros((64, 64), numpy.int32))),
    (r"^bias: expected \[1, 4, 64, 64\], any size also 1, got", dict(bias=numpy.zeros((64, 3), numpy.float32))),
    ("^bias: expected", dict(bias=numpy.zeros((64, 64), numpy.float16))),
    ("^alibi_slopes: expected", dict(alibi_slopes=numpy.zeros(3, numpy.float32))),
    ("^alibi_slopes: expected", dict(alibi_slopes=numpy.zeros(4, numpy.float64))),
])
def test_wrong_arrays_are_named(pattern, keywords):
    q = numpy.zeros((1, 64, 4, 32), numpy.float32)
    with pytest.raises(ValueError, match=pattern):
        tessera.attention(q, q, q, **keywords)


@pytest.mark.parametrize("cu_seqlens", [[0, 70], [1, 64], [0, 30, 20, 64], [0, -1, 64]])
def test_wrong_lengths_are_named(cu_seqlens):
    q = numpy.zeros((64, 4, 32), numpy.float32)
    right = numpy.linspace(0, 64, len(cu_seqlens)).astype(numpy.int64)
    with pytest.raises(ValueError, match="^cu_seqlens_kv"):
        tessera.attention(q, q, q, cu_seqlens_q=right, cu_seqlens_kv=numpy.array(cu_seqlens))


def test_wrong_words():
    q = numpy.zeros((1, 64, 4, 32), numpy.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        tessera.plan(q, q, q, is_causal=True)
    with pytest.raises(ValueError, match="^machine: expected one of .*h200.*, got \"h300\""):
        tessera.predict(q, q, q, machine="h300")
    with pytest.raises(ValueError, match="^schedule: expected standard or fa1"):
        tessera.predict(q, q, q, machine="h200", schedule="fa9")
    with pytest.raises(ValueError, match="^dtype: expected float64 or"):
        Spec((1, 2, 3, 4), "int16")
    with pytest.raises(ValueError, match="^device: expected cpu, cuda or cuda:INDEX"):
        Spec((1, 2, 3, 4), device="tpu")


def test_spec_holds_no_data():
    with pytest.raises(ValueError, match="^q: expected a NumPy array or one with __dlpack__, got a Spec"):
        tessera.attention(Spec((1, 64, 4, 32)), *[numpy.zeros((1, 64, 4, 32), numpy.float32)] * 2)


class Problem(types.SimpleNamespace):
    """The fields of a problem that say whether copies pay."""

    def __init__(self, length, **fields):
        unbounded = tessera._native.UNBOUNDED
        super().__init__(**{**dict(ragged=0, len_q=length, len_kv=length, window_left=unbounded,
                                   window_right=unbounded, causal=0), **fields})


def test_copies_of_unaligned_rows_pay_for_long_sequences_only():
    """The limits follow from 295 FLOP a byte: 885 keys forward, 472 backward; causal twice that."""
    from tessera._layout import copies_pay
    for backward, limit in ((False, 885), (True, 472)):
        assert copies_pay(Problem(limit), backward) and not copies_pay(Problem(limit - 1), backward)
        assert copies_pay(Problem(2 * limit, causal=1), backward)
        assert not copies_pay(Problem(2 * limit - 2, causal=1), backward)
    assert not copies_pay(Problem(4096, window_left=127, window_right=0), False)
    assert not copies_pay(Problem(8192, len_q=1), False)
    assert copies_pay(Problem(8, ragged=1), False)


def test_a_plan_says_what_happens_to_unaligned_rows():
    from tessera import _layout, _native

    def call(data=256, strides=(131072, 1024, 128, 1), length=4096, kernel=None):
        given = _native.Tensor(data=data, rank=4, shape=(2, length, 8, 128), strides=strides)
        good = _native.Tensor(data=256, rank=4, shape=(2, length, 8, 128), strides=(131072, 1024, 128, 1))
        return types.SimpleNamespace(inputs=dict(q=good, k=given, v=good), problem=Problem(length), backward=False,
                                     options=types.SimpleNamespace(kernel=kernel))

    def remark(*, plan="cuda.fa3.forward", following="cuda.fa2.forward", **changes):
        return _layout.remark(call(**changes), plan, following)
    assert remark() == "" and remark(plan="cuda.fa2.forward", data=258) == ""
    for change in (dict(data=258), dict(strides=(131072, 1028, 128, 1)), dict(strides=(0, 1024, 128, 1)),
                   dict(strides=(131072, 1, 128, 1024))):
        text = remark(**change)
        assert text.startswith("cuda.fa3.forward needs contiguous rows") and " of k are not: " in text
        assert "tessera.torch copies them" in text and "cuda.fa2.forward" in text
    assert "cuda.fa2.forward runs, since copies would take longer" in remark(data=258, length=512)
    assert "refused" in remark(data=258, kernel=b"cuda.fa3.forward")
    assert "refused" in remark(data=258, following=None)
