# SPDX-License-Identifier: Apache-2.0
"""Turns the arguments of a call into the problem, options and tensors of the C ABI."""
from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import SupportsIndex

from . import _masks, _native
from ._arrays import (DLPACK_CUDA, DTYPES, FLOATING, NAMES, Array, borrow, dense_strides, dlpack_device, dtypes_of,
                      expect, expect_bool_of_masks)
from ._results import dlpack_stream, stream_of

_CAUSAL = {None: 0, False: 0, "bottom-right": 1, "top-left": 2}
# Dimensions of the caller's array in the order of the C ABI: batch, len, heads, head_dim | total, heads, head_dim.
_ORDERS = {("bshd", False): (0, 1, 2, 3), ("bhsd", False): (0, 2, 1, 3),
           ("bshd", True): (0, 1, 2), ("bhsd", True): (1, 0, 2)}
_SHAPES = {("bshd", False): "[batch, len, heads, head_dim]", ("bhsd", False): "[batch, heads, len, head_dim]",
           ("bshd", True): "[total, heads, head_dim]", ("bhsd", True): "[heads, total, head_dim]"}


class Spec:
    """A shape, dtype and device that stand for an array in plan() and predict(); nothing is allocated.

    dtype: "float32", "bfloat16", "float16", "float64", or "bool" of a mask. device: "cpu", "cuda" or "cuda:1".
    """

    def __init__(self, shape: Iterable[SupportsIndex], dtype: str = "float32", device: str = "cpu") -> None:
        if dtype not in DTYPES:
            expect("dtype", " or ".join(DTYPES), repr(dtype))
        kind, _, index = device.partition(":")
        if kind not in ("cpu", "cuda") or not (index or "0").isdigit():
            expect("device", "cpu, cuda or cuda:INDEX", repr(device))
        shape = tuple(operator.index(size) for size in shape)
        place = (_native.CUDA if kind == "cuda" else _native.CPU, int(index or 0))
        self.array = ("", self, None, DTYPES[dtype], shape, dense_strides(shape), place, True, None)


def number(name, value) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        shown = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
        expect(name, "a number that is finite in fp32", shown)


def integer(name, value) -> int:
    """`value` as an int. Raises ValueError for what is none, and for a bool, which Python would take for 0 or 1."""
    try:
        if isinstance(value, bool):
            raise TypeError
        value = operator.index(value)
    except TypeError:
        expect(name, "an integer", repr(value))
    if not -2**63 <= value < 2**63:
        expect(name, "an integer of 64 bits", value)
    return value


def thread_count(threads) -> int:
    """The threads of the options, in which None is 0."""
    threads = 0 if threads is None else integer("threads", threads)
    if not -2**31 <= threads < 2**31:  # the library refuses the others
        expect("threads", "0..1024", threads)
    return threads


def _window(window):
    if window is None:
        return _native.UNBOUNDED, _native.UNBOUNDED
    try:
        left, right = window
    except (TypeError, ValueError):
        expect("window", "None or (left, right)", repr(window))
    return _side(left), _side(right)


def _side(side):
    if side is None:
        return _native.UNBOUNDED
    try:
        keys = operator.index(side)
    except TypeError:
        keys = -1
    if keys < 0:
        expect("window", "an integer from 0 on or None", repr(side))
    return integer("window", keys)


def _seed(seed) -> int:
    try:
        seed = operator.index(seed)
    except TypeError:
        expect("seed", "an integer of 64 bits", repr(seed))
    if not -2**63 <= seed < 2**64:
        expect("seed", "an integer of 64 bits", seed)
    return seed % 2**64


class Call:
    """The problem, options and borrowed inputs of one call. scores: the keyword arguments that attention() names.
    specs: whether a Spec may stand for an array."""

    def __init__(self, q, k, v, scores, backward=False, stream=None, bias_gradient=False, specs=False):
        self.backward, self._specs = backward, specs
        self.stream = None
        stream = None if stream is None else integer("stream", stream)
        self.q = self.borrow("q", q, stream)  # sets self.stream for the other arrays
        if stream is not None and self.q.device[0] != _native.CUDA:
            expect("stream", "None for arrays of the host", stream)
        self.k, self.v = self.borrow("k", k), self.borrow("v", v)
        self.ragged = scores["cu_seqlens_q"] is not None or scores["cu_seqlens_kv"] is not None
        layout = scores["layout"]
        if (layout, self.ragged) not in _ORDERS:
            expect("layout", "'bshd' or 'bhsd'", repr(layout))
        self.order, self._meaning = _ORDERS[layout, self.ragged], _SHAPES[layout, self.ragged]
        self.inputs = {"q": self.laid_out(self.q), "k": self.laid_out(self.k), "v": self.laid_out(self.v)}
        self.problem = _native.new_problem()
        self._set_sizes()
        self._set_scores(scores)
        self._set_lengths(scores)
        self._set_bias(scores, bias_gradient, stream)
        self.options = self._options(scores)

    def borrow(self, name, source, stream=None) -> Array:
        """Borrows an input, which must be on the device of q."""
        if isinstance(source, Spec) and self._specs:
            array = Array(*source.array)
            array.name = name
            expect_bool_of_masks(array)
        else:
            on_cuda = hasattr(source, "__dlpack_device__") and dlpack_device(name, source)[0] in DLPACK_CUDA
            if on_cuda and name == "q":
                self.stream = stream_of(source, stream)
            array = borrow(name, source, dlpack_stream(self.stream) if on_cuda and self.stream is not None else None)
        if name != "q" and array.device != self.q.device:
            expect(name, f"an array on {device_name(self.q.device)}, where q is", f"one on {device_name(array.device)}")
        return array

    def laid_out(self, array: Array) -> _native.Tensor:
        """The tensor of an array in the caller's layout, with its dimensions in the order of the C ABI."""
        if len(array.shape) != len(self.order):
            expect(array.name, f"{len(self.order)} dimensions ({self._meaning})", len(array.shape))
        return array.tensor(self.order)

    def _set_sizes(self):
        problem, inputs = self.problem, self.inputs
        if self.q.dtype not in FLOATING:
            expect("q", f"dtype {dtypes_of('q')}", NAMES[self.q.dtype])
        problem.dtype = self.q.dtype
        problem.ragged = int(self.ragged)
        heads = 1 if self.ragged else 2
        problem.heads_q, problem.head_dim = inputs["q"].shape[heads], inputs["q"].shape[heads + 1]
        problem.heads_kv, problem.head_dim_v = inputs["k"].shape[heads], inputs["v"].shape[heads + 1]
        if not self.ragged:
            problem.batch = inputs["q"].shape[0]
            problem.len_q, problem.len_kv = inputs["q"].shape[1], inputs["k"].shape[1]

    def _set_scores(self, scores):
        problem = self.problem
        causal = scores["causal"]
        if not (causal is None or isinstance(causal, (str, bool))) or causal not in _CAUSAL:
            expect("causal", "None, 'bottom-right' or 'top-left'", repr(causal))
        problem.causal = _CAUSAL[causal]
        problem.window_left, problem.window_right = _window(scores["window"])
        if scores["scale"] is not None:
            problem.scale = number("scale", scores["scale"])
            if not math.isfinite(problem.scale):
                expect("scale", "a number that is finite in fp32", problem.scale)
        problem.softcap = number("softcap", scores["softcap"])
        problem.dropout_probability = number("dropout_p", scores["dropout_p"])
        if not 0 <= problem.dropout_probability < 1:
            expect("dropout_p", "a probability in [0, 1)", f"{problem.dropout_probability:g}")
        problem.dropout_seed = _seed(scores["seed"])
        if scores["alibi_slopes"] is not None:
            self.inputs["alibi_slopes"] = self.borrow("alibi_slopes", scores["alibi_slopes"]).tensor()
            problem.alibi = 1
        if scores["sinks"] is not None:
            self.sinks = self.borrow("sinks", scores["sinks"])
            self.inputs["sinks"] = self.sinks.tensor()
            problem.sinks = 1

    def _set_lengths(self, scores):
        if not self.ragged:
            for name in ("max_len_q", "max_len_kv"):
                if scores[name] is not None:
                    expect(name, "None without cu_seqlens", repr(scores[name]))
            return
        problem = self.problem
        for side, tensor in (("q", self.inputs["q"]), ("kv", self.inputs["k"])):
            name = f"cu_seqlens_{side}"
            if scores[name] is None:
                expect(name, "an array, since the other one is given", "None")
            lengths = self.borrow(name, scores[name])
            self.inputs[name] = lengths.tensor()
            if len(lengths.shape) != 1 or lengths.shape[0] < 1:
                expect(name, "shape [batch + 1]", list(lengths.shape))
            setattr(problem, f"total_{side}", tensor.shape[0])
            # Lengths in CUDA memory are not read here; the total is an upper bound of each.
            bound = scores[f"max_len_{side}"]
            setattr(problem, f"len_{side}", tensor.shape[0] if bound is None else integer(f"max_len_{side}", bound))
            problem.batch = lengths.shape[0] - 1

    def _set_bias(self, scores, bias_gradient, stream):
        """bias: the caller's; made_bias: the one that it and a mask make together, or None."""
        problem, self.bias, self.made_bias = self.problem, None, None
        if scores["bias"] is not None:
            if str(getattr(scores["bias"], "dtype", "")).endswith("bool"):
                expect("bias", "float32 or the dtype of q, numbers that are added to the scores",
                       "bool; mask= takes one, True where the key takes part")
            self.bias = self.borrow("bias", scores["bias"])
            self.inputs["bias"] = self.bias.padded().tensor()
        mask = None if scores["mask"] is None else self.borrow("mask", scores["mask"])
        problem.bias, problem.bias_gradient = int(self.bias is not None or mask is not None), int(bias_gradient)
        if mask is None:
            return
        full = problem.batch, problem.heads_q, problem.len_q, problem.len_kv
        if self._specs:  # nothing is computed
            _masks.expect_broadcasts(mask.padded(), full)
            return
        self.made_bias = _masks.bias_of(mask, self.bias, self.q, full, bias_gradient, self.stream, stream)
        self.inputs["bias"] = self.made_bias.padded().tensor()

    def _options(self, scores) -> _native.Options:
        options = _native.sized(_native.Options)
        if self.q.device[0] == _native.CUDA:
            options.backend = _native.BACKENDS["cuda"]
        options.threads = thread_count(scores["threads"])
        if scores["kernel"] is not None:
            if not isinstance(scores["kernel"], str):
                expect("kernel", "a name or None", repr(scores["kernel"]))
            ending = ".backward" if self.backward else ".forward"
            of_this_pass = [name for name in _native.kernel_names() if name.endswith(ending)]
            name = scores["kernel"].removesuffix(ending) + ending
            if name not in of_this_pass:
                expect("kernel", f"one of {', '.join(of_this_pass)}, or one without its pass", repr(scores["kernel"]))
            options.kernel = name.encode()
        return options

    def pass_code(self) -> int:
        return _native.BACKWARD if self.backward else _native.FORWARD


def device_name(device) -> str:
    return f"cuda:{device[1]}" if device[0] == _native.CUDA else "the host"
