# SPDX-License-Identifier: Apache-2.0
"""tessera.attention and tessera.torch.attention are twins: the same arguments, results and errors. The differences
stand in docs/python.md, and here."""
import inspect

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402

# Arguments that one of them has. varlen_attention() of PyTorch takes those of ragged batches.
ONLY_NUMPY = {"out", "out_lse", "stream", "threads", "return_o_residual"}
ONLY_TORCH = {"math"}


def arguments(function):
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty}


def test_the_arguments_and_their_defaults():
    numpys, torchs = arguments(tessera.attention), {**arguments(tt.varlen_attention), **arguments(tt.attention)}
    assert set(numpys) - set(torchs) == ONLY_NUMPY | {"cu_seqlens_q", "cu_seqlens_kv"}
    assert set(torchs) - set(numpys) == ONLY_TORCH
    different = {name for name in set(numpys) & set(torchs) if numpys[name] != torchs[name]}
    assert different == {"seed"} and numpys["seed"] == 0 and torchs["seed"] is None


WRONG = [dict(causal=True), dict(causal="x"), dict(causal=3), dict(window=3), dict(window=(1.5, None)),
         dict(window=(-1, 3)), dict(window=(1, 2, 3)), dict(window=(2**70, None)), dict(scale="1"),
         dict(scale=float("nan")), dict(scale=1j), dict(scale=10**400), dict(softcap=-2), dict(softcap="a"),
         dict(dropout_p=1), dict(dropout_p=-0.5), dict(dropout_p="a"), dict(kernel="cuda.fa9"), dict(kernel=3),
         dict(kernel="cpu.fa2.backward"), dict(kernel="cpu.fa2\0x"), dict(layout="sbhd"), dict(layout=3),
         dict(bias=numpy.ones((4, 4), bool)), dict(bias=numpy.zeros((3, 4), "float32")),
         dict(bias=numpy.zeros((4, 4), "int32")), dict(mask=numpy.ones((4, 4), "float32")),
         dict(mask=numpy.ones((4, 4), "uint8")), dict(mask=numpy.ones((3, 4), bool)),
         dict(mask=numpy.ones((1, 1, 1, 4, 4), bool)),
         dict(mask=numpy.ones((4, 4), bool), bias=numpy.zeros((3, 4), "float32")),
         dict(mask=numpy.ones((4, 4), bool), bias=numpy.zeros((4, 4), "int32")), dict(alibi_slopes=numpy.zeros(3, "float32")),
         dict(alibi_slopes=numpy.zeros(2, "float64")), dict(sinks=numpy.zeros(3, "float32")),
         dict(sinks=numpy.zeros((2, 1), "float32"))]
Q = numpy.ones((1, 4, 2, 8), "float32")
TENSORS = {"integers": (Q.astype("int32"),) * 3, "another dtype of v": (Q, Q, Q.astype("float64")),
           "3 dimensions": (Q[0], Q, Q), "another head_dim of k": (Q, Q[..., :4], Q),
           "no heads of k": (Q, Q[:, :, :0], Q[:, :, :0])}


def tensor(value):
    return torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value


def error_of(function, *tensors, **keywords):
    with pytest.raises(ValueError) as error:
        function(*tensors, **keywords)
    return type(error.value), str(error.value)


@pytest.mark.parametrize("keywords", WRONG, ids=lambda k: f"{list(k)[0]} {str(list(k.values())[0])[:20]!r}")
def test_wrong_arguments_have_the_same_errors(keywords):
    of_torch = {name: tensor(value) for name, value in keywords.items()}
    want = error_of(tessera.attention, Q, Q, Q, **keywords)
    assert error_of(tt.attention, *map(tensor, (Q, Q, Q)), **of_torch) == want


@pytest.mark.parametrize("kind", TENSORS)
def test_wrong_tensors_have_the_same_errors(kind):
    assert error_of(tessera.attention, *TENSORS[kind]) == error_of(tt.attention, *map(tensor, TENSORS[kind]))


@pytest.mark.parametrize("seed", [0.5, "1", -2**63 - 1, 2**64])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_wrong_seeds(seed, dropout_p):
    """A tensor is a seed for PyTorch only."""
    kind, text = error_of(tessera.attention, Q, Q, Q, dropout_p=dropout_p, seed=seed)
    of_torch = error_of(tt.attention, *map(tensor, (Q, Q, Q)), dropout_p=dropout_p, seed=seed)
    assert of_torch == (kind, text.replace("64 bits", "64 bits or a tensor with one"))


@pytest.mark.parametrize("seed", [0, 7, -1, -2**63, 2**63, 2**64 - 1])
def test_a_seed_draws_the_same_numbers(seed):
    values = numpy.random.default_rng(1).standard_normal((2, 9, 2, 8)).astype("float32")
    got = tt.attention(*(tensor(values) for _ in range(3)), dropout_p=0.5, seed=seed)
    assert numpy.array_equal(tessera.attention(values, values, values, dropout_p=0.5, seed=seed), got.numpy())
