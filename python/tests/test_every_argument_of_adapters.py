# SPDX-License-Identifier: Apache-2.0
"""The tables of arguments for tessera.xformers, rotary and bert_padding."""
import inspect

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import argument_tables as tables  # noqa: E402
import torch_reference as reference  # noqa: E402
from argument_tables import (BIAS, CU_Q, D_O, K, LEN_KV, LEN_Q, Q, V, As, Function, Gives, Refused, Same,  # noqa: E402
                             flat, gradient_of)
from tessera import bert_padding, rotary, xformers  # noqa: E402


def equals(expected):
    """A check that the result, or its first tensor, has the bits of a tensor or of what a function gives."""
    def check(result, base):
        o = result[0] if isinstance(result, (tuple, list)) else result
        assert torch.equal(o, expected() if callable(expected) else expected)
    return check


def close(expected, limit=1e-5):
    def check(result, base):
        o = result[0] if isinstance(result, (tuple, list)) else result
        reference.expect_close(o, expected() if callable(expected) else expected, limit, "result")
    return check


# xFormers


class HiddenKeys(xformers.LowerTriangularMask):
    """A mask of a program that hides other keys than its base class."""

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return torch.full(shape, float("-inf"))


def passed(**options):
    """(out, lse) of xFormers' forward with these options, by the names of its backward."""
    o, lse = xformers.memory_efficient_attention_forward_requires_grad(Q, K, V, **options)
    return dict(output=o, lse=lse)


OF_XFORMERS = dict(query=As(2 * Q, dict(q=2 * Q)), key=As(2 * K, dict(k=2 * K)), value=As(2 * V, dict(v=2 * V)),
                   scale=As(0.3, dict(scale=0.3)), op=Same(xformers.AttentionOp),
                   output_dtype=Gives(torch.bfloat16, lambda r, base: tables.o_of(r.float() if isinstance(r, torch.Tensor)
                                                                                  else r[0].float()).shape == Q.shape
                                      and (r if isinstance(r, torch.Tensor) else r[0]).dtype == torch.bfloat16
                                      or pytest.fail("dtype")),
                   attn_bias=[As(BIAS, dict(bias=BIAS)), As(xformers.LowerTriangularMask(), dict(causal="top-left")),
                              As(xformers.LowerTriangularFromBottomRightMask(), dict(causal="bottom-right")),
                              As(xformers.LocalAttentionFromBottomRightMask(3, 1), dict(window=(3, 1))),
                              As(xformers.BlockDiagonalMask.from_seqlens([LEN_Q] * 2, [LEN_KV] * 2).make_causal(),
                                 dict(causal="top-left"), {n: flat(t)[None] for n, t in
                                                           zip(("query", "key", "value"), (Q, K, V))}),
                              Refused("causal", "^attn_bias: "), Refused(xformers.AttentionBias(), "^attn_bias: "),
                              Refused(HiddenKeys(), "^attn_bias: expected None, a tensor or an AttentionBias of tessera")])
DROPS = dict(OF_XFORMERS, p=[As(0.5, None), *(Refused(p, "^p: ") for p in (2.0, "x", None))])
NO_DROP = dict(OF_XFORMERS, p=Refused(0.5, "^p: "))
CALL = dict(query=Q, key=K, value=V)
FIVE = torch.randn(2, 3, 2, 2, 8)  # [B, M, G, H, K]
GROUPS, ONE_GROUP = dict(query=FIVE, value=FIVE), FIVE[:, :, :1]
PARTS = [xformers.memory_efficient_attention_partial(Q, K[:, part], V[:, part])
         for part in (slice(0, 6), slice(6, LEN_KV))]
SPLIT = dict(attn_split=[o for o, _ in PARTS], lse_split=[lse for _, lse in PARTS])


def merged_of_five():
    """Parts of 5 dimensions, with LSE [B, G * H, M] and [B, G, H, M]."""
    parts = [xformers.memory_efficient_attention_partial(FIVE, FIVE[:, part], FIVE[:, part])
             for part in (slice(0, 1), slice(1, 3))]
    return dict(attn_split=[o for o, _ in parts], lse_split=[lse for _, lse in parts])


def in_batch(o):
    """O of a ragged batch as that of a dense one."""
    return o.reshape(Q.shape)


FUNCTIONS = {
    "memory_efficient_attention": Function(xformers.memory_efficient_attention, CALL, dict(
        DROPS, key=[DROPS["key"], Refused(ONE_GROUP, "^key: expected groups and heads", GROUPS),
                         Refused(K[..., :4], "^key: ")], value=[DROPS["value"], Refused(V[:, :3], "^value: ")],
        scale=[DROPS["scale"], Refused("x", "^scale: ")]), in_batch),
    "unbind": Function(xformers.unbind, dict(x=Q, dim=0), dict(
        x=Gives(2 * Q, lambda r, base: torch.equal(r[1], 2 * base[1]) or pytest.fail("x")),
        dim=[Gives(-1, lambda r, base: len(r) == 8 and torch.equal(r[3], Q[..., 3]) or pytest.fail("dim")),
             Refused(4, "range")])),
    "memory_efficient_attention_forward": Function(xformers.memory_efficient_attention_forward, CALL, DROPS, in_batch),
    "memory_efficient_attention_forward_requires_grad": Function(
        xformers.memory_efficient_attention_forward_requires_grad, CALL, NO_DROP, in_batch),
    "memory_efficient_attention_partial": Function(xformers.memory_efficient_attention_partial, CALL, NO_DROP, in_batch),
    "memory_efficient_attention_backward": Function(
        xformers.memory_efficient_attention_backward, dict(CALL, grad=D_O, **passed()), dict(
            grad=[Gives(2 * D_O, lambda r, base: torch.allclose(r[0], 2 * base[0]) or pytest.fail("grad")),
                  Refused(D_O[:1], "^grad: "), Refused(D_O.double(), "^grad: ")],
            output=[As(2 * passed()["output"], None), Refused(Q[:1], "^output: "), Refused(Q.double(), "^output: ")],
            lse=[As(passed()["lse"] + 1, None), Refused(passed()["lse"][:1], "^lse: ")],
            query=As(2 * Q, None), key=As(2 * K, None), value=As(2 * V, None), p=Refused(0.5, "^p: "),
            op=Same(xformers.AttentionOp), scale=Gives(0.3, gradient_of(scale=0.3), passed(scale=0.3)), attn_bias=[
                Gives(None, gradient_of()), Gives(BIAS, gradient_of(bias=BIAS), passed(attn_bias=BIAS)),
                Gives(xformers.LowerTriangularMask(), gradient_of(causal="top-left"),
                      passed(attn_bias=xformers.LowerTriangularMask())), Refused("causal", "^attn_bias: ")])),
    "merge_attentions": Function(xformers.merge_attentions, SPLIT, dict(
        attn_split=[Gives(SPLIT["attn_split"], close(lambda: reference.attention(Q, K, V)[0])),
                    Gives(merged_of_five()["attn_split"],
                          close(lambda: xformers.memory_efficient_attention(FIVE, FIVE, FIVE)), merged_of_five()),
                    Refused(SPLIT["attn_split"][0], "^attn_split: "), Refused([Q, Q[:1]], "^attn_split: ")],
        lse_split=[As(SPLIT["lse_split"][::-1], None), Refused(SPLIT["lse_split"][:1], "^lse_split: expected 2 tensors"),
                   Refused([lse[:, :2] for lse in SPLIT["lse_split"]], "^lse_split: ")],
        write_lse=Gives(False, lambda r, base: r[1] is None and base[1] is not None or pytest.fail("write_lse")),
        output_dtype=Gives(torch.float64, lambda r, base: r[0].dtype == torch.float64 or pytest.fail("dtype")))),
}


# flash_attn.layers.rotary


POSITIONS = torch.arange(LEN_KV, dtype=torch.float32)
ANGLES = torch.outer(POSITIONS, torch.tensor([1.0, 0.1, 0.01]))  # 6 of 8 dimensions are rotated
COS, SIN = ANGLES.cos(), ANGLES.sin()


def rotated(x, positions=None, interleaved=False, angles=ANGLES, times=1.0):
    """x [..., rows, heads, 8] rotated, as complex numbers in fp64. positions: [rows] or [batch, rows]."""
    angles = angles.double()[torch.arange(x.shape[-3]) if positions is None else positions].unsqueeze(-2)
    pairs = angles.shape[-1]
    first = x.double()[..., :2 * pairs]
    a, b = (first[..., ::2], first[..., 1::2]) if interleaved else (first[..., :pairs], first[..., pairs:])
    turned = torch.complex(a, b) * torch.polar(torch.full_like(angles, times), angles)
    parts = (turned.real, turned.imag)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned, x[..., 2 * pairs:].double()), -1)


def on_copies(function, *names):
    """A function that writes to its arguments, on copies of these."""
    def call(**arguments):
        return function(**{n: t.clone() if n in names and t is not None else t for n, t in arguments.items()})
    return call


FIRST = torch.tensor([3, 0])
FROM_FIRST = FIRST[:, None] + torch.arange(LEN_Q)
TABLES = dict(cos=COS, sin=SIN)
OTHER = ANGLES * 2
WRITTEN = Q.clone()
ROWS = torch.cat((torch.arange(LEN_Q), torch.arange(LEN_Q)))
TURNS = dict(
    cos=[As(COS * 2, None), Refused(COS[:LEN_Q - 1], "^cos: "), Refused(COS[:, :2], "^cos: ")],
    sin=[As(SIN * 2, None), Refused(SIN[:5], "^cos: ")])
OFFSETS = [Refused(-1, "^seqlen_offsets: "), Refused(torch.tensor([1]), "^seqlen_offsets: "),
           Refused(torch.tensor([-1, 0]), "^seqlen_offsets: "), Refused(torch.tensor([0, 9]), "^cos: "),
           Refused(2.5, "^seqlen_offsets: "), Refused(LEN_KV, "^cos: ")]
QKV, KV = torch.stack((Q, Q.flip(0), Q + 1), 2), torch.stack((K, V), 2)
MIXED = torch.cat((Q, K[:, :LEN_Q], V[:, :LEN_Q]), 2)
qkv_ = on_copies(rotary.apply_rotary_emb_qkv_, "qkv")


def expected_qkv(of_q=ANGLES, of_k=ANGLES, **options):
    return torch.stack((rotated(QKV[:, :, 0], angles=of_q, **options), rotated(QKV[:, :, 1], angles=of_k, **options),
                        QKV[:, :, 2].double()), 2)


def expected_kv(positions=None, interleaved=False, angles=ANGLES):
    return torch.stack((rotated(K, positions, interleaved, angles), V.double()), 2)


FUNCTIONS.update({
    "rotate_half": Function(rotary.rotate_half, dict(x=Q), dict(
        x=Gives(2 * Q, lambda r, base: torch.equal(r, 2 * base) or pytest.fail("x")),
        interleaved=[Gives(False, equals(torch.cat((-Q[..., 4:], Q[..., :4]), -1))),
                     Gives(True, equals(torch.stack((-Q[..., 1::2], Q[..., ::2]), -1).flatten(-2)))])),
    "apply_rotary_emb": Function(rotary.apply_rotary_emb, dict(x=Q, **TABLES), dict(
        TURNS, x=[Gives(2 * Q, close(rotated(2 * Q), 1e-6)), Refused(Q[0], "^x: ")],
        interleaved=Gives(True, close(rotated(Q, interleaved=True), 1e-6)),
        inplace=Gives(True, lambda r, base: r is WRITTEN and torch.equal(r, base) or pytest.fail("inplace"),
                      dict(x=WRITTEN)),
        seqlen_offsets=[Gives(4, close(rotated(Q, torch.arange(4, 4 + LEN_Q)), 1e-6)),
                        Gives(FIRST, close(rotated(Q, FROM_FIRST), 1e-6)), *OFFSETS],
        cu_seqlens=[Gives(CU_Q, close(rotated(flat(Q), ROWS), 1e-6), dict(x=flat(Q))),
                    Gives(CU_Q, close(rotated(flat(Q), FROM_FIRST.flatten()), 1e-6),
                          dict(x=flat(Q), seqlen_offsets=FIRST)),
                    Gives(CU_Q[:2], close(rotated(flat(Q), ROWS * (torch.arange(2 * LEN_Q) < LEN_Q)), 1e-6),
                          dict(x=flat(Q), cos=COS[:LEN_Q], sin=SIN[:LEN_Q])),
                    Refused(CU_Q, "^x: ")],
        max_seqlen=Same(3))),
    "apply_rotary_emb_torch": Function(rotary.apply_rotary_emb_torch, dict(x=Q, cos=COS[:LEN_Q], sin=SIN[:LEN_Q]), dict(
        x=Gives(2 * Q, close(rotated(2 * Q), 1e-6)), cos=As(2 * COS[:LEN_Q], None), sin=As(2 * SIN[:LEN_Q], None),
        interleaved=Gives(True, close(rotated(Q, interleaved=True), 1e-6)))),
    "apply_rotary_emb_qkv_": Function(qkv_, dict(qkv=QKV, **TABLES), dict(
        TURNS, qkv=[Gives(QKV, close(expected_qkv, 1e-6)), Refused(QKV[0], "^num_heads_q: "), Refused(KV, "^qkv: ")],
        cos_k=Gives(OTHER.cos(), close(lambda: expected_qkv(of_k=OTHER), 1e-6), dict(sin_k=OTHER.sin())),
        sin_k=[Gives(OTHER.sin(), close(lambda: expected_qkv(of_k=OTHER), 1e-6), dict(cos_k=OTHER.cos())),
               Refused(SIN[:5], "^cos: ")],
        interleaved=Gives(True, close(lambda: expected_qkv(interleaved=True), 1e-6)),
        seqlen_offsets=[Gives(FIRST, close(lambda: expected_qkv(positions=FROM_FIRST), 1e-6)), *OFFSETS],
        num_heads_q=[Gives(4, close(lambda: torch.cat((rotated(MIXED[:, :, :6]), MIXED[:, :, 6:].double()), 2), 1e-6),
                           dict(qkv=MIXED)), Gives(4, close(expected_qkv, 1e-6)),
                     *(Refused(heads, "^num_heads_q: ", dict(qkv=MIXED)) for heads in (None, 3, 8, 0, -2)),
                     Refused(2, "^num_heads_q: ")]), of=rotary.apply_rotary_emb_qkv_),
    "apply_rotary_emb_kv_": Function(on_copies(rotary.apply_rotary_emb_kv_, "kv"), dict(kv=KV, **TABLES), dict(
        cos=[As(COS * 2, None), Refused(COS[:5], "^cos: ")], sin=[As(SIN * 2, None), Refused(SIN[:5], "^cos: ")],
        kv=[Gives(KV, close(expected_kv, 1e-6)), Refused(QKV, "^kv: ")],
        interleaved=Gives(True, close(lambda: expected_kv(interleaved=True), 1e-6)),
        seqlen_offsets=[Gives(1, close(lambda: expected_kv(torch.arange(1, LEN_KV + 1), angles=torch.outer(
            torch.arange(LEN_KV + 1), ANGLES[1])), 1e-6), dict(zip(("cos", "sin"), (
                f(torch.outer(torch.arange(LEN_KV + 1), ANGLES[1])) for f in (torch.cos, torch.sin))))),
                        Refused(1, "^cos: "), Refused(-1, "^seqlen_offsets: ")]), of=rotary.apply_rotary_emb_kv_),
})


def embedded(dim=6, base=10000.0, interleaved=False, scale_base=None, device=None, **arguments):
    """A call of a new RotaryEmbedding."""
    return on_copies(rotary.RotaryEmbedding(dim, base, interleaved, scale_base, device), "qkv", "kv")(**arguments)


def angles_of(dim=6, base=10000.0):
    return torch.outer(torch.arange(30.0), base ** -(torch.arange(0, dim, 2) / dim))


def of_module(**options):
    return close(lambda: expected_qkv(**{**dict(of_q=angles_of(), of_k=angles_of()), **options}), 1e-5)


def expect_scaled(result, base):
    """Scores of XPos are those of plain embeddings times a power of the distance."""
    q, k = result[:, :, 0].double(), result[:, :, 1].double()
    zeta = ((torch.arange(0, 6, 2) + 2.4) / 8.4).double()
    distance = torch.arange(LEN_Q)[:, None] - torch.arange(LEN_Q)[None, :]
    power = zeta ** (distance[..., None] / 512)
    plain_q, plain_k = (rotated(QKV[:, :, i], angles=angles_of())[..., :6] for i in (0, 1))

    def scores(q, k, power):
        return torch.einsum("bihd,bjhd,ijd->bhij", q, k, torch.cat((power, power), -1))
    reference.expect_close(scores(q[..., :6], k[..., :6], torch.ones_like(power)), scores(plain_q, plain_k, power), 1e-5,
                           "scores")
    assert not torch.allclose(result, base, atol=1e-3)


FUNCTIONS["RotaryEmbedding"] = Function(embedded, dict(qkv=QKV), dict(
    dim=Gives(8, of_module(of_q=angles_of(8), of_k=angles_of(8))),
    base=Gives(100.0, of_module(of_q=angles_of(6, 100.0), of_k=angles_of(6, 100.0))),
    interleaved=Gives(True, of_module(interleaved=True)), scale_base=Gives(512, expect_scaled),
    device=Refused("nowhere", "device|nowhere"), qkv=[Gives(QKV, of_module()), Refused(QKV[0], "^num_heads_q: ")],
    kv=[Gives(KV, lambda r, base: (reference.expect_close(r[0], rotated(Q, angles=angles_of()), 1e-5, "q"),
                                   reference.expect_close(r[1], expected_kv(angles=angles_of()), 1e-5, "kv")), dict(qkv=Q,
                                                                                                            max_seqlen=LEN_KV)),
        Refused(QKV, "^kv: ", dict(qkv=Q))],
    seqlen_offset=[Gives(4, of_module(positions=torch.arange(4, 4 + LEN_Q))), Gives(FIRST, of_module(positions=FROM_FIRST)),
                   Refused(-1, "^seqlen_offsets: ")],
    max_seqlen=[Same(20), Same(14, dict(seqlen_offset=FIRST)), Refused(12, "^cos: ", dict(seqlen_offset=FIRST))],
    num_heads_q=[Refused(2, "^num_heads_q: "), Gives(4, close(lambda: torch.cat(
        (rotated(MIXED[:, :, :6], angles=angles_of()), MIXED[:, :, 6:].double()), 2)), dict(qkv=MIXED))]),
    of=rotary.RotaryEmbedding)


# flash_attn.bert_padding


MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 1, 1, 1]])
ADDED = torch.zeros(2, 5).masked_fill(MASK == 0, float("-inf"))
UNUSED = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
STATES = reference.random((2, 5, 3), 9)
WHERE, SPREAD = torch.tensor([0, 1, 3, 7, 8, 9]), reference.random((6, 3), 10)
IN_LENGTH = torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0]])


def unpadded(rows, cu_seqlens, longest, used=None):
    def check(result, base):
        assert torch.equal(result[0], flat(STATES)[rows]) and torch.equal(result[1], torch.tensor(rows))
        assert result[2].dtype == torch.int32 and result[2].tolist() == cu_seqlens and result[3] == longest
        assert used is None or result[4].tolist() == used
    return check


FUNCTIONS.update({
    "index_first_axis": Function(bert_padding.index_first_axis, dict(input=STATES, indices=torch.tensor([1])), dict(
        input=Gives(2 * STATES, equals(2 * STATES[1:])), indices=[Gives(torch.tensor([1, 0, 1]), equals(STATES[[1, 0, 1]])),
                                                                  Refused(torch.tensor([2]), "index|range")])),
    "index_first_axis_residual": Function(
        bert_padding.index_first_axis_residual, dict(input=STATES, indices=torch.tensor([1])), dict(
            input=Gives(2 * STATES, lambda r, base: torch.equal(r[0], 2 * base[0]) and torch.equal(r[1], 2 * STATES)
                        or pytest.fail("input")), indices=Gives(torch.tensor([0]), equals(STATES[:1])))),
    "index_put_first_axis": Function(
        bert_padding.index_put_first_axis, dict(values=SPREAD, indices=WHERE, first_axis_dim=10), dict(
            values=[Gives(2 * SPREAD, lambda r, base: torch.equal(r, 2 * base) or pytest.fail("values")),
                    Refused(SPREAD[:2], "ndex|values")],
            indices=[Gives(WHERE.flip(0), lambda r, base: torch.equal(r[WHERE], SPREAD.flip(0))
                           and torch.equal(base[WHERE], SPREAD) or pytest.fail("indices")), Refused(WHERE + 1, "ndex|range")],
            first_axis_dim=[Gives(12, lambda r, base: len(r) == 12 and torch.equal(r[:10], base) and not r[10:].any()
                                  or pytest.fail("first_axis_dim")), Refused(9, "ndex|range")])),
    "pad_input": Function(bert_padding.pad_input, dict(hidden_states=SPREAD, indices=WHERE, batch=2, seqlen=5), dict(
        hidden_states=Gives(2 * SPREAD, lambda r, base: torch.equal(r, 2 * base) or pytest.fail("hidden_states")),
        indices=As(WHERE.flip(0), None), batch=[Gives(3, lambda r, base: torch.equal(r[:2], base) and not r[2].any()
                                                      or pytest.fail("batch")), Refused(1, "ndex|range")],
        seqlen=[Gives(6, lambda r, base: torch.equal(flat(r)[:10], flat(base)) or pytest.fail("seqlen")),
                Refused(4, "ndex|range")])),
    "unpad_input": Function(bert_padding.unpad_input, dict(hidden_states=STATES, attention_mask=MASK), dict(
        hidden_states=Gives(2 * STATES, equals(2 * flat(STATES)[WHERE])),
        attention_mask=[Gives(MASK, unpadded([0, 1, 3, 7, 8, 9], [0, 3, 6], 3, [3, 3])),
                        Gives(MASK.bool(), unpadded([0, 1, 3, 7, 8, 9], [0, 3, 6], 3, [3, 3])),
                        Gives(MASK.float(), unpadded([0, 1, 3, 7, 8, 9], [0, 3, 6], 3, [3, 3])),
                        Refused(MASK[:, :4], "^attention_mask: "), Refused(ADDED, "^attention_mask: expected bool, or")],
        unused_mask=[Gives(UNUSED, unpadded([0, 1, 2, 3, 7, 8, 9], [0, 4, 7], 4, [3, 3])),
                     Refused(UNUSED[:1], "^unused_mask: "), Refused(ADDED, "^unused_mask: expected bool, or")])),
    "unpad_input_for_concatenated_sequences": Function(
        bert_padding.unpad_input_for_concatenated_sequences, dict(hidden_states=STATES,
                                                                  attention_mask_in_length=IN_LENGTH), dict(
            hidden_states=Gives(2 * STATES, lambda r, base: torch.equal(r[0], 2 * base[0]) or pytest.fail("states")),
            attention_mask_in_length=[
                Gives(IN_LENGTH, unpadded([0, 1, 2, 5, 6, 7, 8, 9], [0, 2, 3, 8], 5)),
                Refused(IN_LENGTH + IN_LENGTH[1], "^attention_mask_in_length: expected lengths from 0 on"),
                Refused(-IN_LENGTH, "^attention_mask_in_length: "),
                *(Refused(MASK.to(dtype), "^attention_mask_in_length: expected integers")
                  for dtype in (torch.bool, torch.float32)),
                Refused(IN_LENGTH[:, :3], "^attention_mask_in_length: ")])),
})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_stands_in_a_table(name):
    function = FUNCTIONS[name]
    of = function.of or function.call
    named = set(inspect.signature(of).parameters)
    if inspect.isclass(of):
        named |= set(inspect.signature(of.forward).parameters) - {"self"}
    said = (of.__doc__ or "") + (inspect.getmodule(of).__doc__ or "")
    tables.expect_table(function, named, said, ("max_seqlen",) if name == "RotaryEmbedding" else ())


CASES, IDS = tables.cases_of(FUNCTIONS)


@pytest.mark.parametrize("name,argument,entry", CASES, ids=IDS)
def test_an_argument_is_honoured_or_refused(name, argument, entry):
    tables.expect_entry(FUNCTIONS[name], argument, entry)
