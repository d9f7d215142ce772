# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of tessera.torch, which must raise an error, and unusual ones, which must work."""
import concurrent.futures
import fractions
import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402


def test_an_input_that_is_changed_before_the_backward(device):
    q, k, v = reference.inputs(device=device)
    changed = k * 1.0
    o = tt.attention(q, changed, v)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_a_result_that_is_changed_before_the_backward(device):
    q, k, v = reference.inputs(device=device)
    o = tt.attention(q, k, v)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.mul_(2).sum().backward()


def test_a_second_backward_needs_the_graph_and_gives_the_same_bits(device):
    leaves = reference.inputs(device=device)
    o = tt.attention(*leaves, causal="bottom-right")
    first = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(o.sum(), leaves)):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(o.sum(), leaves)


def test_one_tensor_in_all_three_places(device):
    x = reference.inputs(len_q=21, heads_q=2, device=device)[0]
    three = [x.detach().clone().requires_grad_() for _ in range(3)]
    got, = torch.autograd.grad(tt.attention(x, x, x).sin().sum(), x)
    want = sum(torch.autograd.grad(tt.attention(*three).sin().sum(), three))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_results_share_no_memory_with_inputs_or_each_other(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    kept = [t.clone() for t in (q, k, v)]
    results = [*tt.attention(q, k, v, return_lse=True), *tt.attention(q, k, v, return_lse=True)]
    assert len({t.untyped_storage().data_ptr() for t in (q, k, v, *results)}) == 7
    for t in results:
        t.fill_(float("nan"))
    assert all(torch.equal(t, was) for t, was in zip((q, k, v), kept))


def test_keys_that_all_share_one_row_of_memory(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    one = [t[:, :1].expand(-1, 53, -1, -1).requires_grad_() for t in (k, v)]
    copies = [t.detach().contiguous().requires_grad_() for t in one]
    got, want = tt.attention(q, *one), tt.attention(q, *copies)
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), one), torch.autograd.grad(want.sum(), copies)):
        assert torch.equal(a, b)


def test_lazily_negated_inputs(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    assert torch.equal(tt.attention(torch._neg_view(q), k, v), tt.attention(-q, k, v))


def test_only_the_bias_wants_a_gradient(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    bias = reference.random((1, 4, 37, 53), 2, device).requires_grad_()
    got, = torch.autograd.grad(tt.attention(q, k, v, bias=bias).sin().sum(), bias)
    want, = torch.autograd.grad(reference.attention(q, k, v, bias=bias)[0].sin().sum(), bias)
    reference.expect_close(got, want, 1e-5, "dbias")


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)], ids=["batch", "len", "heads"])
def test_nothing_to_compute(shape, device):
    leaves = [torch.zeros(shape, device=device, requires_grad=True) for _ in range(3)]
    o, lse = tt.attention(*leaves, return_lse=True)
    assert o.shape == shape and lse.shape == (shape[0], shape[2], shape[1])
    assert all(g.shape == shape for g in torch.autograd.grad(o.sum() + lse.sum(), leaves))


def test_without_keys(device):
    q, k, v = reference.inputs(len_kv=0, device=device)
    o, lse = tt.attention(q, k, v, return_lse=True)
    assert not o.any() and (lse == float("-inf")).all()
    assert all(not g.any() for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_tensors_without_memory():
    q, k, v = (torch.empty(2, 7, 4, 8, device="meta") for _ in range(3))
    o, lse = tt.attention(q, k, v, return_lse=True)
    assert o.device.type == lse.device.type == "meta" and o.shape == q.shape and lse.shape == (2, 4, 7)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_named(name, gradients, device):
    call = dict(zip("qkv", (t.detach().requires_grad_(gradients) for t in reference.inputs(device=device))))
    call[name] = call[name].tolist()
    with pytest.raises(ValueError, match=f"^{name}: expected a torch.Tensor, got a list"):
        tt.attention(**call)


@pytest.mark.parametrize("seed", [1.5, "7", 2**64, -2**63 - 1], ids=str)
def test_seeds_that_are_none(seed, device):
    with pytest.raises(ValueError, match="^seed: expected an integer"):
        tt.attention(*reference.inputs(device=device), dropout_p=0.1, seed=seed)


def test_twins_take_one_range_of_seeds():
    """Any integer of 64 bits, signed or not, drops the same weights from PyTorch and from NumPy."""
    numpy = pytest.importorskip("numpy")
    q, k, v = (t.detach() for t in reference.inputs())
    arrays = [t.numpy() for t in (q, k, v)]
    for seed, same in ((-1, 2**64 - 1), (-2**63, 2**63), (5, 5)):
        results = [torch.from_numpy(tessera.attention(*arrays, dropout_p=0.5, seed=s)) for s in (seed, same)]
        results += [tt.attention(q, k, v, dropout_p=0.5, seed=s) for s in (seed, same)]
        assert all(torch.equal(r, results[0]) for r in results)
    for seed in (2**64, -2**63 - 1, 1.5):
        for call in (lambda: tessera.attention(*arrays, dropout_p=0.5, seed=seed),
                     lambda: tt.attention(q, k, v, dropout_p=0.5, seed=seed)):
            with pytest.raises(ValueError, match="^seed: expected an integer"):
                call()


def test_twins_have_one_text_for_dtypes_masks_and_kernels():
    numpy = pytest.importorskip("numpy")
    q, k, v = (t.detach() for t in reference.inputs())

    def texts(*, kernel=None, bias=None, change=lambda t: t):
        found = []
        for function, of in ((tt.attention, lambda t: t), (tessera.attention, lambda t: t.numpy())):
            with pytest.raises(ValueError) as error:
                function(of(change(q)), of(k), of(v), kernel=kernel, bias=None if bias is None else of(bias))
            found.append(str(error.value))
        return found
    for change in (torch.Tensor.bool, lambda t: t.to(torch.complex64)):
        for text in texts(change=change):
            assert text.startswith("q: expected dtype float32, bfloat16, float16 or float64") and "int" not in text
    for text in texts(bias=torch.ones(37, 53, dtype=torch.bool)):
        assert text.startswith("bias: expected float32 or the dtype of q") and "got bool; mask= takes one" in text
    for text in texts(kernel="nope"):
        assert text.startswith("kernel: expected one of ") and "cpu.fa2.forward" in text and text.endswith("got 'nope'")
    masked = numpy.ma.masked_array(numpy.zeros((37, 53), numpy.float32), numpy.ones((37, 53), bool))
    with pytest.raises(ValueError, match="^bias: .*MaskedArray"):
        tessera.attention(*(t.numpy() for t in (q, k, v)), bias=masked)
    with pytest.raises(ValueError, match="^bias: expected a torch.Tensor, got a MaskedArray"):
        tt.attention(q, k, v, bias=masked)


@pytest.mark.filterwarnings("ignore")  # PyTorch is leaving them
def test_quantized_tensors_are_named():
    q, k, v = (t.detach() for t in reference.inputs())
    with pytest.raises(ValueError, match="^k: expected dtype .* got torch.qint8"):
        tt.attention(q, torch.quantize_per_tensor(k, 0.1, 0, torch.qint8), v)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_it_does_not_have(dtype, device):
    with pytest.raises(ValueError, match="dtype"):
        tt.attention(*(torch.zeros(1, 4, 2, 8, device=device).to(dtype) for _ in range(3)))


WRONG = {  # the argument that the message names, and what is wrong with it
    "window": [(1.5, None), (-1, None), (3,), "ab", 3, (2**70, None)], "softcap": [None, -1.0, 10**400],
    "scale": ["x", float("nan"), 1j, 1e300, 10**400, torch.tensor([0.5, 0.5]), torch.tensor(0.5, requires_grad=True)],
    "dropout_p": ["a", 1.0, -0.1, 10**400, torch.tensor(0.1, requires_grad=True)],
    "kernel": [3, "nope", "", b"cpu.fa2", "\udc80", "cpu.fa2\0x"],
    "alibi_slopes": [[1.0], torch.ones(4, dtype=torch.float64)],
    "bias": [[1.0], torch.zeros(3, 3), torch.zeros(1, 1, 1, 37, 53), torch.ones(37, 53, dtype=torch.bool)],
    "causal": [True, [], "left", 1], "layout": ["sbhd", None], "seed": [torch.tensor([1, 2]), torch.tensor([1.5])]}


@pytest.mark.parametrize("name,value", [(n, v) for n, values in WRONG.items() for v in values], ids=str)
@pytest.mark.parametrize("gradients", [False, True])
def test_arguments_that_are_wrong_are_named(name, value, gradients, device):
    leaves = [t.detach().requires_grad_(gradients) for t in reference.inputs(device=device)]
    call = reference.moved({name: value}, "cpu" if name == "seed" else device)
    with pytest.raises(ValueError, match=f"^{name}: "):
        tt.attention(*leaves, **call, **(dict(dropout_p=0.1) if name == "seed" else {}))


@pytest.mark.parametrize("wrong", [dict(max_len_q=-5), dict(max_len_kv="5"), dict(cu_seqlens_q=[0, 37]),
                                   dict(cu_seqlens_kv=None)], ids=str)
def test_lengths_that_are_wrong_are_named(wrong, device):
    q, k, v = (t.detach()[0] for t in reference.inputs(batch=1, device=device))
    call = dict(cu_seqlens_q=torch.tensor([0, 37], device=device), cu_seqlens_kv=torch.tensor([0, 53], device=device))
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: "):
        tt.varlen_attention(q, k, v, **{**call, **wrong})


def test_tensors_that_are_not_strided_are_named(device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    with pytest.raises(ValueError, match="^k: expected a strided tensor .* sparse_coo"):
        tt.attention(q, k.to_sparse(), v)


def test_integers_of_numpy(device):
    numpy = pytest.importorskip("numpy")
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    for given, same in ((dict(window=(numpy.int64(9), None)), dict(window=(9, None))),
                        (dict(dropout_p=0.1, seed=numpy.int32(3)), dict(dropout_p=0.1, seed=3))):
        assert torch.equal(tt.attention(q, k, v, **given), tt.attention(q, k, v, **same))


def test_numbers_of_other_kinds(device):
    """A tensor with one number that wants no gradient, an integer, Python's other numbers."""
    for gradients in (False, True):
        leaves = [t.detach().requires_grad_(gradients) for t in reference.inputs(device=device)]
        for given in (torch.tensor(0.5), torch.tensor([0.5], device=device), fractions.Fraction(1, 2)):
            assert torch.equal(tt.attention(*leaves, scale=given), tt.attention(*leaves, scale=0.5))
        assert torch.equal(tt.attention(*leaves, scale=1), tt.attention(*leaves, scale=1.0))


@pytest.mark.filterwarnings("ignore")  # PyTorch is leaving it
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_a_trace_of_torch_jit(gradients, lse, device):
    """A graph of torch.jit.trace has tessera's operator and differentiates, whatever was wanted while it was made."""
    leaves = [t.detach().requires_grad_(gradients) for t in reference.inputs(device=device)]
    wants = torch.tensor(0.4, requires_grad=True)
    with pytest.raises(ValueError, match="^scale: .* requires_grad"):
        torch.jit.trace(lambda *t: tt.attention(*t, scale=wants, return_lse=lse), leaves)
    traced = torch.jit.trace(lambda *t: tt.attention(*t, causal="bottom-right", scale=0.4, return_lse=lse), leaves)
    assert "tessera::attention" in str(traced.graph)
    others = reference.inputs(len_q=21, seed=4, device=device)
    got, want = traced(*others), tt.attention(*others, causal="bottom-right", scale=0.4, return_lse=True)
    assert torch.equal(got[0] if lse else got, want[0]) and (not lse or torch.equal(got[1], want[1]))
    for a, b in zip(torch.autograd.grad((got[0] if lse else got).sin().sum(), others),
                    torch.autograd.grad(want[0].sin().sum(), others)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("call", [{}, dict(softcap=2.0)], ids=str)
def test_derivatives_that_are_not_there_are_errors(call, device):
    """Derivatives that are not there raise an error. Without one, PyTorch would take tangents of 0. For second
    derivatives the error is tessera's, or PyTorch's if the call became a node of PyTorch's own."""
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        with torch.no_grad(), pytest.raises(NotImplementedError, match="forward mode"):
            tt.attention(forward_ad.make_dual(q, q), k, v, **call)
        assert torch.equal(tt.attention(q, k, v, **call), tt.attention(q, k, v, **call))
    with pytest.raises(RuntimeError, match="no second derivatives|derivative for .* is not implemented"):
        torch.autograd.functional.jvp(lambda x: tt.attention(x, k, v, **call), q, q)
    for transform in (lambda f: torch.func.jvp(f, (q,), (q,)), lambda f: torch.func.jacfwd(f)(q),
                      lambda f: torch.func.hessian(lambda x: f(x).sum())(q)):
        with pytest.raises(NotImplementedError, match="tessera: its kernels have no derivatives by forward mode"):
            transform(lambda x: tt.attention(x, k, v, **call))
    x = q.clone().requires_grad_()
    first, = torch.autograd.grad(tt.attention(x, k, v, **call).sin().sum(), x, create_graph=True)
    want, = torch.autograd.grad(tt.attention(x, k, v, **call).sin().sum(), x)
    assert torch.equal(first, want)


PLACES = {"k": {}, "v": {}, "bias": dict(bias=torch.zeros(1, 1, 37, 53)),
          "alibi_slopes": dict(alibi_slopes=torch.zeros(4))}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_a_tensor_on_another_device_is_named(name, gradients, device):
    """The CUDA driver is not asked where PyTorch's tensors lie, so the device that each one states must be checked."""
    call = dict(zip("qkv", (t.detach().requires_grad_(gradients) for t in reference.inputs(device=device))))
    call.update(reference.moved(PLACES[name], device))
    call[name] = call[name].detach().to("meta")
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor on {device}.*, where q is, got one on meta"):
        tt.attention(**call)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_kv"])
def test_lengths_on_another_device_are_named(name, device):
    q, k, v = (t.detach()[0] for t in reference.inputs(batch=1, device=device))
    call = dict(cu_seqlens_q=torch.tensor([0, 37], device=device), cu_seqlens_kv=torch.tensor([0, 53], device=device))
    call[name] = call[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor on {device}.*, got one on meta"):
        tt.varlen_attention(q, k, v, **call, max_len_q=37, max_len_kv=53)


SETTINGS = dict(bias=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, seed=None, max_len_q=-1,
                max_len_kv=-1, causal=0, window_left=-1, window_right=-1, scale=None, softcap=0.0, dropout_p=0.0,
                kernel=None, bias_gradient=False)


@pytest.mark.parametrize("name", ["k", "o", "lse", "d_o"])
def test_a_backward_with_a_tensor_on_another_device(name, device):
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    o, lse = tt.attention(q, k, v, return_lse=True)
    call = dict(d_o=o, dlse=None, q=q, k=k, v=v, o=o, lse=lse, o_residual=None)
    call[name] = call[name].to("meta")
    with pytest.raises((ValueError, RuntimeError), match="expected a tensor on|meta"):
        torch.ops.tessera.backward.default(**call, **SETTINGS)


def test_the_core_takes_no_lazily_negated_tensor(device):
    """For a lazily negated view -x, PyTorch exports the memory of x."""
    q, k, v = (t.detach() for t in reference.inputs(device=device))
    with pytest.raises(ValueError, match="^q: expected an array whose numbers lie in memory"):
        tessera.attention(torch._neg_view(q), k, v)
    assert torch.equal(tessera.attention(torch._neg_view(q).resolve_neg(), k, v), tt.attention(-q, k, v))


def test_memory_that_was_given_up_is_named(device):
    """Sharded training frees the storage of parameters that are not in use."""
    q, k, v = (t.detach().clone() for t in reference.inputs(device=device))
    k.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="^k: expected an address, got null"):
        tt.attention(q, k, v)


def test_rows_that_share_their_memory(device):
    """Strides that are legal for an input: overlapping windows, every axis reversed, and stride 0."""
    _, k, v = (t.detach() for t in reference.inputs(device=device))
    row = reference.random((68,), 3, device)
    for q in (row.unfold(0, 32, 1)[None, :, None].expand(2, 37, 4, 32),
              torch.as_strided(row, (2, 37, 4, 32), (0,) * 4)):
        assert torch.equal(tt.attention(q, k, v), tt.attention(q.contiguous(), k, v))


def test_one_graph_and_the_backwards_of_many_threads(device):
    leaves = reference.inputs(device=device)
    o = tt.attention(*leaves, causal="bottom-right")
    want = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for got in pool.map(lambda _: torch.autograd.grad(o.sum(), leaves, retain_graph=True), range(30)):
            assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_nothing_is_left_of_a_step(device):
    alive = []
    for _ in range(5):
        leaves = [t.detach().requires_grad_() for t in reference.inputs(device=device)]
        o = tt.attention(*leaves)
        alive += [weakref.ref(o), weakref.ref(leaves[0])]
        o.sum().backward()
        del o, leaves
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_hooks_of_saved_tensors(device):
    leaves = reference.inputs(device=device)
    for call in (dict(causal="bottom-right"), dict(softcap=3.0)):
        want = torch.autograd.grad(tt.attention(*leaves, **call).sum(), leaves)
        with torch.autograd.graph.save_on_cpu():
            o = tt.attention(*leaves, **call)
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sum(), leaves), want))


def test_a_device_of_torchs_own_choice(device):
    """Tensors that the package makes for itself (seeds, settings) do not lie on PyTorch's default device."""
    leaves = reference.inputs(device=device)
    with torch.device("meta"):
        results = [tt.attention(*leaves, scale=0.21), tt.attention(*leaves, dropout_p=0.1),
                   tt.attention(*leaves, seed=4,
                   dropout_p=0.1)]
        assert all(torch.autograd.grad(o.sum(), leaves)[0].device.type == device for o in results)


def test_nan_stays_where_it_is(device):
    q, k, v = (t.detach().clone() for t in reference.inputs(device=device))
    k[0, 3] = float("nan")
    o = tt.attention(q, k, v)
    assert o[0].isnan().all() and o[1].isfinite().all()
    leaves = reference.inputs(device=device)
    o = tt.attention(*leaves)
    d_o = torch.zeros_like(o)
    d_o[1] = float("nan")
    for gradient in torch.autograd.grad(o, leaves, d_o):
        assert gradient[0].isfinite().all() and gradient[1].isnan().any()
