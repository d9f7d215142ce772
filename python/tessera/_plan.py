# SPDX-License-Identifier: Apache-2.0
"""plan() and predict(): the kernel and the time of a call, without running it."""
from __future__ import annotations

import ctypes
import typing
from typing import Any

from . import _layout, _native
from ._arrays import NAMES, expect
from ._attention import scores_of
from ._problem import Call


class Refusal(typing.NamedTuple):
    kernel: str
    reason: str
    capable: bool  # the kernel could run the problem, but another one comes first or was named


class Prediction(typing.NamedTuple):
    machine: str
    schedule: str
    ms: float
    tflops: float  # counting visible pairs only
    bound: str  # the nearest roof, or the part that takes most of the time
    percent_of_bound: float
    error: float = 0.0  # nine of ten measured times lie between ms / (1 + error) and ms * (1 + error)


class Plan(typing.NamedTuple):
    """The plan of a call; str() gives it as text."""
    kernel: str
    target: str  # instruction set or device
    matrix_unit: str  # "AMX"; "": none
    block_q: int
    block_kv: int
    threads: int
    workspace_bytes: int
    predicted: typing.Optional[Prediction]  # None: the model does not know this machine
    refused: typing.Tuple[Refusal, ...]
    text: str
    layout: str = ""  # rows in CUDA memory that the kernel can't read, and what happens then; "": it reads all

    def __str__(self) -> str:
        return self.text


def plan(q: Any, k: Any, v: Any, *, backward: bool = False, bias_gradient: bool = False, **scores: Any) -> Plan:
    """The kernel that would run the call, its tile, threads and time, and why no other kernel runs. Nothing is
    computed.

    q, k, v and the keywords as in attention(); a tessera.Spec stands for an array. seed and deterministic change no plan.
    The time is predicted if the model knows this machine; predict() takes other machines.
    Raises ValueError as attention() does, and tessera.Unsupported with every kernel's reason when none would run it.
    """
    call = Call(q, k, v, scores_of("plan", scores), backward=backward, bias_gradient=bias_gradient, specs=True)
    _expect_inputs(call)
    library, planned = _native.library(), _planned(call)
    info = _native.sized(_native.PlanInfo)
    _native.check(library.tessera_plan_query(*planned, ctypes.byref(info)))
    refusals = []
    for index in range(info.refused):
        refusal = _native.sized(_native.Refusal)
        _native.check(library.tessera_plan_refusal(*planned, index, ctypes.byref(refusal)))
        refusals.append(Refusal(refusal.kernel.decode(), refusal.reason.decode(), bool(refusal.capable)))
    kernel = info.kernel.decode()
    layout = _layout.remark(call, kernel, next((r.kernel for r in refusals if r.capable), None))
    text = _text(planned)
    if layout:
        text = f"{text.rstrip()}\n{layout}\n"
    return Plan(kernel, info.target.decode(), info.matrix_unit.decode(), info.block_q, info.block_kv, info.threads,
                info.workspace_bytes, _prediction_of(call, kernel, info), tuple(refusals), text, layout)


def predict(q: Any, k: Any, v: Any, *, machine: str, schedule: str | None = None, backward: bool = False,
            **scores: Any) -> Prediction:
    """The time of a call on a machine, which need not be this one, by the cost model of docs/model.md.

    q, k, v and the keywords as in plan(). machine: a name that `tessera roofline --help` lists, such as
    "h200". schedule: "standard", "fa1", "fa2" or "fa3"; default: the fastest. threads: of a CPU; default: its cores.
    The model counts no time for a scale, a softcap, alibi_slopes and sinks, nor do seed and deterministic change it.
    A ragged batch counts as sequences of the lengths max_len_q and max_len_kv.
    Raises ValueError naming the argument, and tessera.Unsupported where there is no prediction.
    """
    call = Call(q, k, v, scores_of("predict", scores), backward=backward, specs=True)
    _expect_inputs(call)
    if schedule is not None and schedule not in _native.SCHEDULES:
        expect("schedule", " or ".join(_native.SCHEDULES), repr(schedule))
    if not 0 <= call.options.threads <= 1024:
        expect("threads", "0..1024", call.options.threads)
    return _predict(call, machine, _native.SCHEDULES.get(schedule, 0))


def _expect_inputs(call: Call) -> None:
    """The checks of attention() that need the shapes and dtypes of arrays, which no plan has."""
    problem, inputs = call.problem, call.inputs
    batch = () if call.ragged else (problem.batch,)
    rows = (inputs["k"].shape[0],) if call.ragged else (problem.batch, problem.len_kv)
    for name, array, sizes in (("k", call.k, (*rows, problem.heads_kv, problem.head_dim)),
                               ("v", call.v, (*rows, problem.heads_kv, problem.head_dim_v))):
        shape = [0] * len(sizes)
        for place, dimension in enumerate(call.order):
            shape[dimension] = sizes[place]
        if list(array.shape) != shape:
            expect(name, f"shape {shape}", list(array.shape))
        if array.dtype != call.q.dtype:
            expect(name, f"dtype {NAMES[call.q.dtype]}, as q has", NAMES[array.dtype])
    of_heads = [[problem.heads_q]]
    for name, shapes in (("alibi_slopes", of_heads + [[problem.batch, problem.heads_q]]), ("sinks", of_heads)):
        if name in inputs:
            _expect_one(name, inputs[name], shapes, [_native.FP32])
    if "bias" in inputs:
        tensor, full = inputs["bias"], [*batch, problem.heads_q, problem.len_q, problem.len_kv]
        if not all(size in (1, wanted) for size, wanted in zip(tensor.shape[:tensor.rank], full)):
            expect("bias", f"a shape that broadcasts to {full}", tensor.shape[:tensor.rank])
        _expect_dtype("bias", tensor, [_native.FP32, call.q.dtype])
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if name in inputs:
            _expect_one(name, inputs[name], [[problem.batch + 1]], [_native.INT32, _native.INT64])


def _expect_one(name, tensor, shapes, dtypes):
    shape = list(tensor.shape[:tensor.rank])
    if shape not in shapes:
        expect(name, "shape " + " or ".join(map(str, shapes)), shape)
    _expect_dtype(name, tensor, dtypes)


def _expect_dtype(name, tensor, dtypes):
    if tensor.dtype not in dtypes:
        expect(name, "dtype " + " or ".join(dict.fromkeys(NAMES[dtype] for dtype in dtypes)), NAMES[tensor.dtype])


def _planned(call: Call):
    return ctypes.byref(call.problem), ctypes.byref(call.options), call.pass_code()


def _predict(call: Call, machine, schedule, tile=(0, 0), threads=None) -> Prediction:
    if machine is not None and not isinstance(machine, str):
        expect("machine", "a name", repr(machine))
    options = _native.sized(_native.Options)
    options.backend, options.schedule, options.kernel = call.options.backend, schedule, call.options.kernel
    options.block_q, options.block_kv = tile
    options.threads = call.options.threads if threads is None else threads
    result = _native.sized(_native.Prediction)
    _native.check(_native.library().tessera_predict(
        ctypes.byref(call.problem), ctypes.byref(options), call.pass_code(),
        None if machine is None else machine.encode(), ctypes.byref(result)))
    names = {code: name for name, code in _native.SCHEDULES.items()}
    return Prediction(result.machine.decode(), names[result.schedule], result.ms, result.tflops,
                      result.bound.decode(), result.percent_of_bound, result.error)


def _prediction_of(call: Call, kernel, info):
    """The prediction for the chosen kernel, or None if the model does not know the machine."""
    schedule = _native.SCHEDULES.get(kernel.split(".")[1])
    try:
        return schedule and _predict(call, None, schedule, (info.block_q, info.block_kv), info.threads)
    except _native.Unsupported:
        return None


def _text(planned) -> str:
    library, needed = _native.library(), ctypes.c_size_t()
    _native.check(library.tessera_plan_describe(*planned, None, 0, ctypes.byref(needed)))
    text = ctypes.create_string_buffer(needed.value)
    _native.check(library.tessera_plan_describe(*planned, text, needed, None))
    return text.value.decode()
