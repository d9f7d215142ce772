# SPDX-License-Identifier: Apache-2.0
"""Plain calls past PyTorch's dispatcher (tessera.torch._direct): the same bits as by the operator, and only where nobody
could tell the difference."""
import gc
import sys
import sysconfig
import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from tessera.torch import _attention, _direct, _operators  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    pytest.skip("a Python without a GIL goes by the operator", allow_module_level=True)


def inputs(device, **sizes):
    return [t.detach() for t in reference.inputs(dtype=torch.bfloat16, device=device, **sizes)]


@pytest.fixture
def taken(monkeypatch):
    """Counts: how many calls asked the function, and how many of them it took."""
    counts = dict(asked=0, taken=0)

    def counting(*arguments):
        o = _direct.attention(*arguments)
        counts["asked"] += 1
        counts["taken"] += o is not None
        return o
    monkeypatch.setattr(_attention, "_past_dispatcher", counting)
    return counts


def by_operator(q, k, v, causal=0, heads_first=False, scale=None, left=-1, right=-1):
    return _operators._plain_o(q, k, v, causal, heads_first, scale, left, right)


def test_this_pytorch_and_python_have_the_way():
    assert _direct.attention is not None


CALLS = {"plain": ({}, ()), "bottom-right": (dict(causal="bottom-right"), (1,)),
         "top-left": (dict(causal="top-left"), (2,)), "window": (dict(window=(9, 3)), (0, False, None, 9, 3)),
         "scale": (dict(scale=-0.3), (0, False, -0.3)), "integer scale": (dict(scale=-1), (0, False, -1.0)),
         "heads first": (dict(layout="bhsd", causal="top-left"), (2, True))}


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_bits(name, device, taken):
    call, arguments = CALLS[name]
    tensors = inputs(device)
    if name == "heads first":
        tensors = [t.transpose(1, 2) for t in tensors]
    got, want = tt.attention(*tensors, **call), by_operator(*tensors, *arguments)
    assert taken == dict(asked=1, taken=1)
    assert torch.equal(got, want) and got.stride() == want.stride() and got.device == want.device
    assert type(got) is torch.Tensor and not got.requires_grad and got.grad_fn is None


def test_results_are_tensors_like_others(device, taken):
    q, k, v = inputs(device)
    o = tt.attention(torch.nn.Parameter(q, requires_grad=False), k, v)
    o += 1
    assert o._version == 1 and o.requires_grad_().is_leaf
    with torch.inference_mode():
        of_inference = tt.attention(*(t.clone() for t in (q, k, v)))
        assert of_inference.is_inference()
    with torch.no_grad():
        assert not tt.attention(q.requires_grad_(), k, v).is_inference()
    assert taken == dict(asked=3, taken=3)


def test_references_are_given_back(device):
    tensors = inputs(device)
    call = (*tensors, 0, False, None, -1, -1)
    _direct.attention(*call)
    gc.collect()
    before = [sys.getrefcount(x) for x in (*tensors, tensors[0].untyped_storage())]
    memory = torch.cuda.memory_allocated() if device == "cuda" else 0
    for _ in range(100):
        assert _direct.attention(*call) is not None
        assert _direct.attention(*tensors) is None
        assert _direct.attention(*call[:5], "x", -1, -1) is None
    assert [sys.getrefcount(x) for x in (*tensors, tensors[0].untyped_storage())] == before
    assert memory == (torch.cuda.memory_allocated() if device == "cuda" else 0)


class Subclass(torch.Tensor):
    pass


def test_what_it_does_not_take(device):
    q, k, v = inputs(device)
    rest = (0, False, None, -1, -1)
    attention = _direct.attention
    for other in (q.as_subclass(Subclass), torch._neg_view(q), torch._efficientzerotensor(q.shape, device=device),
                  q.to("meta"), q.to_sparse(), q.to(torch.int32), q[0], q.cpu().numpy, None, 3):
        assert attention(other, k, v, *rest) is None
        assert attention(q, other, v, *rest) is None
        assert attention(q, k, other, *rest) is None
    for wrong in ((3, *rest[1:]), ("x", *rest[1:]), (0, None, *rest[2:]), (0, False, "x", -1, -1),
                  (0, False, None, -2, -1), (0, False, None, -1, 2**63), rest[:4], (*rest, 0), (0, False, None, -1, 0.5)):
        assert attention(q, k, v, *wrong) is None
    assert attention() is None
    assert torch.equal(attention(q, k, v, *rest), by_operator(q, k, v))


@pytest.mark.parametrize("other", ["a negated view", "a zero tensor", "another dtype", "a strided slice"])
def test_what_the_operator_then_says(other, device):
    q, k, v = inputs(device)
    if other == "a negated view":
        assert torch.equal(tt.attention(torch._neg_view(q), k, v), tt.attention(-q, k, v))
    elif other == "a strided slice":
        wide = torch.nn.functional.pad(q, (3, 5))[..., 3:-5]
        reference.expect_close(tt.attention(wide, k, v), reference.attention(q, k, v)[0], 1.5 * 2**-8, "o")
    elif other == "another dtype":
        with pytest.raises(ValueError, match="^k: "):
            tt.attention(q, k.float(), v)
    else:
        with pytest.raises((ValueError, NotImplementedError)):
            tt.attention(torch._efficientzerotensor(q.shape, device=device), k, v)


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_listens_hears_the_operator(device, taken):
    tensors = inputs(device)
    for mode in (reference.Names(), Functions()):
        with mode:
            tt.attention(*tensors)
        assert any("plain_o" in name for name in mode.seen), mode
    with torch.profiler.profile() as profile:
        tt.attention(*tensors)
    assert "tessera::plain_o" in {event.key for event in profile.key_averages()}
    assert taken["asked"] == 0


def test_transforms_and_gradients_go_another_way(device, taken):
    q, k, v = inputs(device)
    torch.func.vmap(lambda t: tt.attention(t[None], k[:1], v[:1]))(q)
    torch.func.grad(lambda t: tt.attention(t, k, v).float().sum())(q)
    tt.attention(q.clone().requires_grad_(), k, v)
    tt.attention(q, k, v, return_lse=True)
    assert taken["asked"] == 0


def test_threads(device):
    tensors = inputs(device)
    want, wrong = tt.attention(*tensors), []

    def work():
        for _ in range(50):
            if not torch.equal(tt.attention(*tensors), want):
                wrong.append(1)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_it_calls_go_by_the_operator(device, monkeypatch):
    tensors = inputs(device)
    want = tt.attention(*tensors)
    monkeypatch.setattr(_attention, "_past_dispatcher", None)
    assert torch.equal(tt.attention(*tensors), want)


def test_places_that_are_not_what_they_were(monkeypatch):
    """A PyTorch that lays out its tensors in another way gets no function, rather than a wrong one."""
    monkeypatch.setattr(_direct, "_plain_keys", lambda device: (1, 2))
    assert _direct._found() is None
    monkeypatch.undo()
    monkeypatch.setattr(_direct, "_place", lambda *_: None)
    assert _direct._found() is None
    monkeypatch.undo()
    monkeypatch.setattr(_direct, "_address", lambda *_: None)
    assert _direct._found() is None
