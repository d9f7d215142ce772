# SPDX-License-Identifier: Apache-2.0
"""Which operator a call of tessera.torch runs: the same bits by every one, and the one that its surroundings need."""
import concurrent.futures

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from tessera import flash_attn  # noqa: E402
from tessera.torch import _attention, _operators  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

CALLS = {"plain": {}, "bottom-right": dict(causal="bottom-right"), "top-left": dict(causal="top-left"),
         "window": dict(window=(9, 3)), "window to the left": dict(window=(7, None), causal="bottom-right"),
         "scale": dict(scale=0.3), "integer scale": dict(scale=1),
         "heads first": dict(layout="bhsd", causal="top-left"),
         "softcap": dict(softcap=2.0)}


def inputs(name, dtype, device):
    leaves = reference.inputs(dtype=dtype, device=device, head_dim=64)
    return [t.detach().transpose(1, 2).requires_grad_() for t in leaves] if name == "heads first" else leaves


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_gives_the_same_bits(name, dtype, device):
    """O without gradients, with LSE, with gradients, in a compiled graph and under torch.func; gradients likewise, but
    under torch.func in bf16 on CUDA, where no residual is kept."""
    leaves, call = inputs(name, dtype, device), CALLS[name]
    tensors = [t.detach() for t in leaves]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: tt.attention(*t, **call), fullgraph=True, backend="aot_eager")
    o = tt.attention(*tensors, **call)
    ways = [tt.attention(*leaves, **call), tt.attention(*leaves, **call, return_lse=True)[0], compiled(*leaves),
            torch.func.vjp(lambda *t: tt.attention(*t, **call), *tensors)[0]]
    for got in (tt.attention(*tensors, **call, return_lse=True)[0], *ways):
        assert torch.equal(got, o) and got.stride() == o.stride()
    d_o = reference.random(o.shape, 4, device, dtype)
    gradients = [torch.autograd.grad(way, leaves, d_o) for way in ways[:3]]
    if device == "cpu" or dtype == torch.float32:
        gradients.append(torch.func.vjp(lambda *t: tt.attention(*t, **call), *tensors)[1](d_o))
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others))


class Functions(TorchFunctionMode):
    """Within it, `seen` gets the name of every function of PyTorch that is called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def seen_by_names(function):
    with reference.Names() as names:
        function()
    return {name for name in names.seen if name.startswith("tessera::")}


def test_which_operator_a_call_runs(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    leaves = reference.inputs(device=device)
    assert seen_by_names(lambda: tt.attention(q, k, v, causal="top-left")) == {"tessera::forward_o"}
    assert seen_by_names(lambda: flash_attn.flash_attn_func(q, k, v)) == {"tessera::forward_o"}
    assert seen_by_names(lambda: tt.attention(q, k, v, return_lse=True)) == {"tessera::forward"}
    assert seen_by_names(lambda: tt.attention(q, k, v, softcap=1.0)) == {"tessera::forward"}
    for run in (tt.attention, flash_attn.flash_attn_func,
                lambda *t: tt.scaled_dot_product_attention(*(x.transpose(1, 2) for x in t), enable_gqa=True)):
        assert seen_by_names(lambda f=run: f(*leaves).sum().backward()) == {"tessera::forward_few", "tessera::backward"}
    assert seen_by_names(lambda: tt.attention(*leaves, softcap=1.0).sum().backward()) == {
        "tessera::forward", "tessera::backward"}
    with torch.no_grad():
        assert seen_by_names(lambda: tt.attention(*leaves)) == {"tessera::forward_o"}


def test_who_listens_hears_the_operator(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    with Functions() as mode:
        tt.attention(q, k, v)
    assert any("forward_o" in name for name in mode.seen)
    with torch.profiler.profile() as profile:
        tt.attention(q, k, v)
    assert "tessera::forward_o" in {event.key for event in profile.key_averages()}


def test_importing_tessera_gives_pytorchs_own_operators_no_kernel():
    for name, key in (("fused_attention_overrideable", "CPU"), ("fused_attention_overrideable", "CUDA"),
                      ("flash_attention_for_cpu", "CUDA")):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::_scaled_dot_product_{name}", key)


def test_a_pytorch_that_does_not_say_what_is_active(device, monkeypatch):
    """Calls then go where torch.func's do: the same bits."""
    leaves = reference.inputs(device=device)
    want = tt.attention(*leaves)
    gradients = torch.autograd.grad(want.sum(), leaves)
    monkeypatch.setattr(_attention, "_functorch_active", lambda: True)
    assert seen_by_names(lambda: tt.attention(*leaves)) == {"tessera::forward"}
    got = tt.attention(*leaves)
    assert torch.equal(got, want) and torch.equal(tt.attention(*(t.detach() for t in leaves)), want)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(got.sum(), leaves), gradients))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_some_want_gradients(wanted, device):
    tensors = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(reference.inputs(device=device))]
    leaves = [t for t in tensors if t.requires_grad]
    whole = reference.inputs(device=device)
    want = torch.autograd.grad(tt.attention(*whole).sum(), [whole[i] for i in wanted])
    got = torch.autograd.grad(tt.attention(*tensors).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_results_are_tensors_like_others(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    o = tt.attention(torch.nn.Parameter(q, requires_grad=False), torch.nn.Buffer(k), v)
    o += 1
    assert type(o) is torch.Tensor and o._version == 1 and o.requires_grad_().is_leaf
    with torch.inference_mode():
        assert tt.attention(*(t.clone() for t in (q, k, v))).is_inference()
    leaves = reference.inputs(device=device)
    with torch.inference_mode():
        tt.attention(*leaves, scale=0.37)
    assert torch.autograd.grad(tt.attention(*leaves, scale=0.37).sum(), leaves)[0].shape == leaves[0].shape


def test_threads(device):
    tensors = [t.detach() for t in reference.inputs(device=device)]
    want = tt.attention(*tensors)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(o, want) for o in pool.map(lambda _: tt.attention(*tensors), range(200)))


def test_checkpoints(device):
    """Reentrant or not, also with a mode that began after the forward."""
    from torch.utils.checkpoint import checkpoint
    leaves = reference.inputs(device=device)
    want = torch.autograd.grad(tt.attention(*leaves, causal="bottom-right").sum(), leaves)
    for reentrant in (False, True):
        o = checkpoint(lambda *t: tt.attention(*t, causal="bottom-right"), *leaves, use_reentrant=reentrant)
        if reentrant:
            o.sum().backward()
        else:
            with reference.Names():
                o.sum().backward()
        assert all(torch.equal(t.grad, g) for t, g in zip(leaves, want))
        for t in leaves:
            t.grad = None


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.sum()

    @staticmethod
    def backward(ctx, d_o):
        return None


def test_an_o_whose_gradient_is_none(device):
    leaves = reference.inputs(device=device)
    NoGradient.apply(tt.attention(*leaves)).backward()
    assert all(t.grad is None or not t.grad.any() for t in leaves)


def test_hooks_that_cast_what_is_saved(device):
    leaves = reference.inputs(device=device)
    want = torch.autograd.grad(tt.attention(*leaves).sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        o = tt.attention(*leaves)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sum(), leaves), want))


def test_a_second_derivative_says_whose_it_is(device):
    x, k, v = (t.detach() for t in reference.inputs(device=device))
    x.requires_grad_()
    for function in (lambda: tt.attention(x, k, v), lambda: tt.attention(x, k, v, softcap=2.0),
                     lambda: torch.ops.tessera.attention.default(*_operators.Arguments(x, k, v))[0]):
        first, = torch.autograd.grad(function().sin().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="tessera: its kernels have no second derivatives"):
            first.sum().backward()


# A seed that a graph draws.

def step(q, k, v):
    return tt.attention(q, k, v, dropout_p=0.3)


def same_weights(o, v, generator_seed=3):
    """Whether the backward dropped what the forward dropped: O is linear in V, so that sum(O dO) = sum(dV V)."""
    d_o = reference.random(o.shape, generator_seed, o.device)
    gradient, = torch.autograd.grad(o, v, d_o)
    return torch.allclose((o * d_o).sum(), (gradient * v).sum(), rtol=1e-4, atol=1e-3)


PARTITIONED = "aot_eager_decomp_partition"


@pytest.mark.parametrize("budget", [0, 0.3, 0.7])
def test_a_graph_that_may_draw_its_seed_again_is_refused(budget, device):
    import torch._functorch.config as config
    leaves = reference.inputs(device=device)
    with config.patch(activation_memory_budget=budget):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="seed: expected an integer or a tensor, since a graph compiled with"):
            torch.compile(step, fullgraph=True, backend=PARTITIONED)(*leaves)
        torch._dynamo.reset()  # with graph breaks the seed is drawn between the graphs
        assert same_weights(torch.compile(step, backend=PARTITIONED)(*leaves), leaves[2])
        seeded = torch.compile(lambda q, k, v: tt.attention(q, k, v, dropout_p=0.3, seed=7), fullgraph=True,
                               backend=PARTITIONED)
        assert same_weights(seeded(*leaves), leaves[2])
        with torch.no_grad():
            torch._dynamo.reset()
            assert torch.compile(step, fullgraph=True, backend=PARTITIONED)(*leaves).shape == leaves[0].shape


def test_a_region_that_may_draw_its_seed_again_is_refused(device):
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if region is None:
        pytest.skip(f"PyTorch {torch.__version__} has no region_activation_memory_budget")
    leaves = reference.inputs(device=device)

    def function(q, k, v):
        with region(0.0):
            return step(q, k, v)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="seed: expected an integer or a tensor, since a graph compiled with"):
        torch.compile(function, fullgraph=True, backend=PARTITIONED)(*leaves)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_graph_draws_one_seed_for_both_passes(checkpointed, device):
    from torch.utils.checkpoint import checkpoint
    leaves = reference.inputs(device=device)
    function = (lambda *t: checkpoint(step, *t, use_reentrant=False)) if checkpointed else step
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=PARTITIONED)
    first, second = compiled(*leaves), compiled(*leaves)
    assert not torch.equal(first, second)
    assert same_weights(first, leaves[2]) and same_weights(second, leaves[2])
