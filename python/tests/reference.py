# SPDX-License-Identifier: Apache-2.0
"""The reference for the tests of the core: docs/numerics.md in NumPy's fp64, with its limits. Shapes are those of
attention()."""
import numpy

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}


def visible(len_q, len_kv, causal, window):
    """bool [len_q, len_kv]."""
    i, j = numpy.arange(len_q)[:, None], numpy.arange(len_kv)[None, :]
    diagonal = i + len_kv - len_q
    seen = numpy.ones((len_q, len_kv), bool)
    if causal is not None:
        seen &= j <= (diagonal if causal == "bottom-right" else i)
    left, right = window or (None, None)
    if left is not None:
        seen &= j >= diagonal - left
    if right is not None:
        seen &= j <= diagonal + right
    return seen


class Reference:
    """o, lse, and the sums of absolute values `o_terms`; gradients by backward()."""

    def __init__(self, q, k, v, causal=None, window=None, scale=None, softcap=0.0, alibi_slopes=None, bias=None,
                 mask=None, sinks=None):
        q, k, v = (a.astype(numpy.float64) for a in (q, k, v))
        self.group = q.shape[2] // k.shape[2]
        self.q, self.k, self.v = q, numpy.repeat(k, self.group, 2), numpy.repeat(v, self.group, 2)
        self.scale = q.shape[3] ** -0.5 if scale is None else scale
        s = self.scale * numpy.einsum("bihc,bjhc->bhij", q, self.k)
        self.slope = numpy.full_like(s, self.scale)
        if softcap:
            tanh = numpy.tanh(s / softcap)
            s, self.slope = softcap * tanh, self.scale * (1 - tanh**2)
        if alibi_slopes is not None:
            i, j = numpy.arange(s.shape[2])[:, None], numpy.arange(s.shape[3])[None, :]
            slopes = numpy.broadcast_to(alibi_slopes.astype(numpy.float64), (s.shape[0], s.shape[1]))
            s = s - slopes[:, :, None, None] * abs(i + s.shape[3] - s.shape[2] - j)
        if bias is not None:
            s = s + bias.astype(numpy.float64)
        s = numpy.where(visible(*s.shape[2:], causal, window) & (True if mask is None else mask), s, -numpy.inf)
        sink = numpy.full(s.shape[1], -numpy.inf) if sinks is None else sinks.astype(numpy.float64)
        sink = numpy.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))
        highest = numpy.maximum(s.max(axis=3, keepdims=True, initial=-numpy.inf), sink)
        weights = numpy.exp(s - numpy.where(numpy.isfinite(highest), highest, 0))
        of_sink = numpy.exp(sink - numpy.where(numpy.isfinite(highest), highest, 0))
        total = weights.sum(axis=3, keepdims=True) + of_sink
        self.p = numpy.divide(weights, total, out=numpy.zeros_like(weights), where=total > 0)
        with numpy.errstate(divide="ignore"):
            self.lse = (numpy.log(total) + highest)[..., 0]
            self.p_sink = numpy.divide(of_sink, total, out=numpy.zeros_like(total), where=total > 0)[..., 0]
        self.o = numpy.einsum("bhij,bjhc->bihc", self.p, self.v)
        self.o_terms = numpy.einsum("bhij,bjhc->bihc", self.p, abs(self.v))

    def backward(self, do, dlse=None):
        """dq, dk, dv, and dbias before sizes 1 are summed over."""
        do = do.astype(numpy.float64)
        dp = numpy.einsum("bihc,bjhc->bhij", do, self.v)
        delta = (self.p * dp).sum(axis=3, keepdims=True)
        if dlse is not None:
            delta = delta - dlse.astype(numpy.float64)[..., None]
        ds = self.p * (dp - delta)
        self.dsinks = -(self.p_sink * delta[..., 0]).sum(axis=(0, 2))
        dq = numpy.einsum("bhij,bjhc->bihc", ds * self.slope, self.k)
        dk = numpy.einsum("bhij,bihc->bjhc", ds * self.slope, self.q)
        dv = numpy.einsum("bhij,bihc->bjhc", self.p, do)
        return dq, self._summed(dk), self._summed(dv), ds

    def _summed(self, d):
        batch, length, heads, dim = d.shape
        return d.reshape(batch, length, heads // self.group, self.group, dim).sum(axis=3)


def relative_rmse(got, expected):
    error = numpy.sqrt(numpy.mean((numpy.asarray(got).astype(numpy.float64) - expected) ** 2))
    return error / max(numpy.sqrt(numpy.mean(expected**2)), 1e-30)


def check_o(o, ref, dtype):
    """fp32: the RMSE rule. bf16, fp16: the rule for each element, P and O rounded once each."""
    assert o.shape == ref.o.shape and o.dtype.name == dtype
    if dtype in ("float32", "float64"):
        limit = 2e-6 if dtype == "float32" else 1e-14
        assert relative_rmse(o, ref.o) <= limit * (1 + 4 / numpy.sqrt(o.size))
        return
    limit = (1.5 * 2 * UNIT[dtype] + 8 * 2.0**-24) * ref.o_terms + 1e-7
    worst = (abs(o.astype(numpy.float64) - ref.o) / limit).max()
    assert worst <= 1, f"an error of O is {worst:.3g} of what is allowed"


def check_lse(lse, ref):
    assert lse.shape == ref.lse.shape and lse.dtype.name in ("float32", "float64")
    finite = numpy.isfinite(ref.lse)
    assert (lse[~finite] == ref.lse[~finite]).all(), "rows without a key have LSE -inf"
    assert (abs(lse[finite] - ref.lse[finite]) <= 2e-6 + 2.0**-20 * abs(ref.lse[finite])).all()


def check_gradient(name, got, expected, dtype):
    """RMSE: fp32 by the page's limit; bf16 and fp16 by four roundings of the result, dS and P."""
    assert got.shape == expected.shape
    limit = {"float32": 1e-5, "float64": 1e-13}.get(dtype, 4 * UNIT[dtype]) * (1 + 4 / numpy.sqrt(got.size))
    error = relative_rmse(got, expected)
    assert error <= limit, f"{name}: relative RMSE {error:.3g}, at most {limit:.3g} is allowed"
