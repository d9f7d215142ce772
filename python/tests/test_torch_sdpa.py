# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention: ours beside PyTorch's, and PyTorch's own running on tessera."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # noqa: E402


def inputs(device="cpu", **sizes):
    return [t.detach().transpose(1, 2).contiguous().requires_grad_()
            for t in reference.inputs(heads_kv=4, device=device, **sizes)]


MASKS = {
    "none": {},
    "is_causal, more keys": dict(is_causal=True),
    "bool [len_q, len_kv]": dict(attn_mask=torch.rand(37, 53, generator=torch.Generator().manual_seed(1)) > 0.4),
    "bool [batch, 1, 1, len_kv]": dict(attn_mask=torch.arange(53) < torch.tensor([20, 50]).reshape(2, 1, 1, 1)),
    "numbers [heads, len_q, len_kv]": dict(attn_mask=torch.randn(4, 37, 53)),
    "a row without a key": dict(attn_mask=torch.arange(37)[:, None].expand(37, 53) != 5),
    "scale": dict(scale=0.5),
}


@pytest.mark.parametrize("name", MASKS)
def test_means_what_torch_means(name, device):
    q, k, v = inputs(device)
    options = reference.moved(MASKS[name], device)
    got, want = tt.scaled_dot_product_attention(q, k, v, **options), torch_sdpa(
        q.double(), k.double(), v.double(),
        **{n: o.double() if torch.is_tensor(o) and o.is_floating_point() else o for n, o in options.items()})
    reference.expect_close(got, want, 2e-6, "o")
    d_o = reference.random(got.shape, 2, device)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), d_o), torch.autograd.grad(want, (q, k, v), d_o.double())):
        reference.expect_close(a, b, 1e-5, "gradient")


def test_the_mask_gets_its_gradient(device):
    q, k, v = inputs(device)
    mask = torch.randn(4, 37, 53, device=device, requires_grad=True)
    got, = torch.autograd.grad(tt.scaled_dot_product_attention(q, k, v, mask).sin().sum(), mask)
    want, = torch.autograd.grad(torch_sdpa(q.double(), k.double(), v.double(), mask.double()).sin().sum(), mask)
    reference.expect_close(got, want, 1e-5, "gradient of the mask")


@pytest.mark.parametrize("shape", [(11, 16), (3, 11, 16), (2, 3, 5, 11, 16)], ids=str)
def test_other_numbers_of_dimensions(shape, device):
    q, k, v = (torch.randn(shape, device=device) for _ in range(3))
    torch.testing.assert_close(tt.scaled_dot_product_attention(q, k, v, is_causal=True),
                               torch_sdpa(q, k, v, is_causal=True))


def test_grouped_heads_and_autocast(device):
    q, k, v = (torch.randn(2, heads, 9, 16, device=device) for heads in (6, 2, 2))
    torch.testing.assert_close(tt.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                               torch_sdpa(q, k, v, enable_gqa=True))
    with pytest.raises(ValueError, match="key: expected 6 heads"):
        tt.scaled_dot_product_attention(q, k, v)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tt.scaled_dot_product_attention(q, k, v, enable_gqa=True).dtype == torch.bfloat16


@pytest.mark.parametrize("options,words", [
    (dict(attn_mask=torch.ones(37, 53, dtype=torch.bool), is_causal=True), "attn_mask: expected None"),
    (dict(attn_mask=torch.ones(36, 53, dtype=torch.bool)), "attn_mask: expected a shape"),
    (dict(attn_mask=torch.ones(37, 53, dtype=torch.int32)), "attn_mask: expected bool"),
    (dict(dropout_p=1.5), "dropout"), (dict(key=torch.zeros(1, 4, 53, 8), enable_gqa=True), "^key: expected shape"),
    (dict(value=torch.zeros(2, 4, 53, 32).double()), "^value: expected dtype fp32, got fp64")],
    ids=["causal and mask", "shape", "dtype", "dropout_p", "key", "value"])
def test_wrong_calls(options, words):
    tensors = dict(zip(("query", "key", "value"), inputs()))
    with pytest.raises(ValueError, match=words):
        tt.scaled_dot_product_attention(**{**tensors, "enable_gqa": True, **options})


needs_provider = pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"),
                                    reason=f"PyTorch {torch.__version__} has no register_flash_attention_impl")


@pytest.fixture
def provider(monkeypatch):
    """The provider active, with a list that grows by one at each call of our forward."""
    from torch.nn import attention
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no register_flash_attention_impl")
    from tessera.torch import _provider
    calls = []
    original = _provider._operators.forward
    monkeypatch.setattr(_provider._operators, "forward", lambda *a: calls.append(1) or original(*a))
    tt.register_provider()
    assert "tessera" in attention.list_flash_attention_impls() and not calls
    attention.activate_flash_attention_impl("tessera")
    yield calls
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("name,compiled", [("none", False), ("is_causal, more keys", False),
                                           ("bool [batch, 1, 1, len_kv]", False), ("is_causal, more keys", True)])
def test_pytorch_runs_on_the_provider(provider, name, compiled):
    q, k, v = inputs()
    options = MASKS[name]
    torch._dynamo.reset()
    function = torch.compile(torch_sdpa, fullgraph=True) if compiled else torch_sdpa
    got = function(q, k, v, **options)
    assert len(provider) == 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch_sdpa(q.double(), k.double(), v.double(), **options)
    assert len(provider) == 1
    reference.expect_close(got, want, 2e-6, "o")
    for a, b in zip(torch.autograd.grad(got.sin().sum(), (q, k, v)), torch.autograd.grad(want.sin().sum(), (q, k, v))):
        reference.expect_close(a, b, 1e-5, "gradient")


def test_restore_gives_pytorchs_kernel_back(provider):
    from torch.nn import attention
    q, k, v = inputs()
    torch_sdpa(q, k, v)
    seen = len(provider)
    attention.restore_flash_attention_impl()
    want = torch_sdpa(q, k, v)
    assert seen == 1 and len(provider) == seen
    attention.activate_flash_attention_impl("tessera")
    torch.testing.assert_close(torch_sdpa(q, k, v), want)
    assert len(provider) == seen + 1


# The order in which PyTorch asks its backends on CUDA. No GPU is needed: the order is a setting of the process.

def backends(*names):
    return [int(getattr(torch.nn.attention.SDPBackend, name)) for name in names]


ON_HOPPER = backends("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "OVERRIDEABLE")
FLASH_FIRST = backends("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "OVERRIDEABLE")
READ, WRITE = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order


@pytest.fixture
def hopper(monkeypatch):
    """PyTorch as it is on Hopper: its first choice puts cuDNN first, whatever was set before. initialize() is what
    CUDA's initialization calls."""
    from tessera.torch import _provider
    before, queued, first = READ(), [], [True]

    def choose():
        if first.pop() if first else False:
            WRITE(ON_HOPPER)

    def initialize():
        while queued:
            queued.pop()()
    monkeypatch.setattr(_provider, "choose_a_backend", choose)
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: not queued and not first)
    monkeypatch.setattr(_provider._library, "status", lambda: dict.fromkeys(("libtessera_torch.so",
                                                                             "libtessera_torch_cuda.so")))
    tt.register_provider()
    yield choose, initialize
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    WRITE(before)


@needs_provider
@pytest.mark.parametrize("initialized", [False, True], ids=["before CUDA", "after CUDA"])
def test_flash_is_asked_first_while_the_provider_is_active(hopper, initialized):
    from tessera.torch import _provider
    from torch.nn import attention
    choose, initialize = hopper
    if initialized:
        choose()
    attention.activate_flash_attention_impl("tessera")
    assert _provider.is_active() and READ()[0] == FLASH_FIRST[0]
    initialize()
    choose()
    assert READ() == FLASH_FIRST
    attention.restore_flash_attention_impl()
    assert READ() == ON_HOPPER and not _provider.is_active()


@needs_provider
def test_an_order_of_the_program_is_left_alone(hopper):
    from torch.nn import attention
    choose, initialize = hopper
    own = FLASH_FIRST[::-1]
    attention.activate_flash_attention_impl("tessera")
    WRITE(own)
    initialize()
    assert READ() == own
    attention.restore_flash_attention_impl()
    assert READ() == own


@needs_provider
def test_a_provider_that_ended_before_cuda_began_changes_nothing(hopper):
    from torch.nn import attention
    choose, initialize = hopper
    before = READ()
    attention.activate_flash_attention_impl("tessera")
    attention.restore_flash_attention_impl()
    assert READ() == before
    initialize()
    choose()
    assert READ() == ON_HOPPER


def test_a_bool_mask_allocates_its_bias_and_nothing_else():
    """So does PyTorch. A mask that repeats elements costs one copy of them."""
    from tessera.torch.sdpa import bias_of
    from torch.utils._python_dispatch import TorchDispatchMode

    class Allocated(TorchDispatchMode):
        storages = {}

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            storage = result.untyped_storage()
            self.storages.setdefault(storage.data_ptr(), storage.nbytes())
            return result
    row = torch.rand(2, 1, 37, 53) > 0.5
    for mask, elements in ((row, row.numel()), (row.expand(2, 4, 37, 53), row.numel()),
                           ((torch.rand(53) > 0.5).expand(2, 4, 37, 53), 53)):
        with Allocated() as allocated:
            allocated.storages = {mask.untyped_storage().data_ptr(): 0}
            bias = bias_of(mask, (2, 4, 37, 16), 53, torch.bfloat16)
        assert bias.dtype == torch.bfloat16 and bias.numel() == elements
        assert sum(allocated.storages.values()) <= 2 * elements + 8
        assert torch.equal(bias.expand(2, 4, 37, 53) == 0, mask.expand(2, 4, 37, 53))


def test_nested_tensors_are_refused_by_name():
    q = torch.randn(2, 4, 5, 8)
    nested = torch.nested.nested_tensor([torch.randn(4, 5, 8), torch.randn(4, 3, 8)])
    for name in ("query", "key", "value"):
        with pytest.raises(ValueError, match=f"^{name}: expected a strided tensor, got one that is nested"):
            tt.scaled_dot_product_attention(**{**dict.fromkeys(("query", "key", "value"), q), name: nested})
