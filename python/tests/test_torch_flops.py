# SPDX-License-Identifier: Apache-2.0
"""FlopCounterMode counts for tessera what it counts for PyTorch's own attention."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
from tessera import flash_attn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_KV, DIM = 2, 4, 2, 24, 40, 16
PAIRS = BATCH * HEADS * LEN_Q * LEN_KV
FORWARD, BACKWARD = 2 * PAIRS * 2 * DIM, 2 * PAIRS * 5 * DIM


def leaves(device, heads_first=True, gradients=True):
    shapes = ((HEADS, LEN_Q), (HEADS_KV, LEN_KV), (HEADS_KV, LEN_KV))
    return [torch.randn(BATCH, *(shape if heads_first else shape[::-1]), DIM, device=device, requires_grad=gradients)
            for shape in shapes]


def counted(function, *tensors, backward=True):
    with FlopCounterMode(display=False) as counter:
        o = function(*tensors)
        if backward:
            o.sum().backward()
    return counter.get_total_flops()


def ragged(q, k, v):
    cu_q, cu_kv = (torch.arange(BATCH + 1, device=q.device) * length for length in (LEN_Q, LEN_KV))
    return tt.varlen_attention(*(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_kv)


CALLS = {"sdpa": (tt.scaled_dot_product_attention, True, dict(enable_gqa=True)),
         "sdpa, causal": (tt.scaled_dot_product_attention, True, dict(enable_gqa=True, is_causal=True)),
         "sdpa, mask": (tt.scaled_dot_product_attention, True, dict(enable_gqa=True, attn_mask=torch.zeros(24, 40))),
         "attention": (tt.attention, False, {}), "attention, dropout": (tt.attention, False, dict(dropout_p=0.1)),
         "attention, heads first": (tt.attention, True, dict(layout="bhsd")),
         "attention, sinks": (tt.attention, False, dict(sinks=torch.zeros(HEADS))),
         "flash_attn": (flash_attn.flash_attn_func, False, {}), "ragged": (ragged, False, {})}


@pytest.mark.parametrize("name", CALLS)
def test_eager_calls_are_counted(name, device):
    call, heads_first, options = CALLS[name]
    options = {n: o.to(device) if torch.is_tensor(o) else o for n, o in options.items()}
    tensors = leaves(device, heads_first)
    assert counted(lambda *t: call(*t, **options), *tensors) == FORWARD + BACKWARD
    assert counted(lambda *t: call(*t, **options), *leaves(device, heads_first, False), backward=False) == FORWARD


def test_it_is_the_count_of_pytorchs_own(device):
    own = counted(lambda *t: torch_sdpa(*t), *(t.detach().expand(-1, HEADS, -1, -1).requires_grad_() if i == 0 else
                                              t.detach().repeat_interleave(2, 1).requires_grad_()
                                              for i, t in enumerate(leaves(device))))
    assert own == FORWARD + BACKWARD


@pytest.mark.parametrize("name", ["sdpa", "attention", "attention, dropout", "attention, sinks", "ragged"])
def test_compiled_calls_are_counted(name, device):
    call, heads_first, options = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: call(*t, **options), backend="aot_eager")
    assert counted(compiled, *leaves(device, heads_first)) == FORWARD + BACKWARD
    compiled(*leaves(device, heads_first)).sum().backward()  # compiled outside of the counter
    assert counted(compiled, *leaves(device, heads_first)) == FORWARD + BACKWARD


def test_fake_tensors_are_counted():
    """A ragged batch without numbers counts each sequence at the bound of its length."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        assert counted(tt.attention, *leaves("cpu", False)) == FORWARD + BACKWARD
        assert counted(ragged, *leaves("cpu", False)) == BATCH * (FORWARD + BACKWARD) * BATCH


def test_transformers_are_counted(device):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import tessera.transformers
    tessera.transformers.register()
    counts = []
    for attention in ("tessera", "sdpa"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, attn_implementation=attention)).to(device)
        ids = torch.arange(20, device=device)[None]
        counts.append(counted(lambda ids: model(ids, labels=ids).loss, ids))
    assert counts[0] == counts[1]
