# SPDX-License-Identifier: Apache-2.0
"""Binds tessera's C ABI (include/tessera/tessera.h) for the comparisons: tensors in, a callable out. `prepare` takes torch's
tensors; `bind` takes views of the caller's memory and needs no torch."""
import ctypes as c
import os
import pathlib
import re

try:
    import torch
except ImportError:
    torch = None

FORWARD, BACKWARD = 0, 1
CUDA = 2  # backend
FP32, FP16, BF16, INT32, INT8 = 1, 2, 3, 4, 6
HEADER = pathlib.Path(__file__).parents[2] / "include/tessera/tessera.h"
SCHEDULES = {name.lower(): int(value) for name, value in re.findall(r"TESSERA_SCHEDULE_(\w+) = (\d+)", HEADER.read_text())}
DTYPES = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16, torch.int8: INT8, torch.int32: INT32} if torch else {}


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", c.c_int32), ("rank", c.c_int32), ("shape", c.c_int64 * 4),
                ("strides", c.c_int64 * 4), ("device_type", c.c_int32), ("device_index", c.c_int32)]


TYPES = {"size_t": c.c_size_t, "int32_t": c.c_int32, "int64_t": c.c_int64, "uint64_t": c.c_uint64, "double": c.c_double,
         "tessera_tensor": Tensor}


def struct_of(name, header=HEADER):
    """The ctypes struct of this name, read from a header."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", text, re.DOTALL)[1]
    fields = re.findall(r"(\w+)\s+(\w+)\s*;", body)
    return type(name, (c.Structure,), {"_fields_": [(field, TYPES[kind]) for kind, field in fields]})


Problem = struct_of("tessera_problem")
ForwardArgs = struct_of("tessera_forward_args")
BackwardArgs = struct_of("tessera_backward_args")


class Options(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("backend", c.c_int32), ("schedule", c.c_int32), ("kernel", c.c_char_p),
                ("block_q", c.c_int64), ("block_kv", c.c_int64), ("threads", c.c_int32), ("reserved", c.c_int32),
                ("parallel_for", c.c_void_p), ("parallel_for_context", c.c_void_p)]


def view(t):
    """[batch, heads, len, dim] -> [batch, len, heads, dim] by strides; LSE stays [batch, heads, len]."""
    if t.dim() == 4:
        t = t.transpose(1, 2)
    pad = [0] * (4 - t.dim())
    on_cuda = t.device.type == "cuda"
    return Tensor(t.data_ptr(), DTYPES[t.dtype], t.dim(), (c.c_int64 * 4)(*t.shape, *pad),
                  (c.c_int64 * 4)(*t.stride(), *pad), int(on_cuda), t.device.index if on_cuda else 0)


class PlanInfo(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("kernel", c.c_char_p), ("block_q", c.c_int64), ("block_kv", c.c_int64),
                ("workspace_bytes", c.c_size_t), ("threads", c.c_int32), ("refused", c.c_int32), ("target", c.c_char * 128),
                ("matrix_unit", c.c_char * 32), ("o_residual", c.c_int32), ("reserved", c.c_int32)]


class Library:
    """tessera as a shared library (cmake -DBUILD_SHARED_LIBS=ON)."""

    def __init__(self, path):
        self.lib = c.CDLL(os.path.abspath(path))
        self.lib.tessera_last_error.restype = c.c_char_p
        self.lib.tessera_version.restype = c.c_char_p

    def version(self):
        return self.lib.tessera_version().decode()

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.tessera_last_error().decode())

    def problem(self, shape):
        """shape: fields of a tessera_problem that are not the default."""
        problem = Problem()
        self.check(self.lib.tessera_problem_init(c.byref(problem), c.sizeof(problem)))
        for name, value in shape.items():
            setattr(problem, name, value)
        return problem

    def workspace_bytes(self, problem, options, direction):
        size = c.c_size_t()
        self.check(self.lib.tessera_workspace_bytes(c.byref(problem), c.byref(options), direction, c.byref(size)))
        return size.value

    def plan(self, shape, options, direction):
        info = PlanInfo(struct_size=c.sizeof(PlanInfo))
        self.check(self.lib.tessera_plan_query(c.byref(self.problem(shape)), c.byref(options), direction, c.byref(info)))
        return info

    def bind(self, problem, options, direction, views, workspace, size, stream=None, keep=()):
        """Returns a function that runs one call. views: a Tensor by argument; workspace: an address, a multiple of 64."""
        kind = ForwardArgs if direction == FORWARD else BackwardArgs
        args = kind(struct_size=c.sizeof(kind), **views)
        run = self.lib.tessera_forward if direction == FORWARD else self.lib.tessera_backward
        keep = (problem, options, args, keep)
        address, size = c.c_void_p(workspace), c.c_size_t(size)

        def call():
            self.check(run(c.byref(keep[0]), c.byref(keep[1]), c.byref(keep[2]), address, size, stream))
        return call

    def prepare(self, shape, options, direction, tensors):
        """Returns a function that runs one call. shape: fields of a tessera_problem; tensors: torch's, [batch, heads, len,
        head_dim] (LSE [batch, heads, len]), all on one device. CUDA work is queued on torch's current stream."""
        problem = self.problem(shape)
        size = self.workspace_bytes(problem, options, direction)
        device = tensors["q"].device
        memory = torch.empty(size + 64, dtype=torch.uint8, device=device)
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream) if device.type == "cuda" else None
        return self.bind(problem, options, direction, {name: view(t) for name, t in tensors.items()},
                         (memory.data_ptr() + 63) // 64 * 64, size, stream, (memory, tensors))
