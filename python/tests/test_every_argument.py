# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public function either changes the result as documented, or is refused, or is documented to
change nothing. A new argument fails here until it stands in a table."""
import inspect

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from argument_tables import (BATCH, BIAS, BOUND, CU_K, CU_Q, DIM, FLAT, HEADS, HIDDEN, KEYS, LENGTHS, LEN_KV, LEN_Q,
                             NUMPY, OF_KEYS, ROWS, SEEN, SHORT_K, SHORT_Q, SINKS, SLOPES, TENSORS, As, Function,
                             Gives, K, Q, Refused, Same, V, cases_of, cumulated, expect_entry, expect_table, flat,
                             is_lse, o_of, turned, unflat)
from tessera import flash_attn, flash_attn_3, flash_attn_cute  # noqa: E402

DROPPED = dict(dropout_p=0.5, seed=1)
SCORES = dict(causal=[As("bottom-right", dict(causal="bottom-right")), As("top-left", dict(causal="top-left")),
                      Refused(True, "^causal: ")],
              window=[As((3, 1), dict(window=(3, 1))), Refused(4, "^window: "), Refused((1, 2, 3), "^window: ")],
              scale=As(0.3, dict(scale=0.3)), softcap=As(0.5, dict(softcap=0.5)))
OWN = dict(TENSORS, **SCORES, alibi_slopes=As(SLOPES, dict(alibi_slopes=SLOPES)),
           sinks=[As(SINKS, dict(sinks=SINKS)), Refused(SINKS[:2], "^sinks: ")], dropout_p=As(0.5, None, dict(seed=1)),
           seed=As(2, None, DROPPED), return_lse=Gives(True, lambda r, base: is_lse(r[1])), deterministic=Same(False),
           kernel=[As("reference", {}, dict(window=(40, 40))), Refused("cuda.fa3", "cuda|kernel|device|fa3")])
BIASED = dict(bias=As(BIAS, dict(bias=BIAS)), mask=[
    As(SEEN, dict(bias=HIDDEN)), As(SEEN, dict(bias=BIAS + HIDDEN), dict(bias=BIAS)),
    Refused(BIAS, "^mask: expected dtype bool")])
MATH = Gives(True, lambda r, base: reference.expect_close(o_of(r), o_of(base), 3e-6, "o of math=True"))
OF_TORCH = dict(OWN, math=[MATH, Refused(True, "^kernel: expected None with math=True", dict(kernel="reference"))])
FLASH_TAIL = dict(dropout_p=As(0.5, None), softmax_scale=As(0.3, dict(scale=0.3)),
                  causal=As(True, dict(causal="bottom-right")),
                  window_size=[As((3, 1), dict(window=(3, 1))), Refused(4, "^window_size: "),
                               Refused((1, 2, 3), "^window_size: ")],
                  softcap=As(0.5, dict(softcap=0.5)), alibi_slopes=As(SLOPES, dict(alibi_slopes=SLOPES)),
                  deterministic=Same(True),
                  return_attn_probs=Gives(True, lambda r, base: (is_lse(r[1]),
                                                                 r[2].numel() == 0 or pytest.fail("S_dmask"))))
FLASH_3 = dict({n: FLASH_TAIL[n] for n in ("softmax_scale", "causal", "window_size", "softcap")},
               deterministic=Same(True), sm_margin=Same(3), num_splits=Same(4), pack_gqa=Same(True),
               qv=Refused(Q, "^qv: "), attention_chunk=Refused(8, "^attention_chunk: "),
               **{f"{x}_descale": Refused(torch.ones(1), f"^{x}_descale: ") for x in "qkv"},
               return_attn_probs=Gives(True, lambda r, base: is_lse(r[1])))
def layer(is_causal=False):
    module = torch.nn.Identity()
    module.is_causal = is_causal
    return module


def transformers_forward(**arguments):
    from tessera import transformers
    return transformers.attention_forward(**arguments)


def numpy_of(entries):
    """A table whose tensors are NumPy's arrays."""
    def changed(value):
        if isinstance(value, torch.Tensor):
            return value.numpy()
        return {k: changed(v) for k, v in value.items()} if isinstance(value, dict) else value
    return {name: [e._replace(value=changed(e.value), more=changed(e.more))
                   for e in (entry if type(entry) is list else [entry])] for name, entry in entries.items()}


OUT, OUT_LSE = numpy.empty((BATCH, LEN_Q, HEADS, DIM), numpy.float32), numpy.empty((BATCH, HEADS, LEN_Q), numpy.float32)
CORE = numpy_of(dict(
    OWN, **BIASED, threads=Same(1), layout=Refused("sbhd", "^layout: "),
    cu_seqlens_q=Refused(CU_Q, "^cu_seqlens_kv: ", {n: flat(t) for n, t in zip("qkv", (Q, K, V))}),
    cu_seqlens_kv=Refused(CU_K, "^cu_seqlens_q: ", {n: flat(t) for n, t in zip("qkv", (Q, K, V))}),
    max_len_q=Refused(3, "^max_len_q: expected None without cu_seqlens"),
    max_len_kv=Refused(3, "^max_len_kv: expected None without cu_seqlens"), stream=Refused(1, "^stream: expected None"),
    return_o_residual=Gives(True, lambda r, base: r[1] is None or pytest.fail("a residual on the CPU")),
    out=Gives(OUT, lambda r, base: numpy.array_equal(OUT, base) or pytest.fail("out was not written")),
    out_lse=Gives(OUT_LSE, lambda r, base: is_lse(OUT_LSE))))
CORE["layout"].append(Gives("bhsd", lambda r, base: numpy.array_equal(r, base.swapaxes(1, 2)) or pytest.fail("layout"),
                            {n: turned(t).numpy() for n, t in zip("qkv", (Q, K, V))}))
CORE_RAGGED = numpy_of(dict(cu_seqlens_q=As(SHORT_Q, None), cu_seqlens_kv=As(SHORT_K, None),
                            max_len_q=Refused(3, "len_q|cu_seqlens_q"), max_len_kv=Refused(3, "len_kv|cu_seqlens_kv")))
def jax_of(**arguments):
    import jax.numpy as jnp
    from tessera.jax import dot_product_attention
    return dot_product_attention(**{name: jnp.asarray(value.numpy()) if isinstance(value, torch.Tensor) else value
                                    for name, value in arguments.items()})


def jax_signature():
    pytest.importorskip("jax", reason="JAX is not installed")
    from tessera.jax import dot_product_attention
    return dot_product_attention


TO = torch.zeros(BATCH * LEN_Q, HEADS, DIM)

CUTE = {**{n: FLASH_TAIL[n] for n in ("softmax_scale", "causal", "window_size", "softcap")},
        "learnable_sink": [As(SINKS, dict(sinks=SINKS)), Refused(SINKS[:2], "^learnable_sink: ")],
        **{n: Same(2) for n in ("num_splits", "pack_gqa", "deterministic", "return_lse")},
        "score_mod": Refused(1, "^score_mod: "), "aux_tensors": Refused([Q], "^aux_tensors: ")}

# A cache: K and V in slots of 17 rows, or as pages of 17.
OTHERS = torch.tensor([1, 0], dtype=torch.int32)
FROM_THIRD = dict(bias=torch.zeros(BATCH, 1, 1, LEN_KV))
FROM_THIRD["bias"][0, ..., :3] = float("-inf")
NEW = dict(k=K[:, :4] + 1, v=V[:, :4] - 1, cache_seqlens=torch.tensor([9, 13], dtype=torch.int32))
ANGLES = torch.outer(torch.arange(LEN_KV), torch.tensor([1.0, 0.1, 0.01, 0.001]))
TURNED = dict(NEW, rotary_cos=ANGLES.cos(), rotary_sin=ANGLES.sin())
FLIPPED = dict(k=K.flip(0), v=V.flip(0))


def on_copies(function):
    """A function of a cache that writes to copies of it."""
    def call(**arguments):
        return function(**{n: a.clone() if n in ("k_cache", "v_cache") else a for n, a in arguments.items()})
    return call


def other_than(of, **arguments):
    """A check that the result is not that of this call."""
    return lambda r, base: torch.allclose(o_of(r), o_of(of(**arguments)), atol=1e-3) and pytest.fail("nothing changed")


def as_call(of, **arguments):
    """A check that the result is that of this call."""
    return lambda r, base: torch.equal(o_of(r).flatten(), o_of(of(**arguments)).flatten()) or pytest.fail("not equal")


def of_cache(function, table):
    call, base = on_copies(function), dict(q=Q, k_cache=K, v_cache=V)
    added = {n: Gives(NEW[n], other_than(call, **base, **{**NEW, n: 2 * NEW[n]}), NEW) for n in ("k", "v")}
    turn = {n: Gives(TURNED[n], other_than(call, **base, **{**TURNED, n: ANGLES.tan()}), TURNED)
            for n in ("rotary_cos", "rotary_sin")}
    return Function(call, base, {
        "q": TENSORS["q"], "k_cache": As(2 * K, dict(k=2 * K)), "v_cache": As(2 * V, dict(v=2 * V)), **added, **turn,
        "rotary_interleaved": As(False, None, TURNED), "cache_seqlens": [As(KEYS, OF_KEYS), As(9, None),
                                                             Refused(KEYS[:1], "^cache_seqlens: ")],
        "cache_batch_idx": [As(OTHERS, FLIPPED), Refused(OTHERS[:1], "^cache_batch_idx: ")],
        "cache_leftpad": As(torch.tensor([3, 0], dtype=torch.int32), FROM_THIRD),
        **{n: FLASH_TAIL[n] for n in ("softmax_scale", "causal", "window_size", "softcap")}, "num_splits": Same(3),
        "return_softmax_lse": Gives(True, lambda r, base: is_lse(r[1])), "s_aux": As(SINKS, dict(sinks=SINKS)),
        **table}, of=function)


CACHE_3 = on_copies(flash_attn_3.flash_attn_with_kvcache)
FUNCTIONS = {
    "torch.attention": Function(tt.attention, dict(q=Q, k=K, v=V), dict(OF_TORCH, **BIASED, layout=[
        Refused("sbhd", "^layout: "),
        Gives("bhsd", lambda r, base: torch.equal(turned(r), base) or pytest.fail("layout"),
              {n: turned(t) for n, t in zip("qkv", (Q, K, V))})])),
    "torch.attention_weights": Function(tt.attention_weights, dict(q=Q, k=K), dict(
        {n: OWN[n] for n in ("q", "k", "causal", "window", "scale", "softcap", "alibi_slopes")}, **BIASED,
        layout=[Refused("sbhd", "^layout: "),
                Gives("bhsd", lambda r, base: torch.equal(r, base) or pytest.fail("layout"),
                      {n: turned(t) for n, t in zip("qk", (Q, K))})]),
        lambda weights: torch.einsum("bhij,bjhd->bihd", weights, V.repeat_interleave(2, 2))),
    "torch.varlen_attention": Function(tt.varlen_attention, dict(ROWS, cu_seqlens_q=CU_Q, cu_seqlens_kv=CU_K), dict(
        OF_TORCH, **FLAT, cu_seqlens_q=As(SHORT_Q, None), cu_seqlens_kv=As(SHORT_K, None),
        max_len_q=[Same(LEN_Q), Refused(3, "len_q|cu_seqlens_q")],
        max_len_kv=[Same(LEN_KV), Refused(3, "len_kv|cu_seqlens_kv")],
        return_lse=Gives(True, lambda r, base: is_lse(r[1].unflatten(1, (BATCH, -1)).transpose(0, 1)))), unflat),
    "torch.sdpa": Function(tt.scaled_dot_product_attention, dict(query=turned(Q), key=turned(K), value=turned(V),
                                                                 enable_gqa=True), dict(
        query=As(2 * turned(Q), dict(q=2 * Q)), key=As(2 * turned(K), dict(k=2 * K)),
        value=As(2 * turned(V), dict(v=2 * V)),
        attn_mask=[As(SEEN, dict(bias=HIDDEN)), As(BIAS, dict(bias=BIAS))], dropout_p=As(0.5, None),
        is_causal=[As(True, dict(causal="top-left")), Refused(1, "^is_causal: ")], scale=As(0.3, dict(scale=0.3)),
        enable_gqa=[Refused(False, "^key: expected 4 heads"), Refused(1, "^enable_gqa: ")], math=MATH), turned),
    "attention": Function(tessera.attention, NUMPY, CORE),
    "attention, ragged": Function(tessera.attention, dict({n: flat(t).numpy() for n, t in zip("qkv", (Q, K, V))},
                                                          cu_seqlens_q=CU_Q.numpy(), cu_seqlens_kv=CU_K.numpy()),
                                  CORE_RAGGED, unflat, of=lambda **_: 0),
    "flash_attn": Function(flash_attn.flash_attn_func, dict(q=Q, k=K, v=V), dict(TENSORS, **FLASH_TAIL)),
    "flash_attn, kvpacked": Function(flash_attn.flash_attn_kvpacked_func, dict(q=Q, kv=torch.stack((K, V), 2)), dict(
        FLASH_TAIL, q=TENSORS["q"], kv=As(torch.stack((2 * K, V), 2), dict(k=2 * K)))),
    "flash_attn, qkvpacked": Function(flash_attn.flash_attn_qkvpacked_func, dict(qkv=torch.stack((K, K, V), 2)), dict(
        {n: e if n in ("deterministic", "dropout_p") else As(e.value, e.means and dict(e.means, q=K))
         for n, e in FLASH_TAIL.items() if isinstance(e, As) or n == "deterministic"},
        qkv=As(torch.stack((2 * K, K, V), 2), dict(q=2 * K)),
        alibi_slopes=As(SLOPES[:2], dict(q=K, alibi_slopes=SLOPES[:2])),
        window_size=As((3, 1), dict(q=K, window=(3, 1))),
        return_attn_probs=Gives(True, lambda r, base: (len(r) == 3 or pytest.fail("results"), reference.expect_lse(
            r[1], reference.attention(K, K, V)[1]))))),
    "flash_attn, varlen": Function(flash_attn.flash_attn_varlen_func, dict(ROWS, **BOUND), dict(
        FLASH_TAIL, **FLAT, **LENGTHS, block_table=Refused(torch.zeros(1, 1), "^block_table: "),
        seqused_k=As(KEYS, OF_KEYS), s_aux=[As(SINKS, dict(sinks=SINKS)), Refused(SINKS[:2], "^s_aux: ")],
        out=[Gives(TO, lambda r, base: r is TO and torch.equal(r, base) or pytest.fail("out")),
             Refused(TO[1:], "^out: expected")], num_splits=Same(3),
        return_attn_probs=Gives(True, lambda r, base: is_lse(r[1].unflatten(1, (BATCH, -1)).transpose(0, 1)))), unflat),
    "flash_attn, varlen kvpacked": Function(
        flash_attn.flash_attn_varlen_kvpacked_func, dict(q=flat(Q), kv=flat(torch.stack((K, V), 2)), **BOUND), dict(
            FLASH_TAIL, **LENGTHS, q=FLAT["q"], kv=As(flat(torch.stack((2 * K, V), 2)), dict(k=2 * K)),
            return_attn_probs=Gives(True, lambda r, base: is_lse(r[1].unflatten(1, (BATCH, -1)).transpose(0, 1)))),
            unflat),
    "flash_attn, varlen qkvpacked": Function(
        flash_attn.flash_attn_varlen_qkvpacked_func, dict(qkv=flat(torch.stack((K, K, V), 2)), cu_seqlens=CU_K,
                                                          max_seqlen=LEN_KV), dict(
            {n: e if n in ("deterministic", "dropout_p") else As(e.value, None) for n, e in FLASH_TAIL.items()
             if n != "window_size"}, window_size=As((3, 1), None), alibi_slopes=As(SLOPES[:2], None),
            qkv=As(flat(torch.stack((2 * K, K, V), 2)), None), cu_seqlens=As(SHORT_K, None, dict(max_seqlen=25)),
            max_seqlen=Refused(3, "len_q|cu_seqlens_q"), return_attn_probs=Gives(True, lambda r, base: len(r) == 3)),
            unflat),
    "flash_attn_3": Function(flash_attn_3.flash_attn_func, dict(q=Q, k=K, v=V), dict(TENSORS, **FLASH_3)),
    "flash_attn_3, qkvpacked": Function(flash_attn_3.flash_attn_qkvpacked_func, dict(qkv=torch.stack((K, K, V), 2)),
                                        dict(
        {n: As(e.value, None) if isinstance(e, As) else e for n, e in FLASH_3.items()
         if n not in ("qv", "num_splits", "pack_gqa", "window_size")}, window_size=As((3, 1), None),
        qkv=As(torch.stack((2 * K, K, V), 2), None), return_attn_probs=Gives(True, lambda r, base: len(r) == 2),
        num_heads_q=Gives(2, lambda r, base: torch.equal(r, base), dict(qkv=torch.cat((K, K, V), 2))))),
    "flash_attn_3, varlen": Function(flash_attn_3.flash_attn_varlen_func, dict(ROWS, **BOUND), dict(
        FLASH_3, **FLAT, **LENGTHS, seqused_q=As(torch.tensor([5, 11], dtype=torch.int32), None),
        seqused_k=As(KEYS, OF_KEYS),
        return_attn_probs=Gives(True, lambda r, base: is_lse(r[1].unflatten(1, (BATCH, -1)).transpose(0, 1)))), unflat),
    "flash_attn_cute": Function(flash_attn_cute.flash_attn_func, dict(q=Q, k=K, v=V), dict(
        TENSORS, **CUTE, mask_mod=Refused(1, "^mask_mod: "),
        block_sparse_tensors=Refused(1, "^block_sparse_tensors: "))),
    "flash_attn_cute, varlen": Function(
        flash_attn_cute.flash_attn_varlen_func, dict(ROWS, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K), dict(
            CUTE, **FLAT, **LENGTHS, seqused_q=As(torch.tensor([5, 11], dtype=torch.int32), None),
            seqused_k=As(KEYS, OF_KEYS), page_table=Refused(torch.zeros(1, 1), "^page_table: ")), unflat),
    "flash_attn, cache": of_cache(flash_attn.flash_attn_with_kvcache, dict(
        alibi_slopes=As(SLOPES, dict(alibi_slopes=SLOPES)),
        block_table=[As(OTHERS[:, None], FLIPPED), Refused(OTHERS, "^block_table: ")])),
    "flash_attn_3, cache": of_cache(flash_attn_3.flash_attn_with_kvcache, dict(
        page_table=[As(OTHERS[:, None], FLIPPED), Refused(OTHERS, "^page_table: ")],
        cu_seqlens_q=Gives(CU_Q, as_call(CACHE_3, q=Q, k_cache=K, v_cache=V), dict(q=flat(Q))),
        cu_seqlens_k_new=Gives(cumulated(4), as_call(CACHE_3, q=Q, k_cache=K, v_cache=V, **NEW),
                               dict(NEW, k=flat(NEW["k"]), v=flat(NEW["v"]))),
        max_seqlen_q=Same(LEN_Q), rotary_seqlens=As(torch.tensor([2, 0], dtype=torch.int32), None, TURNED),
        scheduler_metadata=Same(torch.zeros(0)), pack_gqa=Same(True), sm_margin=Same(3), qv=Refused(Q, "^qv: "),
        attention_chunk=Refused(8, "^attention_chunk: "),
        **{f"{x}_descale": Refused(torch.ones(1), f"^{x}_descale: ") for x in "qkv"})),
    "transformers": Function(transformers_forward, dict(module=layer(), query=turned(Q), key=turned(K), value=turned(V),
                                                        attention_mask=None), dict(
        module=Same(layer()), query=As(2 * turned(Q), dict(q=2 * Q)), key=As(2 * turned(K), dict(k=2 * K)),
        value=As(2 * turned(V), dict(v=2 * V)), attention_mask=[As(SEEN[None, None], dict(bias=HIDDEN)),
                                                                As(BIAS, dict(bias=BIAS))],
        dropout=As(0.5, None), scaling=As(0.3, dict(scale=0.3)),
        sliding_window=As(4, None, dict(module=layer(True), key=turned(K[:, :LEN_Q]), value=turned(V[:, :LEN_Q]))),
        softcap=As(0.5, dict(softcap=0.5)), is_causal=As(True, None), s_aux=As(SINKS, dict(sinks=SINKS)),
        sinks=[As(SINKS, dict(sinks=SINKS)), Refused(SINKS, "^sinks: ", dict(s_aux=SINKS))], head_mask=Refused(SLOPES, "^head_mask: "),
        cache=Refused(object(), "^cache: "),
        position_bias=As(BIAS, dict(bias=BIAS)),
        cu_seq_lens_q=[As(SHORT_Q, None, dict(cu_seq_lens_q=CU_Q, cu_seq_lens_k=CU_K)),
                       Refused(CU_Q, "^cu_seq_lens_k: ")],
        cu_seq_lens_k=[As(SHORT_K, None, dict(cu_seq_lens_q=CU_Q, cu_seq_lens_k=CU_K)),
                       Refused(CU_K, "^cu_seq_lens_q: "),
                       Refused(CU_K, "^position_bias: ", dict(cu_seq_lens_q=CU_Q, position_bias=BIAS))],
        max_length_q=Refused(3, "len_q|cu_seqlens_q", dict(cu_seq_lens_q=CU_Q, cu_seq_lens_k=CU_K)),
        max_length_k=Refused(3, "len_kv|cu_seqlens_kv", dict(cu_seq_lens_q=CU_Q, cu_seq_lens_k=CU_K)),
        output_attentions=Same(True), kwargs=Same({}))),
    "jax": Function(jax_of, dict(query=Q, key=K, value=V), dict(
        query=As(2 * Q, dict(q=2 * Q)), key=As(2 * K, dict(k=2 * K)), value=As(2 * V, dict(v=2 * V)),
        bias=As(BIAS, dict(bias=BIAS)), mask=As(SEEN, dict(bias=HIDDEN)), scale=As(0.3, dict(scale=0.3)),
        is_causal=As(True, dict(causal="top-left")), query_seq_lengths=As(torch.tensor([5, 11]), None),
        key_value_seq_lengths=As(KEYS, OF_KEYS), sinks=[As(SINKS, dict(sinks=SINKS)), Refused(SINKS[:2], "^sinks: ")],
        local_window_size=[As((2, 9), dict(window=(8, 3))), As(numpy.int64(9), dict(window=(15, 3))),
                           Refused((1, 2, 3), "^local_window_size: ")],
        softcap=As(0.5, dict(softcap=0.5)),
        implementation=[Same("tessera"), Refused("x", "^implementation: "),
                        Gives("xla", lambda r, base: numpy.allclose(r, base, atol=1e-6) or pytest.fail("xla differs"))],
        return_residual=Gives(True, lambda r, base: is_lse(numpy.asarray(r[1]).transpose(0, 2, 1)))), of=jax_signature),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_stands_in_a_table(name):
    function = FUNCTIONS[name]
    if name == "attention, ragged":
        return
    if name == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
        from tessera.transformers import attention_forward as of
    else:
        of = function.of() if name == "jax" else function.of or function.call
    said = (of.__doc__ or "") + (inspect.getmodule(of).__doc__ or "")
    expect_table(function, inspect.signature(of).parameters, said, ("module", "kwargs", "max_len_q", "max_len_kv"))


CASES, IDS = cases_of(FUNCTIONS)


@pytest.mark.filterwarnings("ignore:attn_implementation")
@pytest.mark.parametrize("name,argument,entry", CASES, ids=IDS)
def test_an_argument_is_honoured_or_refused(name, argument, entry):
    for package in ("jax", "transformers"):
        if name == package:
            pytest.importorskip(package, reason=f"{package} is not installed")
    expect_entry(FUNCTIONS[name], argument, entry)
