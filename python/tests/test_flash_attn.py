# SPDX-License-Identifier: Apache-2.0
"""tessera.flash_attn, tessera.flash_attn_3 and compat.install(): flash-attn's signatures, values and errors."""
import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch_reference as reference  # noqa: E402
from tessera import compat, flash_attn, flash_attn_3  # noqa: E402

# Parameters as of flash-attn 2.8 and of flash_attn_interface, in their order.
TAIL = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs".split()
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k".split()
SIGNATURES = {
    flash_attn.flash_attn_func: ["q", "k", "v", *TAIL],
    flash_attn.flash_attn_kvpacked_func: ["q", "kv", *TAIL],
    flash_attn.flash_attn_qkvpacked_func: ["qkv", *TAIL],
    flash_attn.flash_attn_varlen_func: ["q", "k", "v", *LENGTHS, *TAIL, "block_table", "seqused_k", "s_aux", "out",
                                        "num_splits"],
    flash_attn.flash_attn_varlen_kvpacked_func: ["q", "kv", *LENGTHS, *TAIL],
    flash_attn.flash_attn_varlen_qkvpacked_func: ["qkv", "cu_seqlens", "max_seqlen", *TAIL],
    flash_attn_3.flash_attn_func: (
        "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits "
        "pack_gqa deterministic sm_margin return_attn_probs").split(),
    flash_attn_3.flash_attn_varlen_func: (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv "
        "q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin "
        "return_attn_probs").split(),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_signatures(function):
    parameters = inspect.signature(function).parameters
    assert list(parameters) == SIGNATURES[function]
    defaults = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
                "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "num_splits": 1}
    for name, parameter in parameters.items():
        if name in defaults:
            assert parameter.default == defaults[name], name


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2.8", "3"])
def test_values_and_the_lse_of_empty_rows(module, device):
    """Bottom-right causal; a row without a key has LSE +inf in 2.8 and -inf in version 3, and output 0 in both."""
    q, k, v = reference.inputs(len_q=53, len_kv=37, device=device)
    result = module.flash_attn_func(q, k, v, causal=True, window_size=torch.tensor([9, -1]), softcap=3.0,
                                    return_attn_probs=True)
    want_o, want_lse = reference.attention(q, k, v, causal="bottom-right", window=(9, None), softcap=3.0)
    reference.expect_close(result[0], want_o, 2e-6, "out")
    empty = want_lse == float("-inf")
    assert empty.any() and (result[1][empty] == float("inf" if module is flash_attn else "-inf")).all()
    reference.expect_lse(result[1][~empty], want_lse[~empty])
    assert len(result) == (3 if module is flash_attn else 2)
    alone = module.flash_attn_func(q, k, v, causal=True, window_size=(9, -1), softcap=3.0)
    assert torch.equal(alone, result[0])
    gradients = torch.autograd.grad(result[0].sum() + result[1][~empty].sum(), (q, k, v))
    want = torch.autograd.grad(want_o.sum() + want_lse[~empty].sum(), (q, k, v))
    for a, b in zip(gradients, want):
        reference.expect_close(a, b, 1e-5, "gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_forms_are_the_plain_one(dtype, device):
    qkv = torch.randn(2, 19, 3, 4, 40, device=device, dtype=dtype, requires_grad=True)
    q, k, v = qkv.unbind(2)
    options = dict(causal=True, alibi_slopes=torch.rand(2, 4, device=device))
    want = flash_attn.flash_attn_func(q, k, v, **options)
    got = (flash_attn.flash_attn_qkvpacked_func(qkv, **options),
           flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options))
    gradient, = torch.autograd.grad(want.sum(), qkv, retain_graph=True)
    for o in got:
        assert torch.equal(o, want)
        assert torch.equal(torch.autograd.grad(o.sum(), qkv, retain_graph=True)[0], gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_varlen_forms_are_each_member(dtype, device):
    qkv = torch.randn(30, 3, 4, 16, device=device, dtype=dtype)
    cu = torch.tensor([0, 11, 11, 30], dtype=torch.int32, device=device)
    o, lse, weights = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 19, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 30) and weights.numel() == 0
    again = flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], cu, cu, 19, 19, causal=True)
    assert torch.equal(o, again)
    third = flash_attn_3.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 19, torch.tensor(19), causal=True)
    assert torch.equal(o, third)
    for begin, end in ((0, 11), (11, 30)):
        assert torch.equal(o[begin:end], flash_attn.flash_attn_qkvpacked_func(qkv[begin:end][None], causal=True)[0])


@pytest.mark.parametrize("used_q", [None, [4, 0, 19]], ids=["all queries", "some queries"])
def test_rows_that_are_not_in_use(used_q, device):
    """seqused: the rows in use give what they give alone; the others 0, and no gradient."""
    q, k, v = (torch.randn(30, 4, 16, device=device, requires_grad=True) for _ in range(3))
    begins, used_k = [0, 11, 11, 30], [9, 0, 5]
    cu, *used = (None if n is None else torch.tensor(n, dtype=torch.int32, device=device)
                 for n in (begins, used_q, used_k))
    o, lse = flash_attn_3.flash_attn_varlen_func(q, k, v, cu, cu, 19, 19, *used, causal=True, return_attn_probs=True)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    for b, (begin, end) in enumerate(zip(begins, begins[1:])):
        rows = slice(begin, end if used_q is None else begin + used_q[b])
        keys = slice(begin, begin + used_k[b])
        sequences = [t[s][None].detach().requires_grad_() for t, s in ((q, rows), (k, keys), (v, keys))]
        want, want_lse = flash_attn_3.flash_attn_func(*sequences, causal=True, return_attn_probs=True)
        assert torch.equal(o[rows], want[0]) and torch.equal(lse[:, rows], want_lse[0])
        assert not o[rows.stop:end].any() and (lse[:, rows.stop:end] == float("-inf")).all()
        for got, part, of in zip(gradients, torch.autograd.grad(want.sum(), sequences), (rows, keys, keys)):
            assert torch.equal(got[of], part[0]) and not got[of.stop:end].any()


def expected_from(weights, v, dropout_p):
    """O of one sequence from its part of S_dmask, (heads, len_q, len_kv)."""
    total = weights.abs().sum(-1, keepdim=True)
    kept = torch.where(total > 0, weights.clamp(min=0) / torch.where(total > 0, total, 1.0) / (1 - dropout_p), 0.0)
    return torch.einsum("hij,jhd->ihd", kept.double(), v.double())


def test_s_dmask_says_what_dropout_kept(device):
    q, k, v = (t.detach() for t in reference.inputs(len_q=150, len_kv=300, heads_kv=4, device=device))
    o, _, weights = flash_attn.flash_attn_func(q, k, v, 0.2, causal=True, return_attn_probs=True)
    assert weights.shape == (2, 4, 256, 384)
    assert abs(float((weights < 0).sum() / (weights != 0).sum()) - 0.2) < 0.01
    for b in range(2):
        reference.expect_close(o[b], expected_from(weights[b, :, :150, :300], v[b], 0.2), 2e-6, "out from S_dmask")
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 30, 30, 150], [0, 10, 20, 300]))
    o, _, weights = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 120, 280, 0.2, causal=True,
                                                      window_size=(20, 5), return_attn_probs=True)
    assert weights.shape == (3, 4, 128, 384)
    for b in (0, 2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        part = weights[b, :, :rows.stop - rows.start, :keys.stop - keys.start]
        reference.expect_close(o[rows], expected_from(part, v[0][keys], 0.2), 2e-6, "out from S_dmask")


@pytest.mark.parametrize("call,words", [
    (lambda q, k, v: flash_attn.flash_attn_func(q, k[:1], v), "k: expected shape"),
    (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, 0.1, softcap=3.0), "softcap: expected 0 with dropout"),
    (lambda q, k, v: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *[torch.tensor([0, 37])] * 2, 37, 53,
                                                       block_table=torch.zeros(1, 1)), "block_table"),
    (lambda q, k, v: flash_attn.flash_attn_kvpacked_func(q, k), r"^kv: expected shape \(batch, seqlen_k, 2"),
    (lambda q, k, v: flash_attn.flash_attn_qkvpacked_func(torch.zeros(1, 4, 2, 2, 8)),
     r"^qkv: expected .* got \[1, 4, 2"),
    (lambda q, k, v: flash_attn.flash_attn_varlen_kvpacked_func(q[0], [1], None, None, 37, 53), "^kv: .* got a list"),
    (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, window_size=(2**70, -1)), "^window_size: .* of 64 bits"),
    (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, softmax_scale="x"), "^softmax_scale: expected a number"),
    (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, softcap=torch.ones(1, requires_grad=True)),
     "^softcap: .* requires_grad"),
    (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, softcap="x"), "^softcap: expected a number"),
    (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, softcap=None), "^softcap: expected a number, got None"),
    (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, 10**400), "^dropout_p: expected a number"),
    (lambda q, k, v: flash_attn_3.flash_attn_func(q, k, v, attention_chunk=8), "attention_chunk"),
    (lambda q, k, v: flash_attn_3.flash_attn_func(q, k, v, q_descale=torch.ones(1)), "q_descale"),
], ids=lambda c: c if isinstance(c, str) else "")
def test_refusals_are_runtime_errors(call, words):
    with pytest.raises(RuntimeError, match=words):
        call(*reference.inputs())


def test_install_makes_flash_attn_mean_ours_only_when_asked():
    script = """
import sys, tessera, tessera.compat, tessera.flash_attn
assert "flash_attn" not in sys.modules
tessera.compat.install(); tessera.compat.install()
import flash_attn, flash_attn_interface
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import flash_attn_varlen_func
assert flash_attn_func is tessera.flash_attn.flash_attn_func
assert flash_attn.__version__.startswith("2.8") and flash_attn_interface.__tessera__ == "tessera.flash_attn_3"
try:
    import flash_attn.losses
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("flash_attn.losses was found")
tessera.compat.uninstall()
assert "flash_attn" not in sys.modules
sys.modules["flash_attn"] = sys
try:
    tessera.compat.install()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "flash_attn is imported already" in done.stdout
    assert compat.VERSION.startswith("2.8")


@pytest.mark.parametrize("shape,heads,words", [
    ((1, 3, 2, 4, 8), None, r"^qkv: expected shape .*num_heads_q, got \[1, 3, 2, 4, 8\]"),
    ((1, 3, 9, 8), None, "^qkv: "),
    ((3, 9, 8), 4, "^qkv: expected shape"), ((1, 3, 3, 4, 8), 4, "^qkv: expected shape"),
    ((1, 3, 9, 8), 4, "^num_heads_q: expected a number from 0 to 9, the heads of qkv"), ((1, 3, 9, 8), 40, "^num_heads_q: .* got 40"),
    ((1, 3, 8, 8), "4", "^num_heads_q: .* got '4'"), ((1, 3, 8, 8), -2, "^num_heads_q: ")])
def test_what_version_3_can_not_unpack_is_refused_by_name(shape, heads, words):
    with pytest.raises(RuntimeError, match=words):
        flash_attn_3.flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=heads)


def test_there_are_no_parts_to_combine():
    from tessera import flash_attn_cute
    for module in (flash_attn_3, flash_attn_cute):
        with pytest.raises(NotImplementedError, match="^flash_attn_combine: tessera gives no partial results"):
            module.flash_attn_combine(torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4))
