# SPDX-License-Identifier: Apache-2.0
"""Tensors without memory: meta and fake ones are refused where the kernels refuse, and get the shapes of the rest."""
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera.torch as tt  # noqa: E402
from tessera import flash_attn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

Q, K, V = (2, 11, 4, 8), (2, 17, 2, 8), (2, 17, 2, 8)


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def dense(**changed):
    return {**dict(q=z(*Q), k=z(*K), v=z(*V)), **changed}


def rows(**changed):
    return {**dict(q=z(22, 4, 8), k=z(34, 2, 8), v=z(34, 2, 8), cu_seqlens_q=torch.tensor([0, 5, 22]),
                   cu_seqlens_kv=torch.tensor([0, 9, 34])), **changed}


WRONG = {
    "k's batch": dense(k=z(3, 17, 2, 8)), "k's head_dim": dense(k=z(2, 17, 2, 9)), "v's len": dense(v=z(2, 16, 2, 8)),
    "v's heads": dense(v=z(2, 17, 1, 8)), "v's batch": dense(v=z(1, 17, 2, 8)), "heads": dense(q=z(2, 11, 3, 8)),
    "no heads of keys": dense(k=z(2, 17, 0, 8), v=z(2, 17, 0, 8)), "3 dimensions of q": dense(q=z(11, 4, 8)),
    "5 dimensions of k": dense(k=z(1, 2, 17, 2, 8)), "2 dimensions of v": dense(v=z(17, 8)),
    "head_dim 257": dense(q=z(2, 11, 4, 257), k=z(2, 17, 2, 257)),
    "head_dim 0": dense(q=z(2, 11, 4, 0), k=z(2, 17, 2, 0)),
    "head_dim_v 300": dense(v=z(2, 17, 2, 300)), "head_dim_v 0": dense(v=z(2, 17, 2, 0)),
    "heads first": dense(layout="bhsd"), "integers": dense(q=z(*Q, dtype=torch.int32)),
    "bool": dense(q=z(*Q, dtype=torch.bool)), "complex": dense(q=z(*Q, dtype=torch.complex64)),
    "k in bf16": dense(k=z(*K, dtype=torch.bfloat16)), "v in fp16": dense(v=z(*V, dtype=torch.float16)),
    "bias of 3 sizes": dense(bias=z(3, 1, 11, 17)), "bias of 5 dimensions": dense(bias=z(1, 1, 1, 11, 17)),
    "bias's heads": dense(bias=z(2, 11, 17)), "bias's keys": dense(bias=z(11, 16)), "bool bias": dense(
        bias=z(11, 17, dtype=torch.bool)), "bias in bf16": dense(bias=z(11, 17, dtype=torch.bfloat16)),
    "slopes' heads": dense(alibi_slopes=z(3)), "slopes' batch": dense(alibi_slopes=z(3, 4)),
    "slopes of 3 dimensions": dense(alibi_slopes=z(1, 2, 4)), "slopes in bf16": dense(
        alibi_slopes=z(4, dtype=torch.bfloat16)), "scale": dense(scale=float("nan")), "softcap": dense(softcap=-1.0),
    "dropout 1": dense(dropout_p=1.0), "dropout -0.5": dense(dropout_p=-0.5, seed=3),
    "rows: k's head_dim": rows(k=z(34, 2, 9)), "rows: v's total": rows(v=z(33, 2, 8)),
    "rows: heads": rows(q=z(22, 3, 8)), "rows: 4 dimensions": rows(q=z(1, 22, 4, 8)),
    "rows: one sequence more": rows(cu_seqlens_q=torch.tensor([0, 5, 9, 22])),
    "rows: cu_seqlens of floats": rows(cu_seqlens_kv=torch.tensor([0.0, 9.0, 34.0])),
    "rows: cu_seqlens of 2 dimensions": rows(cu_seqlens_q=torch.tensor([[0, 5, 22]])),
    "rows: slopes": rows(alibi_slopes=z(5))}


def call(options):
    return (tt.varlen_attention if "cu_seqlens_q" in options else tt.attention)(**options)


def moved(options, change):
    return {n: change(o) if isinstance(o, torch.Tensor) else o for n, o in options.items()}


def named(error):
    """The argument that a message names."""
    return str(error.value).partition(":")[0]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("gradients", [False, True])
def test_what_the_kernel_refuses_is_refused_without_memory(name, gradients):
    options = WRONG[name]
    if gradients:
        options = moved(options, lambda t: t.requires_grad_() if t.dtype == torch.float32 and t.dim() > 2 else t)
    with pytest.raises(ValueError) as error:
        call(options)
    wanted = named(error)
    with pytest.raises(ValueError) as error:
        call(moved(options, lambda t: t.to("meta")))
    assert named(error) == wanted
    with FakeTensorMode() as mode, pytest.raises(ValueError) as error:
        call(moved(options, mode.from_tensor))
    assert named(error) == wanted
    with pytest.raises(ValueError) as error:
        call(dict(options, math=True))
    assert named(error) == wanted
    with pytest.raises(ValueError) as error:
        call(dict(moved(options, lambda t: t.to("meta")), math=True))
    assert named(error) == wanted


@pytest.mark.parametrize("name", ["k's batch", "head_dim 257", "v in fp16", "bias's keys", "rows: v's total"])
def test_a_compiled_graph_refuses_too(name):
    torch._dynamo.reset()
    options = WRONG[name]
    with pytest.raises(ValueError) as error:
        call(options)
    with pytest.raises(Exception, match=named(error) + ": expected"):
        torch.compile(lambda: call(options), fullgraph=True, backend="aot_eager")()


RIGHT = {"dense": dense(), "heads first": dense(q=z(2, 4, 11, 8), k=z(2, 2, 17, 8), v=z(2, 2, 17, 5), layout="bhsd"),
         "bias": dense(bias=z(1, 11, 1), alibi_slopes=z(2, 4)), "fp64": moved(dense(), torch.Tensor.double),
         "dropout": dense(dropout_p=0.5, seed=1), "no keys": dense(k=z(2, 0, 2, 8), v=z(2, 0, 2, 8)),
         "no heads": dense(q=z(2, 11, 0, 8), k=z(2, 17, 0, 8), v=z(2, 17, 0, 8)), "rows": rows(),
         "rows of two": rows(alibi_slopes=z(2, 4), max_len_q=17, max_len_kv=25)}


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_kernel_takes_has_its_shapes_without_memory(name):
    def described(results):
        return [(t.shape, t.dtype, t.stride()) for t in results]
    options = dict(RIGHT[name], return_lse=True)
    want = described(call(options))
    assert described(call(moved(options, lambda t: t.to("meta")))) == want
    with FakeTensorMode() as mode:
        assert described(call(moved(options, mode.from_tensor))) == want
    composed = call(dict(options, math=True))
    assert [(t.shape, t.dtype) for t in composed] == [(shape, dtype) for shape, dtype, _ in want]


def test_the_backward_refuses_too():
    backward = torch.ops.tessera.backward.default
    q, k, v, o, lse = z(*Q), z(*K), z(*V), z(*Q), z(2, 4, 11)

    def run(device="cpu", d_o=o, q=q, o=o, lse=lse, bias_gradient=False):
        return backward(d_o.to(device), None, q.to(device), k.to(device), v.to(device), o.to(device), lse.to(device),
                        None, None, None, None, None, -1, -1, 0, -1, -1, None, 0.0, 0.0, None, bias_gradient)
    assert [t.shape for t in run("meta")[:3]] == [t.shape for t in run()[:3]]
    for wrong in (dict(d_o=z(2, 11, 4, 9)), dict(d_o=z(*Q).bfloat16()), dict(o=z(2, 10, 4, 8)), dict(lse=z(2, 11, 4)),
                  dict(lse=z(2, 4, 11).double()), dict(q=z(2, 11, 3, 8)), dict(bias_gradient=True)):
        texts = []
        for device in ("cpu", "meta"):
            with pytest.raises(RuntimeError, match="tessera 1: ") as error:
                run(device, **wrong)
            texts.append(named(error) + str(error.value).split(": ")[1])
        assert texts[0] == texts[1], wrong


def test_other_functions_refuse_too():
    q, k, v = (torch.zeros(shape, device="meta") for shape in (Q, K, (2, 16, 2, 8)))
    with pytest.raises(RuntimeError, match="^v: expected shape"):
        flash_attn.flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match="^value: expected shape"):
        tt.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True)
