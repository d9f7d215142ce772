# SPDX-License-Identifier: Apache-2.0
"""tessera.torch.attention and varlen_attention: results and gradients against fp64, and calls that are wrong."""
import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402

FP32_O, FP32_GRADIENT = 2e-6, 1e-5  # docs/numerics.md
# 16 bits: P and O are rounded once each; the RMSE of both is under 1.5 u of the values (u = 2^-8, 2^-11).
HALF = {torch.bfloat16: 1.5 * 2**-8, torch.float16: 1.5 * 2**-11}

FEATURES = {
    "plain": {},
    "bottom-right": dict(causal="bottom-right"),
    "top-left": dict(causal="top-left"),
    "window": dict(window=(9, 4)),
    "causal window": dict(causal="bottom-right", window=(9, None)),
    "scale and softcap": dict(scale=0.3, softcap=2.0),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "rows without a key": dict(causal="bottom-right", lengths=(53, 37)),
}


def check(inputs, features, limit_o, limit_gradient, bias=None):
    """O, LSE and every gradient, through both outputs, beside fp64."""
    features = reference.moved(features, inputs[0].device)
    leaves = inputs + ([bias] if bias is not None else [])
    o, lse = tt.attention(*inputs, bias=bias, return_lse=True, **features)
    want_o, want_lse = reference.attention(*inputs, bias=bias, **features)
    assert o.dtype == inputs[0].dtype and lse.dtype == torch.float32
    reference.expect_close(o, want_o, limit_o, "o")
    reference.expect_lse(lse, want_lse)
    assert o.device == lse.device == inputs[0].device
    d_o, dlse = reference.random(o.shape, 7, o.device, o.dtype), reference.random(lse.shape, 8, o.device)
    got = torch.autograd.grad((o, lse), leaves, (d_o, dlse))
    dlse = torch.where(want_lse.isfinite(), dlse.double(), 0.0)
    want_lse = torch.where(want_lse.isfinite(), want_lse, 0.0)
    want = torch.autograd.grad((want_o, want_lse), leaves, (d_o.double(), dlse))
    for name, a, b in zip(("dq", "dk", "dv", "dbias"), got, want):
        assert a.dtype == b.dtype
        reference.expect_close(a, b, limit_gradient, name)


@pytest.mark.parametrize("name", FEATURES)
def test_fp32_against_fp64(name, device):
    features = dict(FEATURES[name])
    len_q, len_kv = features.pop("lengths", (37, 53))
    check(reference.inputs(len_q=len_q, len_kv=len_kv, head_dim_v=24, device=device), features, FP32_O, FP32_GRADIENT)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_against_fp64(dtype, name, device):
    features = dict(FEATURES[name])
    len_q, len_kv = features.pop("lengths", (137, 253))
    check(reference.inputs(len_q=len_q, len_kv=len_kv, dtype=dtype, device=device), features, HALF[dtype],
          2 * HALF[dtype])


# The arguments that a call of O alone hands to an operator with few arguments.
FEW = {"plain": {}, "bottom-right": dict(causal="bottom-right"), "top-left": dict(causal="top-left"),
       "window": dict(window=(9, 4)), "scale": dict(scale=0.3), "all": dict(causal="top-left", window=(9, 4), scale=0.3)}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", FEW)
def test_o_alone_and_its_gradients_have_the_bits_of_o_beside_lse(name, layout, device):
    inputs = [t.detach().transpose(1, 2) if layout == "bhsd" else t.detach() for t in reference.inputs(device=device)]
    found = []
    for with_lse in (False, True):
        leaves = [t.clone().requires_grad_() for t in inputs]
        o = tt.attention(*leaves, layout=layout, return_lse=with_lse, **FEW[name])
        o = o[0] if with_lse else o
        found.append((o, *torch.autograd.grad(o, leaves, reference.random(o.shape, 7, device))))
    for what, alone, beside in zip(("o", "dq", "dk", "dv"), *found):
        assert torch.equal(alone, beside), what


@pytest.mark.parametrize("head_dim", [24, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_in_every_head_dim(dtype, head_dim, device):
    check(reference.inputs(batch=1, len_q=200, len_kv=200, head_dim=head_dim, dtype=dtype, device=device),
          dict(causal="bottom-right"), HALF[dtype], 2 * HALF[dtype])


@pytest.mark.parametrize("shape", [(2, 4, 37, 53), (1, 4, 1, 53), (1, 1, 37, 1), (37, 53)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_bias_and_its_gradient(shape, dtype, device):
    bias = reference.random(shape, 3, device, dtype).requires_grad_()
    limits = (FP32_O, FP32_GRADIENT) if dtype == torch.float32 else (HALF[dtype], 2 * HALF[dtype])
    check(reference.inputs(dtype=dtype, device=device), dict(causal="bottom-right"), *limits, bias)


@pytest.mark.parametrize("padding", [(1, 0), (1, 2), (2, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_sliced_bias_gives_the_same_bits(dtype, padding, device):
    """Its rows begin at odd elements, or are odd elements apart, so that pairs of keys are no aligned words."""
    inputs = [t.detach() for t in reference.inputs(dtype=dtype, device=device)]
    bias = reference.random((2, 4, 37, 53), 3, device, dtype)

    def call(bias):
        leaves = [t.clone().requires_grad_() for t in inputs]
        bias = bias.detach().requires_grad_()
        o, lse = tt.attention(*leaves, bias=bias, causal="bottom-right", return_lse=True)
        o.sum().backward()
        return [o, lse, *(t.grad for t in leaves), bias.grad]

    sliced = torch.nn.functional.pad(bias, padding)[..., padding[0]:padding[0] + bias.shape[-1]]
    assert torch.equal(sliced, bias) and not sliced.is_contiguous()
    for what, a, b in zip(("o", "lse", "dq", "dk", "dv", "dbias"), call(sliced), call(bias)):
        assert torch.equal(a, b), what


def test_gradient_through_lse_alone_and_through_one_input(device):
    q, k, v = reference.inputs(device=device)
    _, lse = tt.attention(q, k, v, return_lse=True)
    _, want = reference.attention(q, k, v)
    for leaf in (q, k):
        reference.expect_close(torch.autograd.grad(lse.sum(), leaf, retain_graph=True)[0],
                               torch.autograd.grad(want.sum(), leaf, retain_graph=True)[0], FP32_GRADIENT, "gradient")
    assert torch.autograd.grad(lse.sum(), v)[0].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_and_gradients_give_the_same_bits(dtype, device):
    """On CUDA all calls name one kernel, since in 16 bits strided rows would go to another one than packed rows."""
    kernel = "cuda.fa2" if device == "cuda" else None
    q, k, v = (t.detach() for t in reference.inputs(dtype=dtype, device=device))

    def call(*inputs, **options):
        return tt.attention(*inputs, kernel=kernel, **options)
    want = call(q, k, v, causal="bottom-right", return_lse=True)
    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    transposed = [t.transpose(1, 2) for t in heads_first]
    sliced = [torch.nn.functional.pad(t, (3, 5))[..., 3:-5] for t in (q, k, v)]
    for inputs in (transposed, sliced):
        assert not inputs[0].is_contiguous()
        for a, b in zip(call(*inputs, causal="bottom-right", return_lse=True), want):
            assert torch.equal(a, b)
    for inputs in (heads_first, [t.transpose(1, 2) for t in (q, k, v)]):
        o, lse = call(*inputs, causal="bottom-right", layout="bhsd", return_lse=True)
        assert torch.equal(o.transpose(1, 2), want[0]) and torch.equal(lse, want[1])
        assert o.stride() == inputs[0].stride()  # o lies in memory as q does

    leaves, others = ([t.clone().requires_grad_() for t in ts] for ts in ((q, k, v), heads_first))
    o = call(*leaves)
    of_heads_first = torch.autograd.grad(call(*others, layout="bhsd").sum(), others)
    for a, b in zip(of_heads_first, torch.autograd.grad(o.sum(), leaves, retain_graph=True)):
        assert torch.equal(a.transpose(1, 2), b)
    d_o = reference.random(o.transpose(1, 3).shape, 4, device, dtype).transpose(1, 3)
    for a, b in zip(torch.autograd.grad(o, leaves, d_o, retain_graph=True),
                    torch.autograd.grad(o, leaves, d_o.contiguous(), retain_graph=True)):
        assert torch.equal(a, b)
    for a, b in zip(torch.autograd.grad(o.sum(), leaves, retain_graph=True),
                    torch.autograd.grad(o, leaves, torch.ones_like(o))):
        assert torch.equal(a, b)  # the gradient of a sum is expanded: strides of 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_varlen_is_attention_of_each_member(dtype, device):
    lengths_q, lengths_kv = (5, 0, 17, 1), (9, 4, 17, 0)
    q, k, v = (t.detach()[0] for t in reference.inputs(batch=1, len_q=23, len_kv=30, device=device))
    cu_q, cu_kv = (torch.tensor((0,) + n).cumsum(0).to(device, dtype) for n in (lengths_q, lengths_kv))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o, lse = tt.varlen_attention(*leaves, cu_q, cu_kv, causal="bottom-right", return_lse=True)
    gradients = torch.autograd.grad((o.sum() + lse[lse.isfinite()].sum()), leaves)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        sequences = [t[s][None].clone().requires_grad_() for t, s in ((q, rows), (k, keys), (v, keys))]
        want_o, want_lse = tt.attention(*sequences, causal="bottom-right", return_lse=True)
        assert torch.equal(o[rows], want_o[0]) and torch.equal(lse[:, rows], want_lse[0])
        want = torch.autograd.grad(want_o.sum() + want_lse[want_lse.isfinite()].sum(), sequences)
        for a, b_, s in zip(gradients, want, (rows, keys, keys)):
            assert torch.equal(a[s], b_[0])


@pytest.mark.parametrize("math", [False, True])
def test_rows_behind_the_last_offset_belong_to_no_sequence(math):
    q, k, v = (t.detach()[0] for t in reference.inputs(batch=1, len_q=23, len_kv=30))
    cu_q, cu_kv = torch.tensor([0, 5, 22]), torch.tensor([0, 9, 26])
    q[22:], k[26:], v[26:] = (float("nan"),) * 3
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o, lse = tt.varlen_attention(*leaves, cu_q, cu_kv, causal="bottom-right", return_lse=True, math=math)
    exact = [t[:n].clone().requires_grad_() for t, n in zip((q, k, v), (22, 26, 26))]
    want, want_lse = tt.varlen_attention(*exact, cu_q, cu_kv, causal="bottom-right", return_lse=True, math=math)
    assert torch.equal(o[:22], want) and torch.equal(lse[:, :22], want_lse)
    assert (o[22:] == 0).all() and (lse[:, 22:] == float("-inf")).all()
    got = torch.autograd.grad(o.sum() + lse[:, :22].sum(), leaves)
    for a, b in zip(got, torch.autograd.grad(want.sum() + want_lse.sum(), exact)):
        assert torch.equal(a[:len(b)], b) and (a[len(b):] == 0).all()


def test_dropout_is_fixed_by_its_seed_and_drawn_without_one(device):
    q, k, v = reference.inputs(len_q=64, len_kv=64, device=device)
    a, b = (tt.attention(q, k, v, dropout_p=0.4, seed=s) for s in (11, torch.tensor(11)))
    assert torch.equal(a, b) and not torch.equal(a, tt.attention(q, k, v, dropout_p=0.4, seed=12))
    torch.manual_seed(5)
    first = tt.attention(q, k, v, dropout_p=0.4)
    second = tt.attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(5)
    assert torch.equal(first, tt.attention(q, k, v, dropout_p=0.4)) and not torch.equal(first, second)


def test_threads_that_call_at_once_get_their_own_results(device):
    cases = [reference.inputs(len_q=40 + i, len_kv=60, seed=i, device=device) for i in range(6)]
    want = [tt.attention(*c, causal="bottom-right", return_lse=True) for c in cases]
    wrong = []

    def work(i):
        for _ in range(20):
            got = tt.attention(*cases[i], causal="bottom-right", return_lse=True)
            if not all(torch.equal(a, b) for a, b in zip(got, want[i])):
                wrong.append(i)
            torch.autograd.grad(got[0].sum(), cases[i])
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


WRONG = [
    (dict(k=torch.zeros(1, 53, 2, 32)), ValueError, r"k: expected shape \[2, 53, 2, 32\], got \[1, 53, 2, 32\]"),
    (dict(v=torch.zeros(2, 53, 2, 32, dtype=torch.float64)), ValueError, "v: "),
    (dict(q=torch.zeros(37, 4, 32)), ValueError, r"q: expected 4 dimensions .*got 3"),
    (dict(q=torch.zeros(2, 37, 3, 32)), ValueError, "heads_q"),
    (dict(q=torch.zeros(2, 37, 4, 32, dtype=torch.int32)), ValueError, "dtype"),
    (dict(causal="upper"), ValueError, "causal: expected None, 'bottom-right'"),
    (dict(causal=True), ValueError, "causal: expected None"),
    (dict(window=(-1, 0)), ValueError, "window: .*got -1"),
    (dict(window=3), ValueError, "window: "),
    (dict(dropout_p=1.0), ValueError, "dropout"),
    (dict(softcap=-1.0), ValueError, "softcap"),
    (dict(bias=torch.zeros(3, 1, 1, 1)), ValueError, "bias: "),
    (dict(alibi_slopes=torch.zeros(4, requires_grad=True)), ValueError, "alibi_slopes: .*requires_grad"),
    (dict(layout="sbhd"), ValueError, "layout: "),
    (dict(kernel="cuda.fa3"), (ValueError, tessera.DeviceUnavailable), "cuda.fa3|device"),  # not in fp32
    (dict(kernel="nothing"), ValueError, "nothing"),
]


@pytest.mark.parametrize("change,error,words", WRONG, ids=[w[2][:24] for w in WRONG])
def test_wrong_calls_name_the_argument(change, error, words, device):
    call = {**dict(zip("qkv", reference.inputs(device=device))), **reference.moved(change, device)}
    with pytest.raises(error, match=words):
        tt.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_lengths_that_are_no_lengths():
    q, k, v = (t.detach()[0] for t in reference.inputs(batch=1))
    good = torch.tensor([0, 10, 37], dtype=torch.int32)
    keys = torch.tensor([0, 20, 53], dtype=torch.int32)
    for bad in ([0, 40, 37], [1, 10, 37], [0, 10, 38]):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            tt.varlen_attention(q, k, v, torch.tensor(bad, dtype=torch.int32), keys)
    with pytest.raises(ValueError, match="cu_seqlens_kv"):
        tt.varlen_attention(q, k, v, good, keys.float())


def test_messages_of_the_operators_become_classes():
    """An error of the backward comes from a thread of PyTorch's, as a RuntimeError whose text begins with the code."""
    from tessera.torch import _errors
    for text, kind in (("tessera 1: q: expected", ValueError), ("tessera 2: no kernel", tessera.Unsupported),
                       ("tessera 4: out of memory", MemoryError), ("tessera 8: no GPU", tessera.DeviceUnavailable)):
        error = _errors.translated(RuntimeError(text))
        assert type(error) is kind and str(error) == text[11:]
    other = RuntimeError("of PyTorch")
    assert _errors.translated(other) is other


def test_mixed_devices_are_refused():
    q, k, v = reference.inputs()
    with pytest.raises(ValueError, match="k: expected a tensor on"):
        tt.attention(q, k.to("meta"), v)
