# SPDX-License-Identifier: Apache-2.0
"""The cases of test_torch_distributed.py: `python dtensor_processes.py FOLDER` forks four processes, which form meshes
of gloo on the CPU, and writes what each case raised into FOLDER/RANK.json."""
import json
import pathlib
import sys
import traceback
import warnings

import torch
import torch.distributed
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import processes
import tessera.torch as tt
import torch_reference as reference
from tessera import flash_attn

PROCESSES = 4
BATCH, HEADS, GATHERED = "batch", "heads", None


def tensors(heads_first=False, **sizes):
    """q, k, v without requires_grad."""
    found = [t.detach() for t in reference.inputs(**{**dict(batch=4, len_q=9, len_kv=13, heads_q=8, heads_kv=4,
                                                            head_dim=16), **sizes})]
    return [t.transpose(1, 2).contiguous() for t in found] if heads_first else found


def sharded(tensor, mesh, places, gradients=True):
    return distribute_tensor(tensor, mesh, places).requires_grad_(gradients and tensor.is_floating_point())


def compare(function, plain, places, wanted, meshes, others=()):
    """function(*tensors) of DTensors has the bits of one process in its results and in all gradients.

    places: the placements of each tensor. wanted: those of each result. others: gradients whose sums cross processes,
    by index, which are compared to rounding."""
    mesh = meshes[len(places[0])]
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in plain]
    parts = [sharded(t, mesh, p) for t, p in zip(plain, places)]
    want, got = function(*leaves), function(*parts)
    want, got = (r if isinstance(r, tuple) else (r,) for r in (want, got))
    for w, g, placements in zip(want, got, wanted):
        assert list(g.placements) == list(placements), f"expected {placements}, got {g.placements}"
        assert g.shape == w.shape and torch.equal(g.full_tensor(), w), f"result: {(g.full_tensor() - w).abs().max()}"
    gradients = [torch.randn(w.shape, generator=torch.Generator().manual_seed(5)) for w in want]
    torch.autograd.backward(want, gradients)
    torch.autograd.backward(got, [distribute_tensor(d, mesh, g.placements) for d, g in zip(gradients, got)])
    for index, (leaf, part) in enumerate(zip(leaves, parts)):
        if leaf.grad is None:
            continue
        whole = part.grad.full_tensor()
        if index in others:
            reference.expect_close(whole, leaf.grad.double(), 1e-6, f"gradient {index}")
        else:
            assert torch.equal(whole, leaf.grad), f"gradient {index}: {(whole - leaf.grad).abs().max()}"
    for part, p, leaf in zip(parts[:3], places, leaves):  # q, k and v keep their placements
        if Partial() not in p and leaf.grad is not None:
            assert list(part.grad.placements) == list(p), f"expected {p}, got {part.grad.placements}"


def attention(layout, **options):
    return lambda q, k, v: tt.attention(q, k, v, layout=layout, return_lse=True, causal="bottom-right", **options)


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def batch_and_heads(meshes):
    for layout, heads in (("bshd", 2), ("bhsd", 1)):
        plain = tensors(layout == "bhsd")
        for places, lse in (([Shard(0)], [Shard(0)]), ([Shard(heads)], [Shard(1)]),
                            ([Shard(0), Shard(heads)], [Shard(0), Shard(1)]),
                            ([Shard(heads), Replicate()], [Shard(1), Replicate()]),
                            ([Shard(heads), Shard(heads)], [Shard(1), Shard(1)]),
                            ([Replicate()], [Replicate()])):
            compare(attention(layout), plain, [places] * 3, [places, lse], meshes)


@case
def parts_of_different_sizes(meshes):
    compare(attention("bshd"), tensors(batch=3), [[Shard(0)]] * 3, [[Shard(0)]] * 2, meshes)
    compare(attention("bhsd"), tensors(True, heads_q=6, heads_kv=6), [[Shard(1)]] * 3, [[Shard(1)]] * 2, meshes)


@case
def heads_of_k_that_the_parts_do_not_divide(meshes):
    for heads_q, heads_kv in ((8, 2), (12, 6), (4, 1)):
        compare(attention("bshd"), tensors(heads_q=heads_q, heads_kv=heads_kv), [[Shard(2)]] * 3,
                [[Replicate()]] * 2, meshes)
    both = [Shard(2), Shard(2)]  # two parts divide the 6 heads of k, four do not
    kept = [Shard(2), Replicate()]
    compare(attention("bshd"), tensors(heads_q=12, heads_kv=6), [both] * 3, [kept, [Shard(1), Replicate()]], meshes)


@case
def all_else_is_gathered(meshes):
    for places in ([Shard(1)], [Shard(3)]):
        compare(attention("bshd"), tensors(len_q=12, len_kv=12), [places] * 3, [[Replicate()]] * 2, meshes)
    compare(attention("bshd"), tensors(), [[Shard(0)], [Replicate()], [Shard(1)]], [[Shard(0)]] * 2, meshes)
    q, k, v = (sharded(t, meshes[1], [Shard(0)], False) for t in tensors())
    summed = k.redistribute(placements=[Replicate()]).to_local() / PROCESSES
    from torch.distributed.tensor import DTensor
    partial = DTensor.from_local(summed, meshes[1], [Partial()])
    assert torch.equal(tt.attention(q, partial, v).full_tensor(), tt.attention(*tensors()))


@case
def slopes_and_biases(meshes):
    plain = tensors()
    slopes, of_members, bias = torch.rand(8), torch.rand(4, 8), torch.randn(4, 8, 9, 13)
    both = [Shard(0), Shard(2)]
    for more, places in ((slopes, [Replicate(), Shard(0)]), (of_members, [Shard(0), Shard(1)])):
        with torch.no_grad():
            want = tt.attention(*plain, alibi_slopes=more)
            got = tt.attention(*(sharded(t, meshes[2], both, False) for t in plain),
                               alibi_slopes=sharded(more, meshes[2], places, False))
        assert list(got.placements) == both and torch.equal(got.full_tensor(), want)

    def function(q, k, v, bias):
        return tt.attention(q, k, v, bias=bias)
    compare(function, [*plain, bias], [both] * 3 + [[Shard(0), Shard(1)]], [both], meshes)
    compare(function, [*plain, bias[:1]], [both] * 3 + [[Replicate(), Shard(1)]], [both], meshes, others=(3,))
    compare(function, [*plain, bias[:, :1]], [both] * 3 + [[Shard(0), Replicate()]], [both], meshes, others=(3,))


@case
def masks(meshes):
    plain, both, of_both = tensors(), [Shard(0), Shard(2)], [Shard(0), Shard(1)]

    def function(q, k, v, mask, bias=None):
        return tt.attention(q, k, v, mask=mask, bias=bias, return_lse=True)
    for mask, places in ((torch.rand(4, 1, 9, 13) > 0.3, [Shard(0), Replicate()]),
                         (torch.rand(8, 1, 13) > 0.3, [Replicate(), Shard(0)])):
        compare(function, [*plain, mask], [both] * 3 + [places], [both, of_both], meshes)
        bias = torch.randn(4, 8, 9, 13)
        compare(function, [*plain, mask, bias], [both] * 3 + [places, of_both], [both, of_both], meshes)
    parts = [sharded(t, meshes[2], both) for t in plain]
    try:
        function(*parts, mask)
    except ValueError as error:
        assert str(error) == "mask: expected a DTensor, as q is, got a Tensor", error
    else:
        raise AssertionError("a mask that is no DTensor was taken")


@case
def ragged(meshes):
    q, k, v = (t.flatten(0, 1) for t in tensors())
    lengths = [torch.tensor([0, 5, 18, total], dtype=torch.int32) for total in (36, 52)]

    def function(q, k, v, *lengths):
        return tt.varlen_attention(q, k, v, *lengths, causal="bottom-right", return_lse=True)
    compare(function, [q, k, v, *lengths], [[Shard(1)]] * 3 + [[Replicate()]] * 2, [[Shard(1)], [Shard(0)]], meshes)
    compare(function, [q, k, v, *lengths], [[Shard(0)]] * 3 + [[Replicate()]] * 2, [[Replicate()]] * 2, meshes)


@case
def the_other_functions(meshes):
    plain = tensors(True)
    both = [Shard(0), Shard(1)]

    def sdpa(q, k, v, *mask):
        return tt.scaled_dot_product_attention(q, k, v, *mask, enable_gqa=True)
    compare(sdpa, plain, [both] * 3, [both], meshes)
    compare(sdpa, [*plain, torch.rand(4, 1, 9, 13) > 0.5], [both] * 3 + [[Shard(0), Replicate()]], [both], meshes)

    def by_math(q, k, v):
        return tt.attention(q, k, v, layout="bhsd", math=True, return_lse=True)
    compare(by_math, tensors(True, heads_q=4), [[Shard(1)]] * 3, [[Shard(1)]] * 2, meshes)

    def weights(q, k, v):
        return tt.attention_weights(q, k, layout="bhsd")
    compare(weights, plain, [both] * 3, [both], meshes)
    rows = [Shard(0), Shard(2)]
    compare(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True), tensors(), [rows] * 3, [rows], meshes)


@case
def a_drawn_seed_is_one_for_all(meshes):
    torch.manual_seed(torch.distributed.get_rank())  # each process would draw another one
    leaves = [sharded(t, meshes[1], [Shard(0)]) for t in tensors()]
    o = tt.attention(*leaves, dropout_p=0.5)
    everywhere = [torch.empty_like(o.to_local()) for _ in range(PROCESSES)]
    assert list(o.placements) == [Replicate()]
    torch.distributed.all_gather(everywhere, o.to_local().detach())
    assert all(torch.equal(e, everywhere[0]) for e in everywhere)
    seeded = tt.attention(*leaves, dropout_p=0.5, seed=7).full_tensor()
    assert torch.equal(seeded, tt.attention(*tensors(), dropout_p=0.5, seed=7))


@case
def refusals_name_the_argument(meshes):
    q, k, v = (sharded(t, meshes[1], [Shard(0)]) for t in tensors())
    other = sharded(tensors()[1], meshes[2], [Shard(0), Replicate()])
    for call, text in ((lambda: tt.attention(q, tensors()[1], v), "k: expected a DTensor, as q is, got a Tensor"),
                       (lambda: tt.attention(q, other, v), "k: expected a DTensor on the mesh of q"),
                       (lambda: tt.attention(q, k, v, bias=torch.zeros(1, 1, 9, 13)), "bias: expected a DTensor"),
                       (lambda: tt.attention(q, k, v[:, :-1]), "v: expected shape"),
                       (lambda: tt.scaled_dot_product_attention(tensors(True)[0], *(t.transpose(1, 2) for t in (k, v)),
                                                                enable_gqa=True), "query: expected a DTensor")):
        try:
            call()
        except ValueError as error:
            assert str(error).startswith(text), error
        else:
            raise AssertionError(f"expected an error: {text}")


@case
def compiled(meshes):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q, k, v):
        return tt.attention(q, k, v, causal="bottom-right")
    compare(function, tensors(), [[Shard(2)]] * 3, [[Shard(2)]], meshes)


@case
def the_provider(meshes):
    from torch.nn import attention
    if not hasattr(attention, "register_flash_attention_impl"):
        return
    from tessera.torch import _provider
    shapes, original = [], _provider._operators.forward
    _provider._operators.forward = lambda q, *rest: shapes.append(tuple(q.shape)) or original(q, *rest)
    tt.register_provider()
    attention.activate_flash_attention_impl("tessera")
    try:
        both = [Shard(0), Shard(1)]
        compare(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), tensors(True, heads_q=4), [both] * 3,
                [both], meshes)
    finally:
        attention.restore_flash_attention_impl()
        _provider._operators.forward = original
    assert (2, 2, 9, 16) in shapes, shapes  # each process computed its part


def work(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                                         world_size=PROCESSES)
    meshes = {1: init_device_mesh("cpu", (PROCESSES,)), 2: init_device_mesh("cpu", (2, 2))}
    outcomes = {}
    for name, function in CASES.items():
        torch.manual_seed(0)
        try:
            function(meshes)
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
            pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
            break  # the processes no longer agree on what they send
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        CASES = {name: CASES[name] for name in sys.argv[2:]}
    processes.fork_all(PROCESSES, lambda rank: work(rank, sys.argv[1]))
