# SPDX-License-Identifier: Apache-2.0
"""The entries of the tables of arguments in test_every_argument.py and the files whose names begin so, their checks and
their inputs. A table says of each argument of a function that it is honoured, refused, or documented to change nothing."""
import typing

import numpy
import pytest
import torch

import torch_reference as reference

BATCH, LEN_Q, LEN_KV, HEADS, HEADS_KV, DIM = 2, 11, 17, 4, 2, 8
Q, K, V = (t.detach() for t in reference.inputs(BATCH, LEN_Q, LEN_KV, HEADS, HEADS_KV, DIM))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.7])
BIAS = reference.random((1, HEADS, LEN_Q, LEN_KV), 5)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.1])
SEEN = torch.rand(LEN_Q, LEN_KV, generator=torch.Generator().manual_seed(4)) > 0.3
SEEN[:, 0] = True
HIDDEN = torch.zeros(LEN_Q, LEN_KV).masked_fill(~SEEN, float("-inf"))


class As(typing.NamedTuple):
    """The result is that of torch_reference.attention() with the keywords `means`, and differs from the one without
    `value`. more: other arguments of both calls."""
    value: object
    means: typing.Optional[dict]  # None: only the change is asked for
    more: dict = {}


class Same(typing.NamedTuple):
    """The result has the same bits, as the documentation says, which names the argument."""
    value: object
    more: dict = {}


class Refused(typing.NamedTuple):
    """The call raises an error whose text matches `words`."""
    value: object
    words: str
    more: dict = {}


class Gives(typing.NamedTuple):
    """check(result, base) asserts the effect of the argument; base: the result without it."""
    value: object
    check: typing.Callable
    more: dict = {}


class Function(typing.NamedTuple):
    call: typing.Callable
    base: dict  # the arguments of the call that all others are compared with
    table: dict  # argument -> what becomes of it, or a list of that
    rows: typing.Callable = lambda o: o  # O as [batch, len_q, heads, head_dim]
    of: typing.Optional[typing.Callable] = None  # the function with this signature and documentation; default: call


def o_of(result):
    o = result[0] if isinstance(result, (tuple, list)) else result
    return o if isinstance(o, torch.Tensor) else torch.as_tensor(numpy.array(o))


def is_lse(lse, causal=None):
    _, want = reference.attention(Q, K, V, causal=causal)
    reference.expect_lse(torch.as_tensor(numpy.asarray(lse)).reshape(want.shape), want)


def turned(t):
    return t.transpose(1, 2)


def flat(t):
    return t.flatten(0, 1)


def cumulated(length, dtype=torch.int32):
    return torch.arange(BATCH + 1, dtype=dtype) * length


CU_Q, CU_K = cumulated(LEN_Q), cumulated(LEN_KV)
TENSORS = dict(q=As(2 * Q, dict(q=2 * Q)), k=As(2 * K, dict(k=2 * K)), v=As(2 * V, dict(v=2 * V)))
ROWS = dict(q=flat(Q), k=flat(K), v=flat(V))
FLAT = {name: As(flat(entry.value), entry.means) for name, entry in TENSORS.items()}
SHORT_Q, SHORT_K = torch.tensor([0, 5, 22], dtype=torch.int32), torch.tensor([0, 9, 34], dtype=torch.int32)
LENGTHS = dict(cu_seqlens_q=As(SHORT_Q, None, dict(max_seqlen_q=17)),
               cu_seqlens_k=As(SHORT_K, None, dict(max_seqlen_k=25)), max_seqlen_q=Refused(3, "len_q|cu_seqlens_q"),
               max_seqlen_k=[Refused(3, "^cu_seqlens_k: "), Refused(-5, "^max_seqlen_k: "), Refused(2.5, "^max_seqlen_k: ")])
BOUND = dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_q=LEN_Q, max_seqlen_k=LEN_KV)
KEYS = torch.tensor([9, 17], dtype=torch.int32)
OF_KEYS = dict(bias=torch.zeros(BATCH, 1, 1, LEN_KV).masked_fill(torch.arange(LEN_KV) >= KEYS[:, None, None, None],
                                                                 float("-inf")))
NUMPY = {name: t.numpy() for name, t in zip("qkv", (Q, K, V))}


def unflat(o):
    return o.unflatten(0, (BATCH, -1))


D_O = reference.random(Q.shape, 7)


def gradient_of(**means):
    """A check that (dq, dk, dv) are those of fp64 for D_O."""
    def check(result, base):
        leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
        o, _ = reference.attention(*leaves, **means)
        for name, got, want in zip(("dq", "dk", "dv"), result, torch.autograd.grad(o, leaves, D_O.double())):
            reference.expect_close(got, want, 1e-5, name)
            assert not means or not torch.allclose(got, base["qkv".index(name[1])], atol=1e-3), name
    return check


def entries_of(table):
    """(argument, entry) of a table."""
    return [(argument, entry) for argument, entries in table.items()
            for entry in (entries if type(entries) is list else [entries])]


def cases_of(functions):
    """(name, argument, entry) of all tables, and the names of these cases."""
    cases = [(name, argument, entry) for name, function in functions.items()
             for argument, entry in entries_of(function.table)]
    return cases, [f"{name}-{argument}-{type(entry).__name__}" for name, argument, entry in cases]


def expect_table(function, named, said, without_word=()):
    """The table has the arguments `named`, and the text `said` names those that change nothing."""
    assert set(named) == set(function.table)
    for argument, entry in entries_of(function.table):
        if isinstance(entry, Same) and argument not in without_word:
            assert argument in said, f"{argument} changes nothing, and the documentation does not say so"


def expect_entry(function, argument, entry):
    """The argument is honoured, or refused, as its entry of the table says."""
    base = {**function.base, **entry.more}
    if argument in entry.more and not argument.startswith(("seed", "cu_")):
        del base[argument]
    call = {**base, **(entry.value if argument == "kwargs" else {argument: entry.value})}
    if isinstance(entry, Refused):
        with pytest.raises((ValueError, RuntimeError, TypeError, IndexError), match=entry.words):
            function.call(**call)
        return
    torch.manual_seed(0)
    result = function.call(**call)
    if isinstance(entry, Gives):
        entry.check(result, function.call(**function.base))
        return
    without = function.call(**base)
    if isinstance(entry, Same):
        assert torch.equal(o_of(result), o_of(without))
        return
    if argument != "kernel":
        assert o_of(result).shape != o_of(without).shape or not torch.allclose(o_of(result), o_of(without), atol=1e-3)
    if entry.means is not None:
        want, _ = reference.attention(**{**dict(q=Q, k=K, v=V), **entry.means})
        reference.expect_close(function.rows(o_of(result)), want, 1e-5, argument)
