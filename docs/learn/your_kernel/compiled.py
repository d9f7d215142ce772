# SPDX-License-Identifier: Apache-2.0
"""Makes a kernel in C++ callable as one in Python. The matrices stay those of memory.py: C++ reads and writes them by
calling back, so that both languages are counted by the same code."""
import ctypes
import os
import pathlib
import subprocess

import numpy

FOLDER = pathlib.Path(__file__).resolve().parent
DOUBLES = ctypes.POINTER(ctypes.c_double)
LOAD = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long, DOUBLES)
STORE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long, DOUBLES,
                         ctypes.c_int)


class Handle(ctypes.Structure):
    """A Matrix of memory.hpp."""
    _fields_ = [("index", ctypes.c_long), ("rows", ctypes.c_long), ("width", ctypes.c_long), ("load", LOAD),
                ("store", STORE)]


def command(path, name, library):
    """The command that compiles FILE, whose function is `name`. $CXX names the compiler."""
    return [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-D_GLIBCXX_ASSERTIONS", "-shared", "-fPIC",
            f"-I{FOLDER}", f'-DKERNEL_FILE="{path.resolve()}"', f"-DKERNEL_{name}", str(FOLDER / "entry.cc"), "-o",
            str(library)]


def compile_kernel(path, name, folder):
    """The kernel as a function with the arguments of the one in Python. Raises SyntaxError with what the compiler
    says, and OSError if there is none."""
    library = pathlib.Path(folder) / "kernel.so"
    done = subprocess.run(command(path, name, library), capture_output=True, text=True)
    if done.returncode != 0:
        raise SyntaxError(done.stderr.strip())
    entry = ctypes.CDLL(str(library)).entry
    entry.argtypes = [ctypes.POINTER(Handle), ctypes.POINTER(ctypes.c_long), ctypes.c_double, DOUBLES, ctypes.c_char_p]

    def call(matrices, sizes, scale=0.0, results=0):
        failed = []  # exceptions of the callbacks, which must not pass through C++

        def guarded(function):
            def call_back(*arguments):
                try:
                    return function(*arguments)
                except Exception as error:
                    failed.append(error)
                    return -1
            return call_back

        def load(index, begin, end, to):
            rows = matrices[index].load(begin, end)
            if rows.size:
                numpy.ctypeslib.as_array(to, rows.shape)[:] = rows
            return len(rows)

        def store(index, begin, rows, width, source, adds):
            given = numpy.ctypeslib.as_array(source, (rows, width)) if rows * width else numpy.zeros((rows, width))
            (matrices[index].add if adds else matrices[index].store)(begin, given)
            return 0

        calls = LOAD(guarded(load)), STORE(guarded(store))
        handles = (Handle * len(matrices))(*[Handle(i, len(m), m.width, *calls) for i, m in enumerate(matrices)])
        result, said = numpy.zeros(results), ctypes.create_string_buffer(256)
        if entry(handles, (ctypes.c_long * 3)(*sizes), scale, result.ctypes.data_as(DOUBLES), said) != 0:
            raise failed[0] if failed else RuntimeError(said.value.decode(errors="replace"))
        return result

    def online_softmax(scores, values, tile):
        result = call([scores, values], [tile, 0, 0], results=values.width + 1)
        return result[:-1], result[-1]

    def in_place(*arguments):
        *matrices, block_q, block_kv, scale, causal = arguments
        call(matrices, [block_q, block_kv, int(causal)], scale)

    return online_softmax if name == "online_softmax" else in_place
