# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory is not what they mean: PyTorch's causal masks get their meaning, others are refused by name."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import numpy  # noqa: E402
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from tessera import flash_attn, flash_attn_3  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

ALIGNMENTS = {causal_upper_left: "top-left", causal_lower_right: "bottom-right"}
pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias")


class Own(torch.Tensor):
    """A meaning of its own: the numbers in its memory times -1000."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


class Name(torch.Tensor):
    """A name of its own and nothing else."""


def own(tensor):
    return tensor.as_subclass(Own)


@pytest.mark.parametrize("mask", ALIGNMENTS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("lengths", [(37, 53), (53, 37), (20, 20)], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_causal_masks_of_pytorch_mean_what_they_mean_there(mask, lengths, compiled, device):
    leaves = reference.inputs(len_q=lengths[0], len_kv=lengths[1], heads_kv=4, device=device)
    turned = [t.transpose(1, 2) for t in leaves]
    bias = mask(*lengths)
    want, want_lse = tt.attention(*leaves, causal=ALIGNMENTS[mask], return_lse=True)
    gradients = torch.autograd.grad(want.sin().sum(), leaves)

    def calls(bias):
        return (tt.attention(*leaves, bias=bias), tt.scaled_dot_product_attention(*turned, attn_mask=bias).transpose(1,
                                                                                                                     2),
                tt.attention(*turned, bias=bias, layout="bhsd").transpose(1, 2))
    torch._dynamo.reset()
    for o in (torch.compile(calls, fullgraph=True, backend="aot_eager") if compiled else calls)(bias):
        assert torch.equal(o, want)
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sin().sum(), leaves, retain_graph=True),
                                                     gradients))
    o, lse = tt.attention(*leaves, bias=bias, window=(9, None), scale=0.3, return_lse=True)
    expected = tt.attention(*leaves, causal=ALIGNMENTS[mask], window=(9, None), scale=0.3, return_lse=True)
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


def test_causal_masks_of_other_lengths_and_with_another_causal(device):
    q, k, v = (t.detach() for t in reference.inputs(heads_kv=4, device=device))
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    with pytest.raises(ValueError, match="^bias: expected a CausalBias of 37 queries and 53 keys, got one of 53"):
        tt.attention(q, k, v, bias=causal_upper_left(53, 37))
    with pytest.raises(ValueError, match="^attn_mask: expected a CausalBias of 37 queries and 53 keys"):
        tt.scaled_dot_product_attention(*turned, attn_mask=causal_lower_right(36, 53))
    with pytest.raises(ValueError, match="^bias: expected no CausalBias with causal='top-left'"):
        tt.attention(q, k, v, bias=causal_upper_left(37, 53), causal="top-left")
    with pytest.raises(ValueError, match="^attn_mask: expected None with is_causal=True"):
        tt.scaled_dot_product_attention(*turned, attn_mask=causal_upper_left(37, 53), is_causal=True)


# Every tensor argument of every function: (function of the arguments, the arguments, the error's class, its name
# there).

def arguments(device):
    """Function -> its tensors by name; other arguments are bound."""
    q, k, v = (t.detach() for t in reference.inputs(heads_kv=4, device=device))
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (37, 53))
    used = torch.tensor([30, 37], dtype=torch.int32, device=device)
    slopes, bias = torch.rand(4, device=device), torch.randn(1, 1, 37, 53, device=device)
    names = dict(zip("qkv", (q, k, v)))
    layer = torch.nn.Identity()

    def transformers(**tensors):
        from tessera import transformers
        return transformers.attention_forward(layer, **tensors)
    lengths = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    bound = dict(max_seqlen_q=37, max_seqlen_k=53)
    return {
        "attention": (tt.attention, dict(names, bias=bias, alibi_slopes=slopes), ValueError),
        "attention, seed": (lambda seed: tt.attention(q, k, v, dropout_p=0.1, seed=seed), dict(seed=torch.tensor([1])),
                            ValueError),
        "varlen_attention": (tt.varlen_attention, dict(zip("qkv", flat), cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k,
                                                       alibi_slopes=slopes), ValueError),
        "sdpa": (tt.scaled_dot_product_attention, dict(zip(("query", "key", "value"), turned), attn_mask=bias),
                 ValueError),
        "flash_attn_func": (flash_attn.flash_attn_func, dict(names, alibi_slopes=slopes), RuntimeError),
        "kvpacked": (flash_attn.flash_attn_kvpacked_func, dict(q=q, kv=torch.stack((k, v), 2)), RuntimeError),
        "qkvpacked": (flash_attn.flash_attn_qkvpacked_func, dict(qkv=torch.stack((q, q, q), 2)), RuntimeError),
        "varlen_func": (lambda **t: flash_attn.flash_attn_varlen_func(**t, **bound),
                        dict(zip("qkv", flat), **lengths, alibi_slopes=slopes), RuntimeError),
        "3.flash_attn_func": (flash_attn_3.flash_attn_func, names, RuntimeError),
        "3.qkvpacked": (flash_attn_3.flash_attn_qkvpacked_func, dict(qkv=torch.stack((q, q, q), 2)), RuntimeError),
        "3.varlen_func": (lambda **t: flash_attn_3.flash_attn_varlen_func(**t, **bound),
                          dict(zip("qkv", flat), **lengths, seqused_q=used, seqused_k=used), RuntimeError),
        "transformers": (transformers, dict(zip(("query", "key", "value"), turned), attention_mask=bias,
                                            position_bias=bias), ValueError),
        "transformers, packed": (lambda **t: transformers(attention_mask=None, **t),
                                 dict(zip(("query", "key", "value"), turned), cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k),
                                 ValueError)}


CALLS = [(function, name) for function, (_, tensors, _) in arguments("cpu").items() for name in tensors]


@pytest.mark.parametrize("function,name", CALLS, ids=str)
def test_a_meaning_of_its_own_is_refused_in_every_argument(function, name, device):
    if function.startswith("transformers"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    call, tensors, error = arguments(device)[function]
    call(**tensors)
    others = [(own(tensors[name]), "Own")]
    if name not in ("bias", "attn_mask"):
        others.append((causal_upper_left(37, 53), "CausalBias"))
    for other, cls in others:
        with pytest.raises(error, match=f"^{name}: expected a torch.Tensor whose memory holds .*, got a {cls}"):
            call(**{**tensors, name: other})


@pytest.mark.parametrize("call", [{}, dict(softcap=2.0)], ids=str)
def test_a_gradient_with_a_meaning_of_its_own_is_refused(call, device):
    leaves = reference.inputs(device=device)
    o, lse = tt.attention(*leaves, **call, return_lse=True)
    for name, result in (("do", o), ("dlse", lse)):
        with pytest.raises(ValueError, match=f"^{name}: expected a torch.Tensor whose memory holds .*, got a Own"):
            torch.autograd.grad(result, leaves, own(torch.ones_like(result)), retain_graph=True)


WORK = {"a parameter": torch.nn.Parameter, "a buffer": torch.nn.Buffer,
        "a class with a name": lambda t: t.as_subclass(Name),
        "negated lazily": lambda t: torch._neg_view(-t), "a wrapper": lambda t: TwoTensor(t, t)}


@pytest.mark.parametrize("kind", WORK)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_what_the_dispatcher_or_the_memory_can_tell_works(kind, name, device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    call = dict(q=q, k=k, v=v, bias=torch.randn(1, 1, 37, 53, device=device))
    want = tt.attention(**call)
    with torch.no_grad():
        got = tt.attention(**{**call, name: WORK[kind](call[name])})
    assert torch.equal(got.a if isinstance(got, TwoTensor) else got.as_subclass(torch.Tensor), want)


def test_zeros_without_memory(device):
    """PyTorch's stand-in for a gradient of zeros."""
    leaves = reference.inputs(device=device)
    zeros = torch._efficientzerotensor(leaves[1].shape, device=device)
    got, want = (tt.attention(leaves[0], k, leaves[2]) for k in (zeros, torch.zeros_like(leaves[1])))
    assert torch.equal(got, want)
    for d_o in (torch._efficientzerotensor(got.shape, device=device), torch.zeros_like(got)):
        assert not any(g.any() for g in torch.autograd.grad(got, leaves[::2], d_o, retain_graph=True))


REFUSED = {
    "masked": lambda t: torch.masked.masked_tensor(t, torch.ones_like(t, dtype=torch.bool)),
    "jagged": lambda t: torch.nested.nested_tensor([t[0], t[0]], layout=torch.jagged),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[0]]),
    "sparse": lambda t: t.to_sparse(), "sparse rows": lambda t: t.flatten(0, -2).to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t.cpu().float(), 0.1, 0, torch.qint8),
    "mkldnn": lambda t: t.cpu().float().to_mkldnn(), "meta": lambda t: t.to("meta"),
    "complex": lambda t: torch.complex(t, t).conj(), "uninitialized": lambda t: torch.nn.UninitializedParameter(),
    "a list": lambda t: t.tolist()}


@pytest.mark.filterwarnings("ignore")  # prototypes of PyTorch's, and what it is leaving
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes"])
@pytest.mark.parametrize("gradients", [False, True])
def test_what_nobody_can_read_is_refused_by_name(kind, name, gradients, device):
    call = dict(zip("qkv", (t.detach().requires_grad_(gradients) for t in reference.inputs(device=device))),
                bias=torch.randn(1, 4, 37, 53, device=device), alibi_slopes=torch.randn(4, 1, device=device)[:, 0])
    try:
        other = REFUSED[kind](call[name].detach())
    except (RuntimeError, IndexError):
        pytest.skip("PyTorch makes no such tensor of this shape")
    # A q on another device makes every other tensor the one that is elsewhere.
    named = f"{name}|k|bias" if kind == "meta" and name == "q" else name
    with pytest.raises((ValueError, tessera.DeviceUnavailable), match=f"^({named}): expected "):
        tt.attention(**{**call, name: other})


# The core, which reads by DLPack or NumPy's array interface.

class Quantity(numpy.ndarray):
    """An array with a unit, as astropy's and unyt's."""

    def __array_ufunc__(self, *arguments, **keywords):
        return NotImplemented


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes"])
def test_the_core_refuses_a_meaning_of_its_own(name):
    call = dict(zip("qkv", (t.detach() for t in reference.inputs())), bias=torch.zeros(1, 1, 37, 53),
                alibi_slopes=torch.zeros(4))
    with torch._subclasses.FakeTensorMode() as fakes:
        fake = fakes.from_tensor(call[name])
    others = [own(call[name]), TwoTensor(call[name], call[name]), fake]
    if call[name].dim() > 1:
        others.append(causal_upper_left(37, 53))
    for other in others:
        with pytest.raises(ValueError, match=f"^{name}: expected an array whose memory holds its numbers, got a "
                                             f"{type(other).__name__}"):
            tessera.attention(**{**call, name: other})
    arrays = {key: t.numpy() for key, t in call.items()}
    for other in (numpy.ma.masked_array(arrays[name], arrays[name] > 9), arrays[name].view(Quantity)):
        with pytest.raises(ValueError, match=f"^{name}: expected an array whose memory holds its numbers"):
            tessera.attention(**{**arrays, name: other})
    want = tessera.attention(**arrays)
    named = {**call, name: call[name].as_subclass(Name)}
    assert (tessera.attention(**named).as_subclass(torch.Tensor).numpy() == want).all()


def test_the_core_under_transforms():
    q, k, v = (t.detach() for t in reference.inputs())
    with pytest.raises(ValueError, match="^q: "):
        torch.func.vmap(lambda t: tessera.attention(t[None], k[:1], v[:1]))(q)
    with pytest.raises(ValueError, match="^q: "):
        torch.func.grad(lambda t: tessera.attention(t, k, v).sum())(q)
