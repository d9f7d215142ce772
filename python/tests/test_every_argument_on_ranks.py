# SPDX-License-Identifier: Apache-2.0
"""The tables of arguments for context parallelism and tessera.ring_flash_attn: one process of gloo, a group
of one. test_context_parallel.py has several processes."""
import inspect

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch.distributed as dist  # noqa: E402

import argument_tables as tables  # noqa: E402
import processes  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from argument_tables import SINKS, As, Function, Gives, Refused, Same, flat  # noqa: E402
from tessera import ring_flash_attn as ring  # noqa: E402

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
LEN, HEADS, DIM = 12, 4, 8
Q, K, V = (reference.random((2, LEN, heads, DIM), seed) for seed, heads in enumerate((HEADS, 2, 2)))
K4, V4 = (t.repeat_interleave(2, 2) for t in (K, V))  # heads of qkv are as many
MEANT = dict(q=Q, k=K, v=V)


@pytest.fixture(scope="module", autouse=True)
def group_of_one():
    with processes.group_of_one():
        yield


def means(**options):
    return dict(MEANT, **options)


ORDER = torch.randperm(LEN, generator=torch.Generator().manual_seed(1))
IN_ORDER = {n: t[:, ORDER] for n, t in MEANT.items()}
OFFSETS = torch.tensor([0, 5, 12], dtype=torch.int32)


def of_documents(causal=None, q=Q, k=K, v=V):
    """O [len, heads, dim] of documents cut by OFFSETS, of the first member of the batch."""
    return torch.cat([reference.attention(q[:1, a:b], k[:1, a:b], v[:1, a:b], causal=causal)[0][0]
                      for a, b in zip(OFFSETS.tolist(), OFFSETS.tolist()[1:])])


def close(expected):
    def check(result, base):
        o = result[0] if isinstance(result, (tuple, list)) else result
        reference.expect_close(o, expected() if callable(expected) else expected, 1e-5, "o")
    return check


def lse_is(result, base):
    _, want = reference.attention(Q, K, V)
    reference.expect_lse(result[1], want)


SCORES = dict(
    causal=[As(True, means(causal="bottom-right")), As("top-left", means(causal="top-left")), Refused(1, "^causal: "),
            Refused("left", "^causal: ")],
    window=[As((3, 1), means(window=(3, 1))), Refused(4, "^window: "), Refused((1, 2, 3), "^window: ")],
    scale=[As(0.3, means(scale=0.3)), Refused("x", "^scale: ")],
    softcap=[As(0.5, means(softcap=0.5)), Refused(-1.0, "^softcap: "), Refused("x", "^softcap: ")],
    sinks=[As(SINKS, means(sinks=SINKS)), Refused(SINKS[:2], "^sinks: ")])
ONE = {n: t[:1] for n, t in MEANT.items()}
FUNCTIONS = {"context_parallel_attention": Function(tt.context_parallel_attention, MEANT, dict(
    SCORES, q=[As(2 * Q, means(q=2 * Q)), Refused(Q[:, :5], "^(q|k): "), Refused(3, "^q: ")], k=As(2 * K, means(k=2 * K)),
    v=As(2 * V, means(v=2 * V)), group=[Same(None), Refused("gloo", "^group: "), Refused(3, "^group: ")],
    order=[Gives(ORDER, close(lambda: reference.attention(Q, K, V, causal="bottom-right")[0][:, ORDER]),
                 dict(IN_ORDER, causal=True)), As(ORDER, None, dict(causal=True)), Same("contiguous"),
           Refused("ring", "^order: "), Refused(ORDER[:3], "^order: "), Refused(torch.zeros(LEN, dtype=torch.int64), "^order: ")],
    cu_seqlens=[Gives(OFFSETS, close(lambda: of_documents()[None]), ONE),
                Gives(OFFSETS, close(lambda: of_documents("bottom-right")[None]), dict(ONE, causal=True)),
                Refused(OFFSETS, "^(cu_seqlens|q): "), Refused(OFFSETS.flip(0), "^cu_seqlens: ", ONE),
                Refused(OFFSETS.float(), "^cu_seqlens: ", ONE)],
    return_lse=Gives(True, lse_is),
    gradient_blocks=[Same(2), Refused(0, "^gradient_blocks: "), Refused(5, "^gradient_blocks: ")],
    steps=[Same(2), Refused(0, "^steps: "), Refused(1.5, "^steps: ")],
    kernel=[As("reference", {**MEANT}), Refused("cuda.fa9", "^kernel: ")],
    timeout=[Same(5.0), Refused(0, "^timeout: "), Refused("x", "^timeout: ")], check=Same(True)))}


# Shards, contexts and plans.


def with_context(mesh=None, buffers=(), buffer_seq_dims=(), no_restore_buffers=None, inside=None):
    """`inside()` in context_parallel(), on copies of the buffers, and the buffers afterwards."""
    mesh = dist.group.WORLD if mesh is None else mesh
    buffers = [b.clone() if isinstance(b, torch.Tensor) else b for b in buffers]
    kept = None if no_restore_buffers is None else {buffers[i] if isinstance(i, int) else i for i in no_restore_buffers}
    with tt.context_parallel(mesh, buffers=buffers, buffer_seq_dims=list(buffer_seq_dims), no_restore_buffers=kept):
        memory = [b.data_ptr() for b in buffers]
        result = (inside or (lambda: None))()
    return result, [b.data_ptr() in memory for b in buffers]


ROWS = torch.arange(LEN * 3).reshape(LEN, 3)
LAYER = reference.random((1, 4, LEN, DIM), 5)
SHARD = dict(group=[Same(None), Refused("gloo", "^group: ")],
             order=[Gives(ORDER, lambda r, base: torch.equal(r, base[ORDER]) or pytest.fail("order")),
                    Refused("ring", "^order: "), Refused(ORDER[:3], "^order: ")])
DIMS = [Gives(1, lambda r, base: torch.equal(r, base) or pytest.fail("dim"), dict(order=torch.tensor([0, 1, 2]), dim=0)),
        Refused(2, "^dim: "), Refused(0.5, "^dim: ")]
PLAN = dict(total=64, ranks=4, heads_kv=2, head_dim=8)


def plan_differs(*fields):
    """A check that just these fields, or some of all, differ."""
    def check(result, base):
        differ = {n for n, a, b in zip(result._fields, result, base) if a != b}
        assert differ >= set(fields) and differ, differ
    return check


DOCUMENTS = torch.tensor([0, 40, 48, 64])
FUNCTIONS.update({
    "sequence_positions": Function(tt.sequence_positions, dict(total=LEN), dict(
        SHARD, total=[Gives(6, lambda r, base: torch.equal(r, base[:6]) or pytest.fail("total")), Refused(-1, "^total: "),
                      Refused(7, "^total: ")])),
    "shard_sequence": Function(tt.shard_sequence, dict(tensor=ROWS, dim=0), dict(
        SHARD, tensor=[Gives(2 * ROWS, lambda r, base: torch.equal(r, 2 * base) or pytest.fail("tensor")),
                       Refused([1, 2], "^tensor: ")], dim=DIMS[1:] + [Gives(
                           1, lambda r, base: torch.equal(r, ROWS[:, [2, 0, 1, 3][:3]]) or pytest.fail("dim"),
                           dict(order=torch.tensor([2, 0, 1])))])),
    "unshard_sequence": Function(tt.unshard_sequence, dict(tensor=ROWS, dim=0), dict(
        SHARD, order=[Gives(ORDER, lambda r, base: torch.equal(r[ORDER], base) or pytest.fail("order")),
                      Refused("ring", "^order: "), Refused(ORDER[:3], "^order: ")],
        tensor=[Gives(2 * ROWS, lambda r, base: torch.equal(r, 2 * base) or pytest.fail("tensor")),
                Refused([1, 2], "^tensor: ")],
        dim=DIMS[1:] + [Gives(1, lambda r, base: torch.equal(r[:, [2, 0, 1]], ROWS) or pytest.fail("dim"),
                              dict(order=torch.tensor([2, 0, 1])))])),
    "context_parallel": Function(with_context, dict(buffers=[ROWS], buffer_seq_dims=[0]), dict(
        mesh=Refused("gloo", "^group: "),
        buffers=[Refused([ROWS] * 2, "^buffer_seq_dims: "), Refused([[1]], "^buffers"), Refused([ROWS.float().requires_grad_()],
                                                                                            "^buffers: ")],
        buffer_seq_dims=[Refused([0, 1], "^buffer_seq_dims: "), Refused([2], "^dim: ")],
        no_restore_buffers=[Gives([0], lambda r, base: (r[1], base[1]) == ([True], [False]) or pytest.fail("restored")),
                            Refused([ROWS], "^no_restore_buffers: ")]), of=tt.context_parallel),
    "context_parallel_unshard": Function(tt.context_parallel_unshard, dict(mesh=None, buffers=[ROWS], seq_dims=[0]), dict(
        mesh=Refused("gloo", "^group: "),
        buffers=[Gives([2 * ROWS], lambda r, base: torch.equal(r[0], 2 * ROWS) or pytest.fail("buffers")),
                 Refused([ROWS] * 2, "^seq_dims: ")], seq_dims=[Refused([0, 1], "^seq_dims: "), Refused([2], "^dim: ")],
        load_balancer=Refused(object(), "^load_balancer: "))),
    "context_parallel_plan": Function(tt.context_parallel_plan, PLAN, dict(
        total=[Gives(128, plan_differs("pairs", "whole")), Refused(63, "^total: ")],
        ranks=[Gives(2, plan_differs("pairs")), Refused(0, "^ranks: ")], heads_kv=[Gives(4, plan_differs("bytes_forward")),
                                                                               Refused(0, "^heads_kv: ")],
        head_dim=[Gives(16, plan_differs("bytes_forward")), Refused(0, "^head_dim: ")],
        rank=[Gives(3, plan_differs("pairs"), dict(order="contiguous", rank=0)), Refused(4, "^rank: ")],
        batch=[Gives(2, plan_differs("pairs", "whole")), Refused(2, "^batch: ", dict(cu_seqlens=DOCUMENTS))],
        head_dim_v=[Gives(16, plan_differs("bytes_forward")), Refused(0, "^head_dim_v: ")],
        dtype=Gives(torch.float32, plan_differs("bytes_forward")),
        order=[Gives("contiguous", plan_differs("busiest")), Refused("ring", "^order: ")],
        causal=Gives(False, plan_differs("pairs")), window=[Gives((3, 0), plan_differs("pairs")), Refused(4, "^window: ")],
        cu_seqlens=[Gives(DOCUMENTS, plan_differs("pairs")), Refused([1, 2], "^cu_seqlens: ")],
        gradient_blocks=[Gives(16, plan_differs()), Refused(0, "^gradient_blocks: ")],
        steps=[Gives(2, plan_differs("steps")), Refused(0, "^steps: ")],
        copies=Gives(True, plan_differs("by")), heads_q=Refused(3, "^heads_q: "), device=Refused("x", "^device: "))),
    "balance_documents": Function(tt.balance_documents, dict(cu_seqlens=DOCUMENTS, ranks=4), dict(
        cu_seqlens=[As(torch.tensor([0, 8, 64]), None), Refused([1, 2], "^cu_seqlens: ")],
        ranks=[As(2, None), Refused(3, "^ranks: ")], causal=As(False, None), chunks=[As(1, None), Refused(0, "^chunks: ")],
        total=[As(72, None), Refused(10, "^cu_seqlens: ")])),
})


# ring_flash_attn


def ring_table(name, of_base, packed):
    """The table of a function, of which `packed` is "", "kv" or "qkv"."""
    ragged = "varlen" in name
    shape = flat if ragged else (lambda t: t)
    of_k, of_v = (K, V) if packed != "qkv" else (K4, V4)
    tensors = dict(q=Q, k=of_k, v=of_v)

    def call(**changed):
        q, k, v = ({**tensors, **changed}[n] for n in "qkv")
        if packed == "qkv":
            return dict(qkv=shape(torch.stack((q, k, v), 2)))
        return dict(q=shape(q), **(dict(kv=shape(torch.stack((k, v), 2))) if packed else dict(k=shape(k), v=shape(v))))

    def meaning(**options):
        return dict(tensors, **options)
    table = dict(
        dropout_p=Refused(0.1, "^dropout_p: "), softmax_scale=[As(0.3, meaning(scale=0.3)), Refused("x", "^softmax_scale: "),
                                                               Refused(float("inf"), "^softmax_scale: ")],
        causal=As(True, meaning(causal="bottom-right")),
        window_size=[As((3, 1), meaning(window=(3, 1))), Refused(4, "^window_size: "), Refused((2.5, 1), "^window_size: ")],
        alibi_slopes=Refused(SINKS, "^alibi_slopes: "), deterministic=Same(True), group=[Same(None), Refused(3, "^group: ")],
        return_attn_probs=Gives(True, lambda r, base: (len(r) == 3 and r[2] is None or pytest.fail("results"),
                                                       reference.expect_lse(
            r[1] if r[1].dim() == 3 else r[1].unflatten(1, (2, LEN)).transpose(0, 1),
            reference.attention(**tensors)[1]))))
    for n in "qkv":
        changed = {n: 2 * tensors[n]}
        argument = n if n in call() else "kv" if packed == "kv" else "qkv"
        table.setdefault(argument, []).append(As(call(**changed)[argument], meaning(**changed)))
    for n in ("kv", "qkv"):
        if n in call():
            table[n] += [Refused(call()[n][..., :1, :, :], f"^{n}: expected shape"), Refused(3, f"^{n}: ")]
    return Function(of_base, dict(call()), table, tables.unflat if ragged else lambda o: o)


CUT = torch.tensor([0, LEN, 2 * LEN], dtype=torch.int32)  # the batch as documents
SHORT = torch.tensor([0, 6, 2 * LEN], dtype=torch.int32)
PREPARED = ring.llama3_flash_attn_prepare_cu_seqlens
*LENGTHS, KEYS = PREPARED(CUT, False, 0, 1)
LLAMA = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), LENGTHS), local_k_slice=KEYS,
             heads_k_stride=1)
*SHORT_LENGTHS, _ = PREPARED(SHORT, False, 0, 1)

for _base in ("ring_flash_attn", "zigzag_ring_flash_attn", "ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen",
              "llama3_flash_attn_varlen"):
    for _packed in ("", "kv", "qkv"):
        _name = f"{_base}_{_packed}packed_func" if _packed else f"{_base}_func"
        _function = ring_table(_name, getattr(ring, _name), _packed)
        if _base.startswith("llama3"):
            _function.base.update(LLAMA)
            _function.table.update(
                cu_seqlens_q=[Gives(SHORT_LENGTHS[0], lambda r, base: r.allclose(base) and pytest.fail("no change"),
                                    dict(cu_seqlens_k=SHORT_LENGTHS[1], max_seqlen_q=18, max_seqlen_k=18)),
                              Refused(torch.tensor([0, 7, 24]), "^cu_seqlens_q: ")],
                cu_seqlens_k=[Refused(SHORT, "^cu_seqlens_k: "), Refused(SHORT[:2], "^cu_seqlens_k: ")],
                max_seqlen_q=[Same(LEN + 1), Refused(LEN - 1, "^max_seqlen_q: ")],
                max_seqlen_k=[Same(LEN + 1), Refused(LEN - 1, "^max_seqlen_k: ")],
                local_k_slice=[Refused(slice(0, LEN), "^local_k_slice: "), Refused(3, "^local_k_slice: ")],
                heads_k_stride=Same(2))
        elif "varlen" in _base:
            _function.base.update(cu_seqlens=CUT, max_seqlen=LEN)
            _function.table.update(
                cu_seqlens=[As(SHORT, None, dict(max_seqlen=18)), Refused(SHORT[:2], "^cu_seqlens: "),
                            Refused(SHORT.flip(0), "^cu_seqlens: ")],
                max_seqlen=[Same(LEN + 1), Refused(LEN - 1, "^max_seqlen: "), Refused(None, "^max_seqlen: ")])
        FUNCTIONS[_name] = _function
FUNCTIONS["llama3_flash_attn_prepare_cu_seqlens"] = Function(PREPARED, dict(
    cu_seqlens=SHORT, causal=True, rank=0, world_size=2), dict(
        cu_seqlens=[Gives(CUT, lambda r, base: r[0].tolist() == [0, 12] and r[4] == slice(0, 12) or pytest.fail("cu_seqlens")),
                    Refused([1, 2], "^cu_seqlens: ")],
        causal=Gives(False, lambda r, base: (base[1].tolist(), r[1].tolist()) == ([0, 6, 12], [0, 6, 24])
                     and (base[4], r[4]) == (slice(0, 12), slice(0, 24)) or pytest.fail("causal")),
        rank=[Gives(1, lambda r, base: (r[0].tolist(), r[1].tolist(), r[4]) == ([0, 12], [0, 18], slice(6, 24))
                    or pytest.fail("rank")), Refused(2, "^world_size: ")],
        world_size=[Gives(1, lambda r, base: r[0].tolist() == SHORT.tolist() or pytest.fail("world_size")),
                    Refused(5, "^world_size: ")]))


def names_of(of):
    """The names of a function's arguments; of a packed one, those of the function that it calls."""
    found = inspect.signature(of).parameters
    names = [n for n, p in found.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(names) < len(found):
        whole = getattr(ring, of.__name__.replace("_qkvpacked", "").replace("_kvpacked", ""))
        names += [n for n in inspect.signature(whole).parameters
                  if n not in ("k", "v") and (n != "q" or "q" in found)]
    return set(names)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_stands_in_a_table(name):
    function = FUNCTIONS[name]
    of = function.of or function.call
    tables.expect_table(function, names_of(of), (of.__doc__ or "") + (inspect.getmodule(of).__doc__ or ""),
                        ("heads_k_stride",))


CASES, IDS = tables.cases_of(FUNCTIONS)


@pytest.mark.parametrize("name,argument,entry", CASES, ids=IDS)
def test_an_argument_is_honoured_or_refused(name, argument, entry):
    tables.expect_entry(FUNCTIONS[name], argument, entry)


INSIDE = [As(dict(is_causal=True), dict(causal="top-left")), As(dict(scale=0.3), dict(scale=0.3)),
          As(dict(enable_gqa=True), {}), Refused(dict(attn_mask=torch.ones(LEN, LEN).bool()), "^attn_mask: "),
          Refused(dict(dropout_p=0.1), "^dropout_p: "), Refused({}, "^key: expected 4 heads")]


@pytest.mark.parametrize("entry", INSIDE, ids=[str(list(e.value)) for e in INSIDE])
def test_arguments_of_sdpa_inside_of_a_context(entry):
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))

    def inside():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **{"enable_gqa": bool(entry.value), **entry.value})
    if isinstance(entry, Refused):
        with pytest.raises(ValueError, match=entry.words):
            with_context(inside=inside)
        return
    o, _ = with_context(inside=inside)
    reference.expect_close(o.transpose(1, 2), reference.attention(Q, K, V, **entry.means)[0], 1e-5, "o")


MODULE = torch.nn.Identity()
LAYERS = {"attention_mask": [Refused(torch.ones(1), "^attention_mask: ")], "dropout": [Refused(0.1, "^dropout: ")],
          "scaling": [As(0.3, dict(scale=0.3))], "softcap": [As(0.5, dict(softcap=0.5))],
          "is_causal": [As(False, {}), As(True, dict(causal="top-left"))], "s_aux": [As(SINKS, dict(sinks=SINKS))],
          "sinks": [As(SINKS, dict(sinks=SINKS)), Refused(SINKS, "^sinks: ", dict(s_aux=SINKS))],
          "sliding_window": [As(4, dict(window=(3, 0)), dict(is_causal=True)), Refused(4, "^sliding_window: ")],
          "head_mask": [Refused(SINKS, "^head_mask: ")], "position_bias": [Refused(torch.zeros(1, 4, LEN, LEN), "^position_bias: ")],
          "cache": [Refused(object(), "^cache: ")], "cu_seq_lens_k": [Refused(OFFSETS, "^cu_seq_lens_k: "),
                                                                     Refused(OFFSETS, "^cu_seq_lens_k: ", dict(cu_seq_lens_q=OFFSETS[:2]))]}


@pytest.mark.parametrize("argument,entry", [(n, e) for n, entries in LAYERS.items() for e in entries],
                         ids=[f"{n}-{type(e).__name__}" for n, entries in LAYERS.items() for e in entries])
def test_arguments_of_a_layer_of_transformers(argument, entry):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tessera._context_parallel_layer import Layer
    call = dict(module=MODULE, query=Q.transpose(1, 2), key=K.transpose(1, 2), value=V.transpose(1, 2), attention_mask=None,
                is_causal=False)
    call = {**call, **entry.more, argument: entry.value}
    if isinstance(entry, Refused):
        with pytest.raises(ValueError, match=entry.words):
            Layer(None, "zigzag")(**call)
        return
    o, _ = Layer(None, "zigzag")(**call)
    reference.expect_close(o, reference.attention(Q, K, V, **entry.means)[0], 1e-5, argument)
