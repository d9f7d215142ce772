#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the compiled inner loops of the CPU's tile GEMMs: they must keep their sums in registers.

    check_loops.py OBJECT...
    check_loops.py --compiler CXX --commands compile_commands.json

The first form reads objects and skips those of files that FILES does not list. The second compiles the files of FILES
itself, optimised, with the commands of an unoptimised build. It needs x86-64 and objdump. It fails if
- a loop with multiply-adds, or the loop around it, moves a vector register to or from the stack (copied accumulators) or
  copies memory with rep movs,
- a function that must keep all vectors off the stack does not,
- a loop that FILES expects, with its multiply-adds, loads and broadcasts per iteration, is missing.
Exit status 77 means that there is no objdump.
"""
import argparse
import collections
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from typing import NamedTuple

sys.dont_write_bytecode = True  # writes nothing into the source tree
import disassembly  # noqa: E402


class Shape(NamedTuple):
    """Counts of one iteration of an inner loop. Loads include the broadcasts."""
    multiply_adds: int
    loads: int
    broadcasts: int


class Kind(NamedTuple):
    """Functions, their multiply-adds, and the requirements on their loops."""
    functions: str  # searched in the name
    multiply_add: str  # instruction, and the registers that it must use
    shapes: tuple = ()  # loops that must be there
    at_least: int = 0  # multiply-adds of the largest loop
    whole: bool = False  # no vector goes to the stack anywhere in the function, including around the loops
    share: float = 0  # at most so many vector accesses of the stack per multiply-add in a loop


# Weights computed beside a GEMM keep their state (shift, sums, a reader) in an object in memory, which each step reads and
# writes once. GCC 12 makes at most 4 accesses for 14 multiply-adds, clang 14 none. They are not accumulators of a GEMM, so
# one access per two multiply-adds passes.
BESIDE = Kind(r"multiply|WeightsInSteps|gradient", r"vfn?m(add|sub)\d+ps.*%zmm", share=0.5)

FMA = r"vfn?m(add|sub)\d+ps.*%"
FILES = {
    # Blocks have 6 x 4 sums; with fewer vectors left 12 x 2, 6 x 3 and 16 x 1; with 16 registers 6 x 2. SSE has no
    # multiply-add, so it uses a multiplication and an addition.
    "matmul.cc": [
        Kind(r"N_AVX3\w*::Matmul\(", FMA + "zmm", whole=True,
             shapes=(Shape(24, 10, 6), Shape(24, 14, 12), Shape(18, 9, 6), Shape(16, 17, 16))),
        Kind(r"N_AVX2::Matmul\(", FMA + "ymm", shapes=(Shape(12, 8, 6),), whole=True),
        Kind(r"N_SSE4::Matmul\(", r"mulps.*%xmm", shapes=(Shape(12, 8, 6),), whole=True),
        Kind(r"N_AVX3\w*::MatmulHidden", FMA + "zmm", at_least=1),
        Kind(r"N_AVX2::MatmulHidden", FMA + "ymm", at_least=1),
        Kind(r"N_SSE4::MatmulHidden", r"mulps.*%xmm", at_least=1),
    ],
    "dot.cc": [Kind(r"", r"vdpbf16ps.*%zmm", at_least=16), BESIDE],
    "amx.cc": [Kind(r"", r"tdpbf16ps", at_least=4), BESIDE],
}
VECTOR = re.compile(r"%[xyzt]mm\d")
FRAME_POINTER = re.compile(r"^(?:mov\w*\s+%rsp, *%rbp$|lea\w*\s+[-\w]*\(%rsp\), *%rbp$)")


def loads_vector(text):
    """Whether the instruction loads memory into a vector register. The last operand is the target, so memory there is a
    store."""
    operands = text.split(None, 1)[-1]
    reads = re.search(r"\(%.*\)(?:\{1to\d+\})?, *%", operands)
    return bool(VECTOR.search(text) and reads) and not text.startswith(("prefetch", "lea"))


def broadcasts(text):
    return bool(re.match(r"v(p?broadcast)|.*\{1to\d+\}|movss\s.*\(%.*%xmm", text)) and loads_vector(text)


class Found(NamedTuple):
    """A loop with multiply-adds."""
    function: str
    what: str  # the first of its multiply-adds
    shape: Shape
    vectors: int  # vector accesses of the stack
    scalars: int  # others
    around: int  # vector accesses and copies in the loop around it, its other inner loops not counted
    copies: bool


def is_copy(text):
    return bool(re.match(r"rep\w*\s+(movs|stos)", text))


def stack_accesses(function):
    """Returns a predicate for instructions: an operand is on the stack."""
    framed = any(FRAME_POINTER.match(i.text) for i in function.instructions)
    operand = re.compile(r"\(%r(?:sp|bp)\b" if framed else r"\(%rsp\b")
    return lambda text: bool(operand.search(text)) and not text.startswith(("lea", "nop"))


def found_in(function, multiply_add):
    on_stack = stack_accesses(function)
    inner = {id(loop.parent) for loop in function.loops}
    for loop in sorted(function.loops, key=lambda loop: loop.head):
        texts = [i.text for i in loop.own]
        products = [t for t in texts if re.match(multiply_add, t)]
        # A loop around others may have multiply-adds of its own to scale sums. It is skipped unless these are dot
        # products.
        if not products or (id(loop) in inner and not re.match("[vt]dp", products[0])):
            continue
        around = [i.text for i in loop.parent.own] if loop.parent else []
        yield Found(function.name, products[0].split()[0],
                    Shape(len(products), sum(map(loads_vector, texts)), sum(map(broadcasts, texts))),
                    sum(bool(VECTOR.search(t)) and on_stack(t) for t in texts),
                    sum(not VECTOR.search(t) and on_stack(t) for t in texts),
                    sum(bool(VECTOR.search(t)) and on_stack(t) or is_copy(t) for t in around),
                    any(map(is_copy, texts)))


def problems_of(kind, functions):
    """Returns (loops, problems) of a Kind."""
    functions = [f for f in functions if re.search(kind.functions, f.name)]
    found, problems = [], []
    for function in functions:
        on_stack = stack_accesses(function)
        loops = list(found_in(function, kind.multiply_add))
        found += loops
        spilled = sum(bool(VECTOR.search(i.text)) and on_stack(i.text) for i in function.instructions)
        copies = sum(is_copy(i.text) for i in function.instructions)
        if kind.whole and spilled + copies > 0:
            problems.append(f"{short(function.name)}: {spilled} moves of vectors to or from the stack, {copies} copies")
        for loop in loops:
            where = f"{short(loop.function)}, loop of {loop.shape.multiply_adds} {loop.what}"
            if loop.vectors > kind.share * loop.shape.multiply_adds:
                problems.append(f"{where}: {loop.vectors} moves of vectors to or from the stack")
            if loop.copies:
                problems.append(f"{where}: copies memory")
            if loop.around and not kind.share and loop.what != "tdpbf16ps":  # tiles can't be copied
                problems.append(f"{where}: {loop.around} moves of vectors to or from the stack around it")
    name = f"functions {kind.functions!r}, {kind.multiply_add}"
    shapes = {loop.shape for loop in found}
    for shape in kind.shapes:
        # A compiler may take several steps in one iteration.
        if not any(Shape(*(n * x for x in shape)) in shapes for n in (1, 2, 4)):
            problems.append(f"{name}: no inner loop of {shape.multiply_adds} multiply-adds, {shape.loads} loads, "
                            f"{shape.broadcasts} of them broadcasts")
    most = max((shape.multiply_adds for shape in shapes), default=0)
    if most < kind.at_least:
        problems.append(f"{name}: no inner loop with {kind.at_least} or more multiply-adds (most: {most})")
    return found, problems


def check(file, functions, kinds=None):
    """Returns (loops, problems) of a file's functions."""
    found, problems = [], []
    for kind in FILES[file] if kinds is None else kinds:
        loops, wrong = problems_of(kind, functions)
        found += loops
        problems += [f"{file}: {p}" for p in wrong]
    return found, problems


def short(name):
    name = re.sub(r"tessera::cpu::simd::|\(anonymous namespace\)::|^void ", "", name)
    clone = re.search(r" \[clone (.*)\]$", name)
    return re.sub(r"\(.*", "", name) + (f" {clone[1]}" if clone else "")


def table(rows):
    """Formats one line per function: its largest loop, and the stack accesses of all its loops."""
    yield (f"{'file':<15}{'function':<33}{'instruction':<12}{'loops':>6}{'multiply-adds':>15}{'loads':>7}{'broadcasts':>12}"
           f"{'stack':>7}{'scalars':>9}")
    functions = collections.defaultdict(list)
    for file, loop in rows:
        functions[file, short(loop.function), re.sub(r"\d{3}", "", loop.what)].append(loop)
    for (file, function, what), loops in functions.items():
        largest = max(loop.shape for loop in loops)
        yield (f"{file:<15}{function[:32]:<33}{what:<12}{len(loops):>6}{largest.multiply_adds:>15}{largest.loads:>7}"
               f"{largest.broadcasts:>12}{sum(l.vectors for l in loops):>7}{sum(l.scalars for l in loops):>9}")


def compile_like(command, compiler, made, options):
    """Compiles a file like `command` (of a compile_commands.json), but optimised, without sanitizers, and also for
    AVX-512, which cmake/TesseraTarget.cmake drops under sanitizers."""
    words = shlex.split(command["command"])
    start = next(i for i, word in enumerate(words) if word.startswith("-"))  # after launchers and the compiler
    unwanted = re.compile(r"-O\w*$|-g\S*$|-W\S*$|-fsanitize\S*|-fno-sanitize\S*|-fno-omit-frame-pointer")
    words = [w.replace("|HWY_AVX3)", ")") for w in words[start:] if not unwanted.match(w)]
    words[words.index("-o") + 1] = str(made)
    subprocess.run([compiler, *options, *words, "-w", "-O3", "-DNDEBUG"], check=True, cwd=command["directory"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("objects", nargs="*", type=pathlib.Path)
    parser.add_argument("--objdump", default=disassembly.find_objdump())
    parser.add_argument("--compiler")
    parser.add_argument("--commands", type=pathlib.Path)
    options = parser.parse_args()
    if options.objdump is None:
        print("skipped: there is no objdump here")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        objects = {path.stem: path for path in options.objects if path.stem in FILES}
        if options.compiler:
            for command in json.loads(options.commands.read_text()):
                file = pathlib.Path(command["file"])
                if file.name in FILES and file.parent.parent.name == "cpu":
                    objects[file.name] = pathlib.Path(folder) / (file.name + ".o")
                    compile_like(command, options.compiler, objects[file.name], [])
        rows, problems = [], [f"{file}: no object of it was given" for file in FILES if file not in objects]
        for file, path in objects.items():
            found, wrong = check(file, disassembly.functions_of(path, options.objdump))
            rows += [(file, loop) for loop in found]
            problems += wrong
    print("\n".join(table(rows)))
    print("of the largest loop: multiply-adds, loads, broadcasts; of all: moves of vectors to or from the stack, other accesses of it")
    print("\n".join(problems) or f"{len(rows)} inner loops ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
