# SPDX-License-Identifier: Apache-2.0
"""Imports of code beside flash-attn's functions: bert_padding, layers.rotary, single passes, cute; and install()."""
import importlib
import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from tessera import bert_padding, compat, flash_attn, flash_attn_3, flash_attn_cute, rotary  # noqa: E402


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_install_gives_the_modules_that_code_imports():
    run("""
import importlib.util, sys, tessera.compat
tessera.compat.install()
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from flash_attn.bert_padding import unpad_input_for_concatenated_sequences
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _flash_attn_varlen_backward
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_func, RotaryEmbedding
from flash_attn.cute import flash_attn_func as of_4
from flash_attn.cute.interface import flash_attn_varlen_func as ragged_of_4
import flash_attn.layers.rotary, xformers, xformers.ops as xops
from xformers.ops import fmha, memory_efficient_attention, LowerTriangularMask, unbind
from xformers.ops.fmha.attn_bias import BlockDiagonalMask, BlockDiagonalCausalMask, LowerTriangularMaskWithTensorBias
assert xops.fmha.attn_bias.BlockDiagonalMask is fmha.BlockDiagonalMask is BlockDiagonalMask
assert flash_attn.layers.rotary.apply_rotary_emb is apply_rotary_emb and xformers.ops is xops
for name in ("flash_attn", "flash_attn.layers", "xformers", "xformers.ops", "flash_attn_interface"):
    assert importlib.util.find_spec(name) is not None
for name in ("flash_attn.losses", "flash_attn.layers.patch_embed", "xformers.components"):
    try: importlib.import_module(name)
    except ModuleNotFoundError: pass
    else: raise SystemExit(name)
if importlib.util.find_spec("transformers"):
    import transformers.utils
    assert not transformers.utils.is_flash_attn_2_available()
tessera.compat.uninstall("xformers")
assert "xformers.ops" not in sys.modules and tessera.compat.installed()
""")


def test_one_package_is_installed_beside_a_real_other_one():
    said = run("""
import sys, types, tessera.compat as compat
sys.modules["xformers"] = types.ModuleType("xformers")
try: compat.install()
except RuntimeError as error: print(error)
assert "flash_attn" not in sys.modules
compat.install("flash_attn")
import flash_attn.bert_padding
try: compat.install("einops")
except ValueError as error: print(error)
""")
    assert 'xformers is imported already' in said and 'install("flash_attn")' in said
    assert "packages: expected 'flash_attn' or 'xformers' or 'ring_flash_attn', got 'einops'" in said


def test_every_name_of_a_module_is_in_the_table_of_docs(request):
    text = (request.config.rootpath / "docs/python.md").read_text()
    for modules in compat.PACKAGES.values():
        for name, (source, names) in modules.items():
            module = importlib.import_module(source)
            for public in getattr(module, "__all__", ()):
                assert f"`{public}`" in text, f"{name}.{public}"
                assert names == compat._NONE or hasattr(module, public)


# --- bert_padding -----------------------------------------------------------------------------------------------------

def test_rows_without_padding_and_back(device):
    x = torch.randn(3, 5, 2, 4, device=device, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], device=device)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert indices.tolist() == [0, 1, 2, 6, 7, 8, 9] and (longest, cu_seqlens.tolist()) == (4, [0, 3, 7, 7])
    assert cu_seqlens.dtype == used.dtype == torch.int32 and used.tolist() == [3, 4, 0]
    assert torch.equal(rows, x[mask.bool()])
    back = bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[:, :, None, None])
    assert torch.equal(bert_padding.pad_input(rows, indices.int(), 3, 5), back)
    weights = torch.randn_like(back)
    gradient, = torch.autograd.grad((back * weights).sum(), x)
    assert torch.equal(gradient, weights * mask[:, :, None, None])
    first, second = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(first, rows) and not second.requires_grad
    assert torch.equal(bert_padding.index_put_first_axis(first, indices, 15).unflatten(0, (3, 5)), back)


def test_masks_of_other_numbers_are_refused(device):
    """In a mask that is added to scores 0 is a row that counts, and numbers of documents are no mask."""
    x, mask = torch.randn(2, 4, 3, device=device), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], device=device)
    want = bert_padding.unpad_input(x, mask)[1].tolist()
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.float16, torch.float64):
        assert bert_padding.unpad_input(x, mask.to(dtype))[1].tolist() == want == [0, 1, 2, 4]
    for dtype in (torch.float32, torch.bfloat16):
        for hidden in (float("-inf"), torch.finfo(dtype).min):
            added = torch.zeros(2, 4, dtype=dtype, device=device).masked_fill(mask == 0, hidden)
            words = f"expected bool, or numbers that are 1 .* got {hidden} in a mask of {str(dtype)[6:]}"
            with pytest.raises(ValueError, match="^attention_mask: " + words.replace("+", r"\+")):
                bert_padding.unpad_input(x, added)
            with pytest.raises(ValueError, match="^unused_mask: " + words.replace("+", r"\+")):
                bert_padding.unpad_input(x, mask, added)
    for odd in (mask * 2, mask - 1, mask * float("nan")):
        with pytest.raises(ValueError, match="^attention_mask: expected bool"):
            bert_padding.unpad_input(x, odd)


def test_rows_that_get_space_and_are_not_used():
    x, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]])
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7] and cu_seqlens.tolist() == [0, 3, 7] and longest == 4
    assert used.tolist() == [2, 1] and torch.equal(rows, x.flatten(0, 1)[indices])


def test_sequences_one_after_another_in_a_row():
    x = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6 and rows.shape == (16, 2)
    with pytest.raises(ValueError, match=r"^attention_mask_in_length: expected shape \[3, 6\].*got \[6\]"):
        bert_padding.unpad_input_for_concatenated_sequences(x, lengths[0])


# --- layers.rotary ----------------------------------------------------------------------------------------------------

def complex_rotation(x, angles, interleaved):
    """x [.., heads, dim] with its pairs multiplied by exp(i angle); angles [.., dim / 2]."""
    dim = 2 * angles.shape[-1]
    part = x[..., :dim].double()
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    rotation = torch.exp(1j * angles.double())[..., None, :]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rotation)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, x[..., dim:].double()), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 3, torch.tensor([2, 5])], ids=str)
def test_rotation_by_position(interleaved, offset):
    x = torch.randn(2, 7, 3, 10, requires_grad=True)
    angles = torch.outer(torch.arange(12.), torch.tensor([1.0, 0.3, 0.05]))
    positions = torch.arange(7) + (offset[:, None] if isinstance(offset, torch.Tensor) else offset)
    got = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=offset)
    want = complex_rotation(x, angles[positions], interleaved)
    assert torch.allclose(got.double(), want, atol=1e-6)
    weights = torch.randn_like(x)
    assert torch.allclose(*(torch.autograd.grad((o * weights).sum(), x)[0] for o in (got, want)), atol=1e-6)
    written = x.detach().clone()
    same = rotary.apply_rotary_emb(written, angles.cos(), angles.sin(), interleaved, True, offset)
    assert same is written and torch.equal(written, got)
    again = rotary.apply_rotary_emb_torch(x, angles.cos()[positions], angles.sin()[positions], interleaved)
    assert torch.equal(again, got)
    half = rotary.rotate_half(torch.tensor([1., 2, 3, 4]), interleaved)
    assert half.tolist() == ([-2, 1, -4, 3] if interleaved else [-3, -4, 1, 2])


def test_rotation_of_a_ragged_batch():
    x, cu = torch.randn(11, 2, 8), torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    angles = torch.outer(torch.arange(20.), torch.tensor([1.0, 0.3, 0.05, 0.01]))
    for offsets in (2, torch.tensor([1, 5, 9])):
        got = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=offsets, cu_seqlens=cu,
                                      max_seqlen=7)
        for i, (begin, end) in enumerate(((0, 4), (4, 4), (4, 11))):
            offset = offsets if isinstance(offsets, int) else int(offsets[i])
            want = rotary.apply_rotary_emb(x[begin:end][None], angles.cos(), angles.sin(), seqlen_offsets=offset)
            assert torch.equal(got[begin:end], want[0])


@pytest.mark.parametrize("scale_base", [None, 512])
def test_rotary_embedding_keeps_products_of_equal_distance(scale_base):
    module = rotary.RotaryEmbedding(8, interleaved=True, scale_base=scale_base)
    row = torch.randn(1, 1, 3, 2, 8)
    qkv = module(row.expand(1, 12, 3, 2, 8).clone())
    products = torch.einsum("bihd,bjhd->hij", qkv[:, :, 0], qkv[:, :, 1])
    for distance in (0, 1, 5):
        diagonal = products.diagonal(-distance, 1, 2)
        assert torch.allclose(diagonal, diagonal[:, :1].expand_as(diagonal), atol=1e-4)
    assert torch.equal(qkv[:, :, 2], row[:, :, 2].expand(1, 12, 2, 8))
    q, kv = module(row[:, :, 0].expand(1, 12, 2, 8).clone(), row[:, :, 1:].expand(1, 12, 2, 2, 8).clone())
    assert torch.equal(q, qkv[:, :, 0]) and torch.equal(kv, qkv[:, :, 1:])
    grouped = torch.cat((row[:, :, 0], row[:, :, 1, :1], row[:, :, 2, :1]), 2).expand(1, 12, 4, 8).clone()
    packed = module(grouped, num_heads_q=2)
    assert torch.equal(packed[:, :, :2], q) and torch.equal(packed[:, :, 2:3], kv[:, :, 0, :1])
    if scale_base is None:
        late = module(row.clone(), seqlen_offset=5)
        assert torch.equal(late[:, 0, 0], qkv[:, 5, 0])


def test_rotary_embedding_is_exact_in_a_model_of_bf16():
    q = torch.randn(1, 4000, 1, 8)
    exact = rotary.RotaryEmbedding(8)(q.clone(), torch.zeros(1, 4000, 2, 1, 8))[0]
    rounded = rotary.RotaryEmbedding(8).bfloat16()(q.clone(), torch.zeros(1, 4000, 2, 1, 8))[0]
    assert torch.equal(exact, rounded)


def test_a_refused_rotation_writes_nothing():
    x, cos, short = torch.randn(2, 4, 3, 2, 8), torch.randn(6, 4), torch.randn(3, 4)
    module = rotary.RotaryEmbedding(8)
    calls = {"^cos: expected at least 4": lambda t: rotary.apply_rotary_emb_qkv_(t, cos, cos, short, short),
             "^cos: expected at most 4": lambda t: rotary.apply_rotary_emb_qkv_(t, cos, cos, *[cos.repeat(1, 2)] * 2),
             "^cos: expected the shape of sin": lambda t: rotary.apply_rotary_emb_qkv_(t, cos, cos, None, short),
             "^sin: expected floating": lambda t: rotary.apply_rotary_emb_qkv_(t, cos, cos, cos, cos.long()),
             "^cos: expected a tensor on cpu": lambda t: rotary.apply_rotary_emb_qkv_(t, *[cos.to("meta")] * 2),
             "^seqlen_offsets: expected positions": lambda t: rotary.apply_rotary_emb_qkv_(
                 t, cos, cos, seqlen_offsets=torch.tensor([0, -1])),
             "^cos: expected at least 9": lambda t: rotary.apply_rotary_emb_qkv_(
                 t, cos, cos, seqlen_offsets=torch.tensor([0, 5])),
             "^seqlen_offsets: expected an integer": lambda t: module(t[:, :, 0], t[:, :, 1:], seqlen_offset="a"),
             "^kv: expected shape": lambda t: module(t[:, :, 0], t[:, :, 1]),
             "^x: expected floating": lambda t: module(t[:, :, 0], t[:, :, 1:].long())}
    for words, call in calls.items():
        given = x.clone()
        with pytest.raises(ValueError, match=words):
            call(given)
        assert torch.equal(given, x), words


def test_q_is_written_before_k_is_rotated():
    """The rotated q and k are not in memory at the same time."""
    from torch.utils._python_dispatch import TorchDispatchMode
    written = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            if name == "copy_" or name == "cat" and result.shape == qkv[:, :, 0].shape:
                written.append(name)
            return result
    qkv, cos = torch.randn(2, 4, 3, 2, 10), torch.randn(6, 4)
    with Mode():
        rotary.apply_rotary_emb_qkv_(qkv, cos, cos)
    assert written == ["cat", "copy_"] * 2


def test_wrong_arguments_of_rotary_are_named():
    x, cos = torch.zeros(1, 4, 2, 8), torch.zeros(4, 4)
    for words, call in (
            ("^cos: expected the shape of sin", lambda: rotary.apply_rotary_emb(x, cos, cos[:2])),
            ("^cos: expected at least 6 rows", lambda: rotary.apply_rotary_emb(x, cos, cos, seqlen_offsets=2)),
            ("^cos: expected at most 4 columns", lambda: rotary.apply_rotary_emb(x, *[cos.repeat(1, 2)] * 2)),
            ("^x: expected shape", lambda: rotary.apply_rotary_emb(x[0], cos, cos)),
            ("^cu_seqlens: expected .* got torch.float32", lambda: rotary.apply_rotary_emb(
                x[0], cos, cos, cu_seqlens=torch.tensor([0.0, 4.0]))),
            ("^cu_seqlens: expected .* got a list", lambda: rotary.apply_rotary_emb(x[0], cos, cos, cu_seqlens=[0, 4])),
            ("^num_heads_q: expected", lambda: rotary.apply_rotary_emb_qkv_(x, cos, cos)),
            ("^kv: expected shape", lambda: rotary.apply_rotary_emb_kv_(x, cos, cos))):
        with pytest.raises(ValueError, match=words):
            call()


# --- Single passes ----------------------------------------------------------------------------------------------------

def test_signatures_of_the_passes():
    tail = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes".split()
    cu = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k".split()
    back = "dout q k v out softmax_lse dq dk dv".split()
    for function, names in (
            (flash_attn._flash_attn_forward, ["q", "k", "v", *tail, "return_softmax"]),
            (flash_attn._flash_attn_varlen_forward, ["q", "k", "v", *cu, *tail, "return_softmax", "block_table",
                                                     "leftpad_k", "seqused_k", "zero_tensors"]),
            (flash_attn._flash_attn_backward, [*back, *tail, "deterministic", "rng_state"]),
            (flash_attn._flash_attn_varlen_backward, [*back, *cu, *tail, "deterministic", "rng_state",
                                                      "zero_tensors"])):
        assert list(inspect.signature(function).parameters) == names


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_single_passes_are_those_of_the_function(dropout_p, device):
    q, k, v = reference.inputs(len_q=53, len_kv=37, device=device)
    settings = (dropout_p, None, True, 9, -1, 0.0, None)
    out, lse, weights, rng_state = flash_attn._flash_attn_forward(q, k, v, *settings, dropout_p > 0)
    assert not out.requires_grad and (lse == float("inf")).any() and (weights is None) == (dropout_p == 0)
    do = torch.randn_like(out)
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    delta = flash_attn._flash_attn_backward(do, q, k, v, out, lse, *gradients, *settings, False, rng_state)
    assert torch.allclose(delta, (do * out).sum(-1).transpose(1, 2), atol=1e-5)
    if dropout_p:
        again = flash_attn._flash_attn_forward(q, k, v, *settings, False)[0]
        assert not torch.equal(again, out)
        with pytest.raises(RuntimeError, match="^rng_state: expected the one that the forward returned"):
            flash_attn._flash_attn_backward(do, q, k, v, out, lse, *gradients, *settings, False)
        from tessera.torch import attention
        want = attention(q, k, v, causal="bottom-right", window=(9, None), dropout_p=dropout_p, seed=rng_state)
    else:
        want, want_lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, -1),
                                                       return_attn_probs=True)
        assert torch.equal(lse, want_lse)
    assert torch.equal(out, want)
    for got, right in zip(gradients, torch.autograd.grad(want, (q, k, v), do)):
        assert torch.equal(got, right)


def test_single_passes_of_a_ragged_batch(device):
    q, k, v = (torch.randn(30, 4, 16, device=device, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 11, 11, 30], dtype=torch.int32, device=device)
    settings = (0.0, 0.3, True, -1, -1, 0.0, None)
    out, lse, _, _ = flash_attn._flash_attn_varlen_forward(q, k, v, cu, cu, 19, 19, *settings)
    want, want_lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 19, 19, softmax_scale=0.3, causal=True,
                                                          return_attn_probs=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    gradients, do = [torch.empty_like(t) for t in (q, k, v)], torch.randn_like(out)
    delta = flash_attn._flash_attn_varlen_backward(do, q, k, v, out, lse, *gradients, cu, cu, 19, 19, *settings, True)
    assert delta.shape == lse.shape
    for got, right in zip(gradients, torch.autograd.grad(want, (q, k, v), do)):
        assert torch.equal(got, right)
    for name in ("block_table", "leftpad_k", "seqused_k"):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            flash_attn._flash_attn_varlen_forward(q, k, v, cu, cu, 19, 19, *settings, **{name: cu})


def test_a_ring_of_two_devices_by_single_passes():
    """Context parallelism: parts of the keys merged by LSE, and a backward over each part with the LSE of all keys."""
    q, k, v = (t.detach().requires_grad_() for t in reference.inputs(len_q=32, len_kv=32))
    settings, halves = (0.0, None, False, -1, -1, 0.0, None), (slice(0, 16), slice(16, 32))
    parts = [flash_attn._flash_attn_forward(q, k[:, h], v[:, h], *settings, False)[:2] for h in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o * (part - lse).exp().transpose(1, 2)[..., None] for o, part in parts)
    want = flash_attn.flash_attn_func(q, k, v)
    reference.expect_close(out, want, 2e-6, "out")
    do, dq = torch.randn_like(out), torch.zeros_like(q)
    right = torch.autograd.grad(want, (q, k, v), do)
    for h in halves:
        found = [torch.empty_like(t) for t in (q, k[:, h], v[:, h])]
        flash_attn._flash_attn_backward(do, q, k[:, h], v[:, h], out, lse, *found, *settings, False)
        dq += found[0]
        reference.expect_close(found[1], right[1][:, h], 1e-5, "dk")
        reference.expect_close(found[2], right[2][:, h], 1e-5, "dv")
    reference.expect_close(dq, right[0], 1e-5, "dq")


# --- cute -------------------------------------------------------------------------------------------------------------

def test_cute_is_version_3_with_its_own_face(device):
    q, k, v = reference.inputs(len_q=21, len_kv=37, device=device)
    out, lse = flash_attn_cute.flash_attn_func(q, k, v, causal=True, window_size=(9, None), softcap=3.0)
    want = flash_attn_3.flash_attn_func(q, k, v, causal=True, window_size=(9, -1), softcap=3.0, return_attn_probs=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 21], [0, 37]))
    ragged, _ = flash_attn_cute.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, causal=True, softcap=3.0,
                                                       window_size=(9, None))
    assert torch.equal(ragged, out[0])
    for name in ("score_mod", "mask_mod", "block_sparse_tensors", "aux_tensors"):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            flash_attn_cute.flash_attn_func(q, k, v, **{name: 1})
    sink = torch.tensor([0.5, -1.0, 2.0, 0.1], device=device)
    out, lse = flash_attn_cute.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)
    want = reference.attention(q, k, v, causal="bottom-right", sinks=sink)
    reference.expect_close(out, want[0], 3e-6, "out with a sink")
    reference.expect_lse(lse, want[1])
    ragged, _ = flash_attn_cute.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, causal=True, learnable_sink=sink)
    assert torch.equal(ragged, out[0])
    halves = [t.detach().bfloat16() for t in (q, k, v)]
    by_kernels = tt.attention(*halves, causal="bottom-right", sinks=sink, return_lse=True)
    for one, other in zip(flash_attn_cute.flash_attn_func(*halves, causal=True, learnable_sink=sink), by_kernels):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="^learnable_sink: "):
        flash_attn_cute.flash_attn_func(q, k, v, learnable_sink=sink[:2])
    with pytest.raises(RuntimeError, match="^window_size: "):
        flash_attn_cute.flash_attn_func(q, k, v, window_size=4)
