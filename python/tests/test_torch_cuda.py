# SPDX-License-Identifier: Apache-2.0
"""Tests that need a CUDA device: streams, graphs, memory, tensors on two devices. The other files test the numbers."""
import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from conftest import NO_CUDA  # noqa: E402

if NO_CUDA:
    pytest.skip(NO_CUDA, allow_module_level=True)
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402

HALF = 1.5 * 2**-8  # bf16: docs/numerics.md


def inputs(**sizes):
    return reference.inputs(**{**dict(dtype=torch.bfloat16, device="cuda", head_dim=64), **sizes})


def step(q, k, v):
    """O, LSE and all gradients."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o, lse = tt.attention(*leaves, causal="bottom-right", return_lse=True)
    return (o, lse, *torch.autograd.grad(o.float().square().sum() + lse.sum(), leaves))


def assert_same(got, want):
    for a, b in zip(got, want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", [None, "cuda.fa2", "cuda.fa1"])
def test_rows_that_the_first_kernel_cannot_read_go_to_the_next(kernel):
    """fa3 wants rows aligned to 16 bytes. A kernel named by the caller is not replaced by another one."""
    leaves = inputs()
    slices = [torch.nn.functional.pad(t.detach(), (3, 5))[..., 3:-5].requires_grad_() for t in leaves]
    o, lse = tt.attention(*slices, return_lse=True, kernel=kernel)
    want_o, want_lse = reference.attention(*leaves)
    reference.expect_close(o, want_o, HALF, "o")
    reference.expect_lse(lse, want_lse)
    d_o = torch.nn.functional.pad(reference.random(o.shape, 5, "cuda", o.dtype), (1, 0))[..., 1:]
    for name, a, b in zip(("dq", "dk", "dv"), torch.autograd.grad(o, slices, d_o),
                          torch.autograd.grad(want_o, leaves, d_o.double())):
        reference.expect_close(a, b, 2 * HALF, name)
    with pytest.raises(tessera.Unsupported, match="fa3"):
        tt.attention(*slices, kernel="cuda.fa3")


@pytest.mark.parametrize("ragged", [False, True])
def test_long_rows_that_the_first_kernel_cannot_read_are_copied(ragged):
    """Unaligned rows are copied for the kernel of aligned ones, so the bits are equal. plan() says so."""
    aligned = [t.detach().flatten(0, 1) if ragged else t.detach()
               for t in inputs(head_dim=128, len_q=2048, len_kv=2048)]
    leaves = [t.requires_grad_() for t in aligned]
    slices = [torch.nn.functional.pad(t.detach(), (3, 5))[..., 3:-5].requires_grad_() for t in aligned]
    shifted = torch.zeros(aligned[0].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view(aligned[0].shape)
    shifted = shifted.copy_(aligned[0]).requires_grad_()  # contiguous, at an odd address
    cu = torch.tensor([0, 1000, 4096], dtype=torch.int32, device="cuda")

    def call(q, k, v, d_o=None):
        o = tt.varlen_attention(q, k, v, cu, cu) if ragged else tt.attention(q, k, v, causal="bottom-right")
        d_o = torch.ones_like(o) if d_o is None else d_o
        return (o, *torch.autograd.grad(o, (q, k, v), d_o))
    want = call(*leaves)
    assert_same(call(*slices), want)
    assert_same(call(shifted, *leaves[1:]), want)
    assert_same(call(*leaves, torch.nn.functional.pad(torch.ones_like(want[0]), (1, 2))[..., 1:-2]), want)
    if not ragged and tessera.plan(*(t.detach() for t in aligned)).kernel.startswith("cuda.fa3"):
        assert "tessera.torch copies them" in tessera.plan(*(t.detach() for t in slices)).layout


def test_gradients_with_strides_of_zero():
    leaves = inputs()
    o = tt.attention(*leaves)
    for a, b in zip(torch.autograd.grad(o.sum(), leaves, retain_graph=True),
                    torch.autograd.grad(reference.attention(*leaves)[0].sum(), leaves)):
        reference.expect_close(a, b, 2 * HALF, "gradient")


def test_a_do_with_strides_of_zero_has_the_bits_of_its_copy():
    """It is copied, so that the same kernel computes both."""
    leaves = inputs(head_dim=128, len_q=256, len_kv=256)
    o = tt.attention(*leaves, causal="bottom-right")
    one = torch.ones((), device="cuda", dtype=o.dtype).expand(o.shape)
    got = torch.autograd.grad(o, leaves, one, retain_graph=True)
    assert_same(got, torch.autograd.grad(o, leaves, one.contiguous()))


PLACES = [("k", dict(k=0)), ("v", dict(v=0)), ("q", dict(q=0)), ("bias", dict(bias=torch.zeros(1, 1, 1, 53))),
          ("alibi_slopes", dict(alibi_slopes=torch.zeros(4)))]


@pytest.mark.parametrize("name,change", PLACES, ids=[p[0] for p in PLACES])
@pytest.mark.parametrize("gradients", [False, True])
def test_tensors_in_two_places_are_refused(name, change, gradients):
    call = dict(zip("qkv", (t.detach().requires_grad_(gradients) for t in inputs())))
    call.update({key: call[key].cpu() if key in call else value for key, value in change.items()})
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor on "):
        tt.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_lengths_on_the_host_are_refused():
    q, k, v = (t[0] for t in inputs(batch=1))
    cu = torch.tensor([0, 37], dtype=torch.int32), torch.tensor([0, 53], dtype=torch.int32)
    for change in (0, 1):
        moved = [c.cuda() if i != change else c for i, c in enumerate(cu)]
        with pytest.raises(ValueError, match="^cu_seqlens_(q|kv): expected a tensor on"):
            tt.varlen_attention(q, k, v, *moved)


def test_fp64_has_no_kernel_here():
    with pytest.raises(tessera.Unsupported, match="cuda.fa2.forward: does not take fp64"):
        tt.attention(*reference.inputs(dtype=torch.float64, device="cuda"))


def long_work():
    torch.cuda._sleep(200_000_000)  # clock cycles: about a tenth of a second


def test_work_is_queued_on_the_current_stream():
    """Inputs are made on a stream that is kept busy: on any other the kernels would read what was there before."""
    q, k, v = (t.detach() for t in inputs())
    want = step(q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = [torch.zeros_like(t) for t in (q, k, v)]
        long_work()
        for t, value in zip(late, (q, k, v)):
            t.copy_(value)
        got = step(*late)
    torch.cuda.current_stream().wait_stream(side)
    assert_same(got, want)


@pytest.mark.parametrize("ragged", [False, True])
def test_the_host_waits_for_nothing(ragged):
    """The calls return while the device is still busy with what came before them: cu_seqlens are not read."""
    leaves = [t.detach().flatten(0, 1).requires_grad_() if ragged else t for t in inputs(len_q=53)]
    cu = torch.tensor([0, 20, 106], dtype=torch.int32, device="cuda")

    def call():
        o = tt.varlen_attention(*leaves, cu, cu, causal="bottom-right") if ragged else tt.attention(*leaves)
        return torch.autograd.grad(o, leaves, torch.ones_like(o))
    call()
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    long_work()
    event.record()
    call()
    assert not event.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_graph_replays_both_passes(dtype):
    first, second = ([t.detach() for t in inputs(dtype=dtype, seed=s, len_q=130, len_kv=260)] for s in (1, 2))
    want = step(*second)
    still = [t.clone() for t in first]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*still)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*still)
    for t, value in zip(still, second):
        t.copy_(value)
    for _ in range(2):
        graph.replay()
        assert_same(results, want)


def test_a_graph_of_a_ragged_call_takes_other_lengths():
    q, k, v = (t.detach().flatten(0, 1) for t in inputs(len_q=64, len_kv=64))
    cu = torch.tensor([0, 30, 128], dtype=torch.int32, device="cuda")
    other = torch.tensor([0, 100, 128], dtype=torch.int32, device="cuda")
    want = tt.varlen_attention(q, k, v, other, other, causal="bottom-right")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tt.varlen_attention(q, k, v, cu, cu, causal="bottom-right")
    cu.copy_(other)
    graph.replay()
    assert torch.equal(o, want)


def test_memory_comes_from_pytorchs_allocator():
    """The backward's workspace counts in the allocator's peak, and nothing of it is left. The operator itself: threads
    of autograd may give memory back later."""
    q, k, v = (t.detach() for t in inputs(len_q=512, len_kv=512))
    o, lse = tt.attention(q, k, v, return_lse=True)
    call = (torch.ones_like(o), None, q, k, v, o, lse, *(None,) * 5, -1, -1, 0, -1, -1, None, 0.0, 0.0, None, False)
    workspace = tessera.plan(q, k, v, backward=True).workspace_bytes
    torch.ops.tessera.backward.default(*call)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.ops.tessera.backward.default(*call)
    kept = sum(g.numel() * g.element_size() for g in gradients)
    assert workspace > 0 and torch.cuda.max_memory_allocated() - before >= kept + workspace
    assert kept <= torch.cuda.memory_allocated() - before < kept + workspace


def test_threads_with_streams_of_their_own():
    cases = [[t.detach() for t in inputs(len_q=40 + i, len_kv=60, seed=i)] for i in range(4)]
    want = [step(*c) for c in cases]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = step(*cases[i])
                torch.cuda.current_stream().synchronize()
                if not all(torch.equal(a, b) for a, b in zip(got, want[i])):
                    wrong.append(i)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def without_residual(monkeypatch):
    """Training keeps no residual of O, as in the core and the provider: with it the gradients have other bits."""
    from tessera.torch import _operators
    monkeypatch.setattr(_operators, "keeps_residual", lambda *_: False)


def test_every_run_has_the_same_bits():
    q, k, v = (t.detach() for t in inputs(len_q=300, len_kv=700, head_dim=128))
    want = step(q, k, v)
    for _ in range(10):
        assert_same(step(q, k, v), want)


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_the_core_takes_arrays_of_cuda_memory(monkeypatch, library):
    q, k, v = (t.detach() for t in inputs(dtype=torch.float16))
    if library == "cupy":
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
        torch.cuda.synchronize()
        arrays = [cupy.from_dlpack(t) for t in (q, k, v)]
    else:
        arrays = [q, k, v]
    o, lse = tessera.attention(*arrays, causal="bottom-right", return_lse=True)
    gradients = tessera.attention_backward(o, *arrays, o, lse, causal="bottom-right")
    assert type(o) is type(arrays[0]) and all(type(g) is type(o) for g in gradients)
    if library == "cupy":
        cupy.cuda.get_current_stream().synchronize()
    want_o, want_lse = tt.attention(q, k, v, causal="bottom-right", return_lse=True)
    assert torch.equal(torch.as_tensor(o, device="cuda"), want_o)
    assert torch.equal(torch.as_tensor(lse, device="cuda"), want_lse)
    without_residual(monkeypatch)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(tt.attention(*leaves, causal="bottom-right"), leaves, want_o)
    assert_same([torch.as_tensor(g, device="cuda") for g in gradients], want)


def test_the_core_takes_any_strides():
    slices = [torch.nn.functional.pad(t.detach(), (3, 5))[..., 3:-5] for t in inputs()]
    assert torch.equal(tessera.attention(*slices), tt.attention(*slices))
    with pytest.raises(tessera.Unsupported, match="fa3"):
        tessera.attention(*slices, kernel="cuda.fa3")


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("transposed", [False, True], ids=["heads first", "rows first"])
def test_pytorchs_flash_attention_runs_on_the_provider(monkeypatch, transposed, dropout_p):
    """activate_flash_attention_impl: forward and backward of F.scaled_dot_product_attention for CUDA are ours."""
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no register_flash_attention_impl")
    from tessera.torch import _provider
    calls = []
    for name in ("forward", "backward"):
        original = getattr(_provider._operators, name)
        monkeypatch.setattr(_provider._operators, name, lambda *a, f=original, n=name: calls.append(n) or f(*a))
    rows_first = inputs(len_q=53, heads_kv=4)
    leaves = [t.detach().transpose(1, 2) if transposed else t.detach().transpose(1, 2).contiguous()
              for t in rows_first]
    for t in leaves:
        t.requires_grad_()
    tt.register_provider()
    attention.activate_flash_attention_impl("tessera")
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            torch.manual_seed(3)
            o = torch_sdpa(*leaves, is_causal=True, dropout_p=dropout_p)
            d_o = reference.random(o.shape, 6, "cuda", o.dtype)
            gradients = torch.autograd.grad(o, leaves, d_o)
    finally:
        attention.restore_flash_attention_impl()
    assert calls == ["forward", "backward"] and o.stride() == leaves[0].stride()
    if dropout_p:
        without_residual(monkeypatch)
        torch.manual_seed(3)
        want_o = tt.attention(*leaves, causal="top-left", layout="bhsd", dropout_p=dropout_p)
        assert torch.equal(o, want_o)
        return assert_same(gradients, torch.autograd.grad(want_o, leaves, d_o))
    want_o, _ = reference.attention(*rows_first, causal="top-left")
    reference.expect_close(o.transpose(1, 2), want_o, HALF, "o")
    for a, b in zip(gradients, torch.autograd.grad(want_o, rows_first, d_o.transpose(1, 2).double())):
        reference.expect_close(a.transpose(1, 2), b, 2 * HALF, "gradient")


def test_the_providers_causal_is_flash_attentions():
    """torch.nn.attention.bias.causal_lower_right asks PyTorch's flash kernel for it with lengths that differ."""
    from torch.nn import attention
    from torch.nn.attention.bias import causal_lower_right
    tt.register_provider()
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in inputs(len_q=40, len_kv=90, heads_q=2, heads_kv=2))
    attention.activate_flash_attention_impl("tessera")
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            mask = causal_lower_right(40, 90)
            got = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            raw = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        gradients = torch.autograd.grad(got.float().sin().sum(), (q, k, v))
    finally:
        attention.restore_flash_attention_impl()
    want, lse = tt.attention(q, k, v, causal="bottom-right", layout="bhsd", return_lse=True)
    assert torch.equal(got, want) and torch.equal(raw[0], want) and torch.equal(raw[1], lse)
    for a, b in zip(gradients, torch.autograd.grad(want.float().sin().sum(), (q, k, v))):
        reference.expect_close(a, b, 2 * HALF, "gradient")


@pytest.mark.parametrize("context", ["none", "another order"])
def test_the_provider_runs_and_no_other_kernel(context):
    """On Hopper and Blackwell PyTorch would take cuDNN. The profile says which kernel ran."""
    import contextlib

    from torch.nn import attention
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no register_flash_attention_impl")
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in inputs(len_q=256, len_kv=256, heads_kv=4)]

    def kernels():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
            torch.cuda.synchronize()
        return " ".join(event.name for event in profile.events()).lower()
    before = kernels()
    order = torch._C._get_sdp_priority_order()
    tt.register_provider()
    attention.activate_flash_attention_impl("tessera")
    try:
        taken = contextlib.nullcontext() if context == "none" else attention.sdpa_kernel(
            [attention.SDPBackend.MATH, attention.SDPBackend.FLASH_ATTENTION], set_priority=True)
        with taken:
            during = kernels()
        again = kernels()
    finally:
        attention.restore_flash_attention_impl()
    assert "tessera" not in before and "tessera" in again
    assert not any(name in again for name in ("cudnn", "pytorch_flash", "fmha"))
    assert ("tessera" in during) == (context == "none")
    assert torch._C._get_sdp_priority_order() == order and "tessera" not in kernels()
