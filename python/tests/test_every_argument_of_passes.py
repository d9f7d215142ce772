# SPDX-License-Identifier: Apache-2.0
"""The tables of arguments for the single passes of flash_attn. S_dmask, rng_state and softmax_d have tests of their own
in test_flash_attn.py."""
import inspect

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import argument_tables as tables  # noqa: E402
import tessera.torch as tt  # noqa: E402
import torch_reference as reference  # noqa: E402
from argument_tables import (CU_K, CU_Q, D_O, K, LEN_KV, LEN_Q, Q, SLOPES, V, As, Function, Gives, Refused,  # noqa: E402
                             Same, flat, gradient_of)
from tessera import flash_attn  # noqa: E402

NOTHING = dict(dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
               alibi_slopes=None)
PASS = dict(q=Q, k=K, v=V, **NOTHING)
RAGGED = dict(PASS, **tables.ROWS, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_q=LEN_Q, max_seqlen_k=LEN_KV)
# argument -> its value and the meaning of that
SCORES = dict(softmax_scale=(0.3, dict(scale=0.3)), causal=(True, dict(causal="bottom-right")),
              window_size_left=(3, dict(window=(3, None))), window_size_right=(1, dict(window=(None, 1))),
              softcap=(0.5, dict(softcap=0.5)), alibi_slopes=(SLOPES, dict(alibi_slopes=SLOPES)))
REFUSED = {"softcap": ["x"], "window_size_left": [2.5, "x"], "window_size_right": [2.5], "alibi_slopes": [SLOPES[:2], 0.5],
           "softmax_scale": ["x", float("nan")]}
REFUSALS = {name: [Refused(value, f"{name}|window_size") for value in values] for name, values in REFUSED.items()}
WEIGHTS = Gives(True, lambda r, base: r[2].shape == (2, 4, 128, 128) and base[2] is None or pytest.fail("S_dmask"),
                dict(dropout_p=0.5))
FORWARD = dict(q=tables.TENSORS["q"], k=tables.TENSORS["k"], v=tables.TENSORS["v"],
               dropout_p=[As(0.5, None), Refused(1.5, "dropout_p")], return_softmax=WEIGHTS,
               **{name: [As(*entry), *REFUSALS.get(name, [])] for name, entry in SCORES.items()})
BEFORE = dict.fromkeys(("dq", "dk", "dv"))


def written(function):
    """A backward whose result is (dq, dk, dv, softmax_d); gradients that are not given are new tensors."""
    def call(**arguments):
        gradients = {n: torch.empty_like(arguments[n[1]]) if arguments[n] is None else arguments[n] for n in BEFORE}
        return (*gradients.values(), function(**{**arguments, **gradients}))
    return call


def of_forward(ragged=False, **options):
    """The arguments of a backward that come from a forward with these options."""
    call = {**(RAGGED if ragged else PASS), **options, "return_softmax": False}
    out, lse, _, state = (flash_attn._flash_attn_varlen_forward if ragged else flash_attn._flash_attn_forward)(**call)
    return dict(out=out, softmax_lse=lse, **({} if state is None else dict(rng_state=state)))


def gradients_are(ragged, **means):
    def check(result, base):
        found = [t.unflatten(0, (2, -1)) if ragged else t for t in result[:3]]
        gradient_of(**means)(found, [t.reshape(f.shape) for f, t in zip(found, base)])
    return check


def of_seed(ragged):
    """A check that the gradients are those of the dropout that rng_state draws."""
    def check(result, base):
        leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
        o = tt.attention(*leaves, dropout_p=0.5, seed=DROPPED[ragged]["rng_state"])
        for got, want in zip(result, torch.autograd.grad(o, leaves, D_O)):
            reference.expect_close(got.reshape(want.shape), want, 1e-5, "gradient")
    return check


def other_seed(ragged):
    """A check that the gradients are not those of the seed that was drawn."""
    def check(result, base):
        with pytest.raises(AssertionError, match="^gradient: relative RMSE"):
            of_seed(ragged)(result, base)
    return check


DROPPED = [of_forward(ragged, dropout_p=0.5) for ragged in (False, True)]
BUFFER = torch.empty_like(Q)


def backward_table(ragged):
    d_o = flat(D_O) if ragged else D_O
    given, shape = of_forward(ragged), (lambda t: flat(t)) if ragged else (lambda t: t)
    buffers = {n: torch.empty_like(shape(t)) for n, t in zip(BEFORE, (Q, K, V))}
    table = dict(
        dout=Gives(2 * d_o, lambda r, base: torch.allclose(r[3], 2 * base[3]) and torch.allclose(r[2], 2 * base[2])
                   or pytest.fail("dout")),
        q=[Gives(shape(Q), gradients_are(ragged)), As(2 * shape(Q), None)], k=As(2 * shape(K), None),
        v=As(2 * shape(V), None), out=As(2 * given["out"], None), softmax_lse=As(given["softmax_lse"] + 1, None),
        dropout_p=[Gives(0.5, of_seed(ragged), DROPPED[ragged]), Refused(0.5, "^rng_state: ")],
        rng_state=[Gives(DROPPED[ragged]["rng_state"] + 1, other_seed(ragged), dict(DROPPED[ragged], dropout_p=0.5)),
                   Gives(DROPPED[ragged]["rng_state"], of_seed(ragged), dict(DROPPED[ragged], dropout_p=0.5))],
        deterministic=Same(True),
        **{name: [Gives(value, gradients_are(ragged, **means), of_forward(ragged, **{name: value})),
                  *REFUSALS.get(name, [])] for name, (value, means) in SCORES.items()},
        **{n: [Gives(t, lambda r, base, i=i, t=t: r[i] is t and torch.equal(t, base[i]) or pytest.fail("not written")),
               Refused(t[:1], f"^{n}: expected shape")] for i, (n, t) in enumerate(buffers.items())})
    return dict(PASS, **BEFORE, dout=d_o, deterministic=False, **given), table


DENSE, DENSE_TABLE = backward_table(False)
VARLEN, VARLEN_TABLE = backward_table(True)
LENGTHS = tables.LENGTHS
FUNCTIONS = {
    "_flash_attn_forward": Function(flash_attn._flash_attn_forward, dict(PASS, return_softmax=False), FORWARD),
    "_flash_attn_varlen_forward": Function(flash_attn._flash_attn_varlen_forward, RAGGED, dict(
        FORWARD, **tables.FLAT, **LENGTHS, zero_tensors=Same(True),
        **{n: Refused(torch.zeros(2, 1, dtype=torch.int32), f"^{n}: ") for n in ("block_table", "leftpad_k", "seqused_k")}),
        tables.unflat),
    "_flash_attn_backward": Function(written(flash_attn._flash_attn_backward), DENSE, DENSE_TABLE,
                                     of=flash_attn._flash_attn_backward),
    "_flash_attn_varlen_backward": Function(
        written(flash_attn._flash_attn_varlen_backward), dict(RAGGED, **{**VARLEN, **tables.ROWS}), dict(
            VARLEN_TABLE, **LENGTHS, zero_tensors=Same(True)), of=flash_attn._flash_attn_varlen_backward),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_stands_in_a_table(name):
    of = FUNCTIONS[name].of or FUNCTIONS[name].call
    tables.expect_table(FUNCTIONS[name], inspect.signature(of).parameters, of.__doc__)


CASES, IDS = tables.cases_of(FUNCTIONS)


@pytest.mark.parametrize("name,argument,entry", CASES, ids=IDS)
def test_an_argument_is_honoured_or_refused(name, argument, entry):
    tables.expect_entry(FUNCTIONS[name], argument, entry)
