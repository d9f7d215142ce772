# SPDX-License-Identifier: Apache-2.0
"""The tables of arguments for tessera's own functions beside attention(): its backward, plan() and
predict(), merge(), append_kv() and decode_block()."""
import inspect

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import argument_tables as tables  # noqa: E402
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import test_decode_block as block  # noqa: E402
import torch_reference as reference  # noqa: E402
from argument_tables import (BIAS, CU_K, CU_Q, D_O, HEADS, HIDDEN, K, LEN_KV, LEN_Q, Q, SEEN, SINKS,  # noqa: E402
                             SLOPES, V, As, Function, Gives, Refused, Same, flat, turned)
from tessera._attention import SCORES  # noqa: E402

NUMPY, RNG = tables.NUMPY, numpy.random.default_rng(3)
FLAT_CALL = {n: flat(t).numpy() for n, t in zip("qkv", (Q, K, V))}
HEADS_FIRST = {n: turned(t).numpy() for n, t in zip("qkv", (Q, K, V))}
OFFSETS = dict(cu_seqlens_q=CU_Q.numpy(), cu_seqlens_kv=CU_K.numpy())


# attention_backward


def forward(**options):
    """The arguments of attention_backward() that come from attention() with these options."""
    o, lse = tessera.attention(**{**NUMPY, **options}, return_lse=True)
    return {**options, "o": o, "lse": lse}


def gradients(**means):
    """A check that (dq, dk, dv) are those of fp64, or of tessera.torch with `twin`."""
    twin = means.pop("twin", None)

    def check(result, base):
        leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
        o = tt.attention(*leaves, **twin) if twin else reference.attention(*leaves, **means)[0]
        for got, want, plain in zip(result, torch.autograd.grad(o, leaves, D_O.to(o.dtype)), base):
            reference.expect_close(torch.from_numpy(got).reshape(want.shape), want, 1e-5, "gradient")
            assert not (means or twin) or not numpy.allclose(got.reshape(plain.shape), plain, atol=1e-3)
    return check


def honoured(name, value, **means):
    """A row whose o and lse were computed with the argument too."""
    more = forward(**{name: value})
    del more[name]
    return Gives(value, gradients(**means), more)


def numbers(tensor):
    return tensor.numpy()


GRADIENTS = tuple(numpy.empty_like(NUMPY[n]) for n in "qkv")
DROPPED = forward(dropout_p=0.5, seed=1)
BACKWARD = Function(tessera.attention_backward, dict(NUMPY, do=numbers(D_O), **forward()), dict(
    do=Gives(numbers(2 * D_O), lambda r, base: numpy.allclose(r[0], 2 * base[0]) or pytest.fail("do")),
    q=[Gives(NUMPY["q"], gradients()), As(2 * NUMPY["q"], None), Refused(NUMPY["q"][0], "^q: ")],
    k=As(2 * NUMPY["k"], None), v=As(2 * NUMPY["v"], None), o=As(2 * forward()["o"], None),
    lse=As(forward()["lse"] + 1, None), dlse=As(numbers(reference.random((2, HEADS, LEN_Q), 8)), None),
    o_residual=Refused(NUMPY["q"], "^o_residual: "), stream=Refused(1, "^stream: expected None"),
    bias_gradient=[Gives(True, lambda r, base: len(r) == 4 and r[3].shape == BIAS.shape or pytest.fail("dbias"),
                         forward(bias=numbers(BIAS))), Refused(True, "^bias_gradient: ")],
    sinks_gradient=[Gives(True, lambda r, base: len(r) == 4 and r[3].shape == SINKS.shape or pytest.fail("dsinks"),
                          forward(sinks=numbers(SINKS))), Refused(True, "^sinks_gradient: ")],
    out=[Gives(GRADIENTS, lambda r, base: all(a is b and (b == c).all() for a, b, c in zip(r, GRADIENTS, base))
               or pytest.fail("out")), Refused(GRADIENTS[:2], "^out: ")],
    causal=[honoured("causal", "bottom-right", causal="bottom-right"), honoured("causal", "top-left", causal="top-left"),
            Refused(True, "^causal: ")],
    window=[honoured("window", (3, 1), window=(3, 1)), Refused(4, "^window: ")],
    scale=[honoured("scale", 0.3, scale=0.3), Refused("x", "^scale: ")],
    softcap=[honoured("softcap", 0.5, softcap=0.5), Refused(-1.0, "^softcap: ")],
    alibi_slopes=[honoured("alibi_slopes", numbers(SLOPES), alibi_slopes=SLOPES),
                  Refused(numbers(SLOPES[:2]), "^alibi_slopes: ")],
    bias=[honoured("bias", numbers(BIAS), bias=BIAS), Refused(numbers(BIAS[..., :3]), "^bias: ")],
    mask=[honoured("mask", numbers(SEEN), bias=HIDDEN), Refused(numbers(BIAS), "^mask: expected dtype bool")],
    sinks=[honoured("sinks", numbers(SINKS), sinks=SINKS), Refused(numbers(SINKS[:2]), "^sinks: ")],
    dropout_p=[Gives(0.5, gradients(twin=dict(dropout_p=0.5, seed=1)), dict(DROPPED, dropout_p=0.0)),
               Refused(1.0, "^dropout_p: ")],
    seed=[As(2, None, DROPPED), Refused("x", "^seed: ")],
    cu_seqlens_q=[Gives(OFFSETS["cu_seqlens_q"], gradients(), dict(
        forward(**FLAT_CALL, **OFFSETS), do=numbers(flat(D_O)))), Refused(OFFSETS["cu_seqlens_q"], "^cu_seqlens_kv: ",
                                                                         dict(FLAT_CALL))],
    cu_seqlens_kv=[Gives(OFFSETS["cu_seqlens_kv"], gradients(), dict(
        forward(**FLAT_CALL, **OFFSETS), do=numbers(flat(D_O)))), Refused(OFFSETS["cu_seqlens_kv"], "^cu_seqlens_q: ",
                                                                          dict(FLAT_CALL))],
    max_len_q=[Refused(LEN_Q, "^max_len_q: expected None without cu_seqlens"),
               Refused(3, "len_q|cu_seqlens_q", dict(forward(**FLAT_CALL, **OFFSETS), do=numbers(flat(D_O))))],
    max_len_kv=[Refused(LEN_KV, "^max_len_kv: expected None without cu_seqlens"),
                Refused(3, "len_kv|cu_seqlens_kv", dict(forward(**FLAT_CALL, **OFFSETS), do=numbers(flat(D_O))))],
    layout=[Gives("bhsd", lambda r, base: all((a == b.swapaxes(1, 2)).all() for a, b in zip(r, base))
                  or pytest.fail("layout"), dict(forward(**HEADS_FIRST, layout="bhsd"), do=numbers(turned(D_O)))),
            Refused("sbhd", "^layout: ")],
    deterministic=Same(False), threads=[Same(1), Refused(-1, "^threads: ")],
    kernel=[Gives("reference", gradients()), Refused("cuda.fa3", "^kernel: "), Refused(3, "^kernel: ")]))


# plan and predict


def without(name):
    """A check that a result differs from the one without the argument, by its text."""
    return lambda r, base: str(r) != str(base) or pytest.fail(f"{name} changes nothing")


Q_SPEC, K_SPEC = tessera.Spec((2, 1024, 16, 128)), tessera.Spec((2, 2048, 8, 128))
SPECS = dict(q=Q_SPEC, k=K_SPEC, v=K_SPEC)
FLAT_SPECS = dict(q=tessera.Spec((2048, 16, 128)), **dict.fromkeys("kv", tessera.Spec((4096, 8, 128))))
SPEC_OFFSETS = dict(cu_seqlens_q=tessera.Spec((3,), "int32"), cu_seqlens_kv=tessera.Spec((3,), "int32"))
RAGGED = dict(FLAT_SPECS, **SPEC_OFFSETS)
OF_16, OF_BIAS = numpy.ones(16, numpy.float32), tessera.Spec((1, 1, 1, 2048))
WRONG = dict(
    q=tessera.Spec((2, 1024, 16, 64)), k=tessera.Spec((2, 2048, 3, 128)), v=tessera.Spec((2, 99, 8, 128)), causal=True,
    window=4, scale="x", softcap=-1.0, alibi_slopes=OF_16[:3], bias=tessera.Spec((1, 1, 1, 3)), sinks=OF_16[:3],
    mask=tessera.Spec((1, 1, 1, 3), "bool"),
    dropout_p=1.0, seed="x", max_len_q=5, max_len_kv=5, layout="sbhd", threads=-1, kernel="cpu.fa9")
OTHER = dict(
    q=tessera.Spec((2, 512, 16, 128)), k=tessera.Spec((2, 2048, 4, 128)), v=tessera.Spec((2, 2048, 8, 64)),
    causal="top-left", window=(100, 0), scale=0.3, softcap=3.0, alibi_slopes=OF_16, bias=OF_BIAS, sinks=OF_16,
    mask=tessera.Spec((1, 1, 1, 2048), "bool"), dropout_p=0.5, threads=1, kernel="cpu.fa1", layout="bhsd")
MORE_WRONG = dict(k=[tessera.Spec((2, 2048, 8, 128), "bfloat16"), tessera.Spec((1, 2048, 8, 128))],
                  v=[tessera.Spec((2, 2048, 4, 128))], bias=[tessera.Spec((1, 1, 1, 2048), "bfloat16")],
                  sinks=[numpy.ones(16)], alibi_slopes=[numpy.ones((3, 16), numpy.float32)])
MORE = dict(k=dict(v=tessera.Spec((2, 2048, 4, 128))), layout=dict(
    q=tessera.Spec((2, 16, 512, 128)), **dict.fromkeys("kv", tessera.Spec((2, 8, 2048, 128)))))


def planned(name, change, **more):
    """Rows of an argument of plan() or predict() that changes its text and is refused with a wrong value."""
    rows = [Gives(change[name], without(name), {**MORE.get(name, {}), **more})] if name in change else []
    of_k = {"k": "^(k|v|heads_kv|heads_q|q): "}.get(name, f"^{name}: ")
    return rows + ([Refused(WRONG[name], "^(k|v|q): " if name in "qv" else of_k)] if name in WRONG else []) + [
        Refused(value, f"^{name}: ") for value in MORE_WRONG.get(name, [])]


def text_of(function):
    def call(**arguments):
        result = function(**arguments)
        return repr(result) if function is tessera.predict else str(result)
    return call


OF_RAGGED = dict(
    cu_seqlens_q=Gives(SPEC_OFFSETS["cu_seqlens_q"], without("cu_seqlens_q"), RAGGED),
    cu_seqlens_kv=[Gives(SPEC_OFFSETS["cu_seqlens_kv"], without("cu_seqlens_kv"), RAGGED),
                   *(Refused(tessera.Spec(*spec), "^cu_seqlens_", RAGGED) for spec in (((4,), "int32"), ((3,), "float32"))),
                   Refused(SPEC_OFFSETS["cu_seqlens_kv"], "^cu_seqlens_q: ", FLAT_SPECS)])


def of_bound(function, name, base):
    """A bound of the lengths of a ragged batch."""
    whole = lambda r, base_: r != text_of(function)(**RAGGED, **base) or pytest.fail(f"{name} changes nothing")  # noqa: E731
    return [Gives(512, whole, RAGGED), Refused(5, f"^{name}: expected None without cu_seqlens")]


def unchanged(value):
    return Gives(value, lambda r, base: r == base or pytest.fail("another plan"))


ON_HOST = dict(machine="xeon-16")
UNTIMED = ("scale", "softcap", "alibi_slopes", "sinks", "bias", "mask")  # the model counts no time for them
FUNCTIONS = {
    "attention_backward": BACKWARD,
    "plan": Function(text_of(tessera.plan), SPECS, dict(
        {name: planned(name, OTHER) for name in OTHER}, **OF_RAGGED, deterministic=unchanged(False),
        seed=[unchanged(3), *planned("seed", {})],
        max_len_q=of_bound(tessera.plan, "max_len_q", {}), max_len_kv=of_bound(tessera.plan, "max_len_kv", {}),
        backward=Gives(True, without("backward")), bias_gradient=[
            Gives(True, without("bias_gradient"), dict(bias=OF_BIAS, backward=True)),
            Refused(True, "^bias_gradient: ")]), of=tessera.plan),
    "predict": Function(text_of(tessera.predict), dict(SPECS, **ON_HOST), dict(
        {name: planned(name, {n: v for n, v in OTHER.items() if n not in UNTIMED})
         for name in OTHER}, **OF_RAGGED, deterministic=unchanged(False), seed=[unchanged(3), *planned("seed", {})],
        max_len_q=of_bound(tessera.predict, "max_len_q", ON_HOST),
        max_len_kv=of_bound(tessera.predict, "max_len_kv", ON_HOST),
        backward=Gives(True, without("backward")),
        machine=[Gives("xeon-16", lambda r, base: r == base), Refused("x", "^machine: "), Refused(3, "^machine: ")],
        schedule=[Gives("fa1", without("schedule")), Refused("x", "^schedule: "), Refused("fa3", "no prediction")]),
        of=tessera.predict)}
for _name in ("scale", "softcap", "alibi_slopes", "sinks"):
    FUNCTIONS["predict"].table[_name].append(unchanged(OTHER[_name]))


# merge


def parts(cut=6, **options):
    found = [tt.attention(Q, K[:, part], V[:, part], return_lse=True, **options)
             for part in (slice(0, cut), slice(cut, LEN_KV))]
    return dict(o1=found[0][0], lse1=found[0][1], o2=found[1][0], lse2=found[1][1])


PARTS = parts()
MERGED = lambda r, base: reference.expect_close(r[0], reference.attention(Q, K, V)[0], 1e-5, "o")  # noqa: E731
FUNCTIONS["merge"] = Function(tessera.merge, PARTS, dict(
    o1=[Gives(PARTS["o1"], MERGED), As(2 * PARTS["o1"], None), Refused(PARTS["o1"][:1], "^lse1: "),
        Refused(PARTS["o1"].numpy(), "^lse1: ")],
    o2=[As(2 * PARTS["o2"], None), Refused(PARTS["o2"][:, :3], "^o2: ")],
    lse1=[As(PARTS["lse1"] + 1, None), Refused(PARTS["lse1"][..., :3], "^lse1: ")],
    lse2=[As(PARTS["lse2"] + 1, None), Refused(PARTS["lse2"].long(), "^lse2: ")],
    layout=[Gives("bhsd", lambda r, base: torch.equal(turned(r[0]), base[0]) or pytest.fail("layout"),
                  dict(o1=turned(PARTS["o1"]), o2=turned(PARTS["o2"]))), Refused("sbhd", "^layout: "),
            Refused("bhsd", "^lse1: ")]))


# append_kv. Its formulas are in test_append.py; here each argument changes the result.


NEW_K, NEW_V = (RNG.standard_normal((2, 3, 2, 8)).astype(numpy.float32) for _ in range(2))
NEW_Q = RNG.standard_normal((2, 3, 4, 8)).astype(numpy.float32)
ZEROS = numpy.zeros((4, 6, 2, 8), numpy.float32)
AT = numpy.array([2, 0], numpy.int32)
APPEND = dict(k=NEW_K, v=NEW_V, k_cache=ZEROS, v_cache=ZEROS, kv_lengths=AT)
TABLE = numpy.array([[3, 1], [0, 2]], numpy.int32)
ANGLES = numpy.arange(20)[:, None] * numpy.array([1.0, 0.5, 0.1, 0.02])
TURN = dict(rotary_cos=numpy.cos(ANGLES).astype(numpy.float32), rotary_sin=numpy.sin(ANGLES).astype(numpy.float32))
WITH_Q = dict(TURN, q=NEW_Q)
NORM = RNG.standard_normal(8).astype(numpy.float32)
OUT_Q = numpy.empty_like(NEW_Q)
FLAT_ROWS = dict(k=NEW_K.reshape(6, 2, 8), v=NEW_V.reshape(6, 2, 8))
SLOTS = numpy.array([3, 9, 20, -1, 0, 11])


def appended(**arguments):
    """Both caches and the turned q of append_kv() on copies of the caches, in one vector."""
    caches = [arguments.pop(n).copy() for n in ("k_cache", "v_cache")]
    q = tessera.append_kv(k_cache=caches[0], v_cache=caches[1], **arguments)
    return numpy.concatenate([a.ravel() for a in (*caches, *([] if q is None else [q]))])


def changes(more, name, value):
    """A row that changes the result of a call with these arguments."""
    return Gives(value, lambda r, base: numpy.array_equal(r, appended(**{**APPEND, **more})) and pytest.fail("no change"),
                 more)


def as_appended(**arguments):
    return lambda r, base: numpy.array_equal(r, appended(**arguments)) or pytest.fail("another result")


FUNCTIONS["append_kv"] = Function(appended, APPEND, dict(
    k=[As(2 * NEW_K, None), Refused(NEW_K[:1], "^v|^kv_lengths")], v=[As(2 * NEW_V, None), Refused(NEW_V[..., :4], "^v")],
    k_cache=[As(ZEROS + 1, None), Refused(ZEROS.astype(numpy.float64), "^k_cache: ")],
    v_cache=[As(ZEROS + 1, None), Refused(ZEROS[..., :4], "^v")],
    slot_mapping=[Gives(SLOTS, lambda r, base: r.reshape(2, 24, 2, 8)[0, 3].tolist() == NEW_K[0, 0].tolist()
                        or pytest.fail("slot"), dict(kv_lengths=None)),
                  Refused(SLOTS, "^(kv_lengths|slot_mapping): "), Refused(SLOTS[:2], "^slot_mapping: ",
                                                                         dict(kv_lengths=None))],
    kv_lengths=[As(AT[::-1].copy(), None), Refused(AT[:1], "^kv_lengths: "), Refused(None, "^kv_lengths: ")],
    page_table=[As(TABLE, None), Refused(TABLE[:1], "^page_table: ")],
    cache_batch_index=[Gives(numpy.array([1, 0], numpy.int32), as_appended(
        **dict(APPEND, **{n: a[::-1].copy() for n, a in (("k", NEW_K), ("v", NEW_V), ("kv_lengths", AT))}))),
        Refused(AT, "^cache_batch_index: ", dict(page_table=TABLE)), Refused(AT[:1], "^cache_batch_index: ")],
    cu_seqlens_k=[Gives(numpy.array([0, 3, 6]), as_appended(**APPEND), FLAT_ROWS),
                  Refused(numpy.array([0, 3, 6]), "^(cu_seqlens_k|k): "),
                  Refused(numpy.array([0, 3, 6]), "^cu_seqlens_k: ", dict(FLAT_ROWS, slot_mapping=SLOTS, kv_lengths=None))],
    rotary_cos=[changes(TURN, "rotary_cos", 2 * TURN["rotary_cos"]), Refused(TURN["rotary_cos"], "^rotary_")],
    rotary_sin=[changes(TURN, "rotary_sin", 2 * TURN["rotary_sin"]), Refused(TURN["rotary_sin"], "^rotary_")],
    rotary_interleaved=changes(TURN, "rotary_interleaved", True),
    positions=[changes(TURN, "positions", numpy.arange(6)), Refused(numpy.arange(5), "^positions: ", TURN),
               Refused(numpy.full(6, 20), "^positions: ", TURN)],
    q=[changes(WITH_Q, "q", 2 * NEW_Q), Refused(NEW_Q[..., :4], "^q", TURN)],
    q_positions=[changes(WITH_Q, "q_positions", numpy.arange(6)),
                 Refused(numpy.arange(5), "^q_positions: ", WITH_Q)],
    k_norm=[As(NORM, None), Refused(NORM[:3], "^k_norm: ")],
    q_norm=[changes(WITH_Q, "q_norm", NORM), Refused(NORM, "^q", TURN)],
    norm_eps=[changes(dict(k_norm=NORM), "norm_eps", 1.0), Refused(0, "^norm_eps: "), Refused(-1.0, "^norm_eps: ")],
    out_q=[Gives(OUT_Q, lambda r, base: r[-OUT_Q.size:].tolist() == OUT_Q.ravel().tolist() or pytest.fail("out_q"), WITH_Q),
           Refused(OUT_Q, "^out_q: "), Refused(OUT_Q[:1], "^out_q: ", WITH_Q)],
    threads=[Same(1), Refused(-1, "^threads: ")], stream=Refused(1, "^stream: ")), of=tessera.append_kv)


# decode_block: each argument beside the formulas of test_decode_block.py.


BLOCK = block.everything(numpy.random.default_rng(1))


def decoded(**arguments):
    return tessera.decode_block(**{n: a.copy() if n.endswith("_cache") else a for n, a in arguments.items()})


def by_formula(name, value, more=None):
    """A row whose result is that of the formulas, and differs from the one of the call without it."""
    call = {**BLOCK, **(more or {}), name: value}
    given = {n: a for n, a in call.items() if a is not None}

    def check(result, base):
        numpy.testing.assert_allclose(result, block.expected(given)[0], rtol=3e-5, atol=3e-5)
        assert not numpy.allclose(result, base, atol=1e-4)
    return Gives(value, check, more or {})


def times(name, factor=2):
    return by_formula(name, BLOCK[name] * numpy.float32(factor))


SLOTTED = dict(page_table=None, **{n: RNG.standard_normal((5, 12, 2, 16)).astype(numpy.float32)
                                   for n in ("k_cache", "v_cache")})
OUT = numpy.empty_like(BLOCK["x"])
FUNCTIONS["decode_block"] = Function(decoded, BLOCK, dict(
    {n: times(n) for n in ("norm", "w_qkv", "w_o", "b_qkv", "b_o", "q_norm", "k_norm", "residual", "sinks", "rotary_cos",
                           "rotary_sin", "k_cache", "v_cache")},
    x=[by_formula("x", BLOCK["x"][::-1].copy()), Refused(BLOCK["x"][0], "^x: ")],
    kv_lengths=[by_formula("kv_lengths", numpy.array([0, 6, 3], numpy.int32)),
                Refused(BLOCK["kv_lengths"][:2], "^kv_lengths: ")],
    norm_eps=[by_formula("norm_eps", 0.5), Refused("1", "^norm_eps: "), Refused(-1.0, "^norm_eps: "),
              Refused(float("nan"), "^norm_eps: ")],
    rotary_interleaved=by_formula("rotary_interleaved", True),
    positions=[by_formula("positions", numpy.array([1, 2, 3])), by_formula("positions", None),
               Refused(numpy.array([0, 30, 0]), "^positions: ")],
    page_table=[by_formula("page_table", BLOCK["page_table"][:, ::-1].copy()), Refused(BLOCK["page_table"] - 9, "^page_table: ")],
    cache_batch_index=[by_formula("cache_batch_index", numpy.array([4, 0, 2], numpy.int32), SLOTTED),
                       Refused(numpy.array([1, 0, 2], numpy.int32), "^cache_batch_index: ")],
    left_padding=[by_formula("left_padding", numpy.array([0, 7, 3], numpy.int32)),
                  Refused(numpy.array([0], numpy.int32), "^left_padding: ")],
    window_left=[by_formula("window_left", 2), *(Refused(value, "^window_left: ") for value in (-1, 2.5, 2**64 + 2, "x"))],
    scale=[by_formula("scale", 0.9), Refused(float("nan"), "^scale: "), Refused("x", "^scale: ")],
    softcap=[by_formula("softcap", 0.7), Refused(-1.0, "^softcap: ")],
    out=[Gives(OUT, lambda r, base: r is OUT and (r == base).all() or pytest.fail("out")), Refused(OUT[:1], "^out: ")],
    return_attention=Gives(True, lambda r, base: (r[0] == base).all() and r[1].shape == (3, block.HEADS, block.DIM)
                           and r[2].shape == (3, block.HEADS) or pytest.fail("return_attention")),
    way=[Same("chain"), Refused("one launch", "^way: "), Refused("x", "^way: ")], early_weights=Same(True),
    workspace=[Same(tessera.DecodeBlockWorkspace()), Refused(5, "^workspace: ")],
    threads=[Same(1), Refused(-1, "^threads: ")], stream=Refused(1, "^stream: ")), of=tessera.decode_block)


def names_of(function):
    """The names of a function's arguments, those of **scores among them."""
    parameters = inspect.signature(function).parameters
    return set(parameters) - {"scores"} | (set(SCORES) if "scores" in parameters else set())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_stands_in_a_table(name):
    function = FUNCTIONS[name]
    of = function.of or function.call
    said = (of.__doc__ or "") + (tessera.attention.__doc__ if name in ("attention_backward", "plan", "predict") else "")
    tables.expect_table(function, names_of(of), said)


CASES, IDS = tables.cases_of(FUNCTIONS)


@pytest.mark.parametrize("name,argument,entry", CASES, ids=IDS)
def test_an_argument_is_honoured_or_refused(name, argument, entry):
    tables.expect_entry(FUNCTIONS[name], argument, entry)
