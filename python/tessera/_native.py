# SPDX-License-Identifier: Apache-2.0
"""libtessera through ctypes: the path of the library, its structs, and its status codes as exceptions."""
import ctypes
import functools
import os
import pathlib

FP64, FP32, FP16, BF16, INT32, INT64, INT8 = range(7)
CPU, CUDA = 0, 1
FORWARD, BACKWARD = 0, 1
SCHEDULES = {"standard": 1, "fa1": 2, "fa2": 3, "fa3": 4}
BACKENDS = {"cpu": 1, "cuda": 2, "reference": 3}
UNBOUNDED = 2**63 - 1
WORKSPACE_ALIGNMENT = 64
MAX_RANK = 4

INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, DEVICE_UNAVAILABLE = 1, 2, 4, 8


class Unsupported(ValueError):
    """No kernel runs a valid call with these options; the message has every kernel's reason."""


class DeviceUnavailable(RuntimeError):
    """The arrays are on a device for which this build or this machine has no kernels."""


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("rank", ctypes.c_int32),
                ("shape", ctypes.c_int64 * MAX_RANK), ("strides", ctypes.c_int64 * MAX_RANK),
                ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32)]


class Options(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("backend", ctypes.c_int32), ("schedule", ctypes.c_int32),
                ("kernel", ctypes.c_char_p), ("block_q", ctypes.c_int64), ("block_kv", ctypes.c_int64),
                ("threads", ctypes.c_int32), ("reserved", ctypes.c_int32), ("parallel_for", ctypes.c_void_p),
                ("parallel_for_context", ctypes.c_void_p)]


_TYPES = {"size_t": ctypes.c_size_t, "int32": ctypes.c_int32, "int64": ctypes.c_int64, "uint64": ctypes.c_uint64,
          "double": ctypes.c_double, "tensor": Tensor}
_STRUCTS = {"Problem": "tessera_problem", "ForwardArgs": "tessera_forward_args",
            "BackwardArgs": "tessera_backward_args", "AppendArgs": "tessera_append_args",
            "DecodeBlockProblem": "tessera_decode_block_problem", "DecodeBlockArgs": "tessera_decode_block_args"}


def __getattr__(name):
    """Problem, ForwardArgs and the other structs of _STRUCTS, with the fields that the library says they have."""
    if name not in _STRUCTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _struct(library(), name)


@functools.lru_cache(maxsize=None)
def _struct(lib, name):
    lib.tessera_struct_fields.restype = ctypes.c_char_p
    fields = [field.split(":") for field in lib.tessera_struct_fields(_STRUCTS[name].encode()).decode().split()]
    return type(name, (ctypes.Structure,), {"_fields_": [(field, _TYPES[kind]) for field, kind in fields]})


class PlanInfo(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("kernel", ctypes.c_char_p), ("block_q", ctypes.c_int64),
                ("block_kv", ctypes.c_int64), ("workspace_bytes", ctypes.c_size_t), ("threads", ctypes.c_int32),
                ("refused", ctypes.c_int32), ("target", ctypes.c_char * 128), ("matrix_unit", ctypes.c_char * 32),
                ("o_residual", ctypes.c_int32), ("reserved", ctypes.c_int32)]


class Refusal(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("kernel", ctypes.c_char_p), ("capable", ctypes.c_int32),
                ("reason", ctypes.c_char * 500)]


class DecodeBlockInfo(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("workspace_bytes", ctypes.c_size_t),
                ("counter_bytes", ctypes.c_size_t), ("attention", ctypes.c_char_p), ("way", ctypes.c_int32),
                ("threads", ctypes.c_int32), ("refused", ctypes.c_char * 500)]


class Prediction(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("schedule", ctypes.c_int32), ("reserved", ctypes.c_int32),
                ("ms", ctypes.c_double), ("tflops", ctypes.c_double), ("percent_of_bound", ctypes.c_double),
                ("bound", ctypes.c_char * 64), ("machine", ctypes.c_char * 64), ("error", ctypes.c_double)]


class Ranks(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("ranks", ctypes.c_int32), ("nccl", ctypes.c_int32),
                ("steps", ctypes.c_int32), ("o_residual", ctypes.c_int32), ("lengths", ctypes.POINTER(ctypes.c_int64)),
                ("documents", ctypes.c_int64)]


class RanksPrediction(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("schedule", ctypes.c_int32), ("steps", ctypes.c_int32),
                *((name, ctypes.c_double) for name in ("ms", "error", "one_gpu_ms", "kernel_ms", "exchange_ms",
                                                       "hidden_ms")),
                ("bytes_received", ctypes.c_int64), ("memory", ctypes.c_int64)]


def library_dir() -> pathlib.Path:
    """The folder of libtessera and its companions: lib/ of the package, or TESSERA_LIBRARY_DIR."""
    folder = os.environ.get("TESSERA_LIBRARY_DIR")
    return pathlib.Path(folder) if folder else pathlib.Path(__file__).parent / "lib"


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """libtessera, loaded once. Raises ImportError that says what is missing."""
    path = library_dir() / "libtessera.so"
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"libtessera can't be loaded from {path}: {error}; `python -m tessera doctor` says more"
                          ) from error
    pointer, size = ctypes.POINTER, ctypes.c_size_t
    problem, forward, backward, append, block, block_args = (pointer(_struct(lib, name)) for name in _STRUCTS)
    for name in ("tessera_version", "tessera_last_error", "tessera_last_error_argument"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.tessera_kernel_count.restype = size
    lib.tessera_kernel_name.restype = ctypes.c_char_p
    lib.tessera_kernel_name.argtypes = [size]
    lib.tessera_problem_init.argtypes = [problem, size]
    planned = [problem, pointer(Options), ctypes.c_int32]
    lib.tessera_workspace_bytes.argtypes = planned + [pointer(size)]
    lib.tessera_plan_describe.argtypes = planned + [ctypes.c_char_p, size, pointer(size)]
    lib.tessera_plan_query.argtypes = planned + [pointer(PlanInfo)]
    lib.tessera_plan_refusal.argtypes = planned + [ctypes.c_int32, pointer(Refusal)]
    lib.tessera_predict.argtypes = planned + [ctypes.c_char_p, pointer(Prediction)]
    lib.tessera_predict_ranks.argtypes = [problem, pointer(Ranks), ctypes.c_int32, ctypes.c_char_p,
                                          pointer(RanksPrediction)]
    run = [ctypes.c_void_p, size, ctypes.c_void_p]
    lib.tessera_forward.argtypes = [problem, pointer(Options), forward] + run
    lib.tessera_backward.argtypes = [problem, pointer(Options), backward] + run
    lib.tessera_check_forward.argtypes = [problem, pointer(Options), forward]
    lib.tessera_append.argtypes = [append, pointer(Options), ctypes.c_void_p]
    lib.tessera_decode_block_problem_init.argtypes = [block, size]
    lib.tessera_decode_block_query.argtypes = [block, pointer(Options), ctypes.c_int32, ctypes.c_int32,
                                               pointer(DecodeBlockInfo)]
    lib.tessera_decode_block.argtypes = [block, pointer(Options), block_args] + run
    return lib


def check(status: int, names={}) -> None:
    """Raises the exception for the status and message of the last call. names: argument of the C ABI -> the caller's
    name."""
    if status == 0:
        return
    message = library().tessera_last_error().decode()
    argument = library().tessera_last_error_argument().decode()
    if argument in names:
        message = names[argument] + message.removeprefix(argument)
    kind = {INVALID_ARGUMENT: ValueError, UNSUPPORTED: Unsupported, OUT_OF_MEMORY: MemoryError,
            DEVICE_UNAVAILABLE: DeviceUnavailable}.get(status, RuntimeError)
    raise kind(message)


def sized(struct_type):
    """A zeroed struct that knows its size."""
    return struct_type(struct_size=ctypes.sizeof(struct_type))


def new_problem():
    problem = _struct(library(), "Problem")()
    check(library().tessera_problem_init(ctypes.byref(problem), ctypes.sizeof(problem)))
    return problem


def kernel_names() -> list:
    lib = library()
    return [lib.tessera_kernel_name(i).decode() for i in range(lib.tessera_kernel_count())]
