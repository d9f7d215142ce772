#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of docs/architecture.md for the source tree, in the #include lines and the text of the files:

- a layer includes only itself and the layers listed for it below;
- third-party headers appear only where they belong;
- a file has at most 600 lines, and its first lines name the license;
- asm only in src/cuda/ptx, and no open points left in comments.

Usage: check_layers.py [ROOT]. Prints one line per violation; exit status 1 if there are any.
"""
import pathlib
import re
import sys

MAX_LINES = 600
FOLDERS = ("include", "src", "toolkit", "cli", "bench", "tests", "examples", "python", "web")
SUFFIXES = (".hpp", ".h", ".cc", ".c", ".cuh", ".cu")
WITHOUT_INCLUDES = (".py", ".sh", ".cmake", ".js", ".css", ".html")

# Folder or file -> layer; the longest prefix counts.
LAYER_OF = {
    "include/": "include",
    "src/core/": "core",
    "toolkit/io/": "io",
    "src/reference/": "reference",
    "src/schedule/": "schedule",
    "src/model/": "model",
    "src/kernel/": "kernel",
    "src/cpu/": "cpu",
    "src/cpu/simd/": "cpu/simd",
    "src/cpu/matrix/": "cpu/matrix",
    "src/cpu/steps/": "cpu/steps",
    "src/cuda/": "cuda",
    "src/cuda/device.": "cuda/shared",
    "src/cuda/ptx/": "cuda/ptx",
    "src/cuda/tile/": "cuda/tile",
    "src/cuda/shared/": "cuda/shared",
    "src/cuda/backward/": "cuda/backward",
    "src/cuda/gradient/": "cuda/gradient",
    # Plain C++ without CUDA headers, shared by kernels, plan() and the cost model: the compiled shapes, the choice among
    # them, the order of work. Each schedule has a host/ of its own.
    "src/cuda/host/": "cuda/host",
    "src/cuda/backward/host/": "cuda/host",
    "src/cuda/gradient/host/": "cuda/host",
    "src/registry.": "registry",
    "src/": "api",  # api, c_api, plan, parallel
    "toolkit/check/": "check",
    "toolkit/device/": "device",
    "toolkit/measure/": "measure",
    "toolkit/plot/": "plot",
    "toolkit/walk/": "walk",
    "toolkit/report/": "report",
    "toolkit/diagnose/": "diagnose",
    "toolkit/learn/": "learn",
    "cli/": "cli",
    "bench/": "bench",
    "tests/": "tests",
    "tests/consumer/": "examples",
    "examples/": "examples",
    "examples/llama/": "llama",
    "python/": "python",
    "web/": "web",
}

CUDA_TILE = {"include", "core", "cuda/ptx", "cuda/host", "cuda/tile"}
CUDA_SCHEDULE = CUDA_TILE | {"kernel", "schedule", "cuda/shared", "cuda/backward", "cuda/gradient"}
CPU_PRIMITIVES = {"include", "core", "cpu/simd", "cpu/matrix"}
LIBRARY = {"include", "core", "schedule", "model", "kernel", "reference", "registry", "api"}
TOOLS = {"io", "device", "check", "measure", "plot", "walk", "report", "diagnose", "learn"}
# Layer -> the layers that it may include besides itself.
ALLOWED = {
    "include": set(),
    "core": {"include"},
    "io": {"include", "core"},
    "schedule": {"include", "core"},
    "model": {"include", "core", "schedule", "cuda/host"},
    "kernel": {"include", "core", "schedule"},
    "reference": {"include", "core", "kernel"},
    "cpu/simd": {"include", "core"},
    "cpu/matrix": {"include", "core", "cpu/simd"},
    "cpu/steps": CPU_PRIMITIVES | {"kernel"},
    "cpu": CPU_PRIMITIVES | {"schedule", "kernel", "cpu/steps"},
    "cuda/ptx": {"include"},
    "cuda/host": {"include", "core"},
    "cuda/tile": CUDA_TILE,
    "cuda/shared": CUDA_TILE | {"kernel"},
    "cuda/backward": CUDA_TILE,
    "cuda/gradient": CUDA_TILE | {"kernel", "cuda/shared", "cuda/backward"},
    "cuda": CUDA_SCHEDULE,  # also for each schedule, such as cuda/fa1; no schedule includes another
    "cuda/block": CUDA_SCHEDULE | {"cuda/append", "cuda/decode"},  # one launch for what these do
    "registry": {"include", "core", "kernel", "reference", "cpu", "cuda"},
    "api": {"include", "core", "schedule", "model", "kernel", "registry", "cuda/host"},
    "device": {"include", "core"},
    "check": LIBRARY | {"io", "device"},
    "measure": LIBRARY | {"io", "device", "check", "plot", "cpu/simd", "cpu/matrix"},
    "plot": {"include"},
    "walk": LIBRARY,
    "report": LIBRARY | {"measure", "plot"},
    "diagnose": LIBRARY | {"io", "device", "check", "measure"},
    "learn": LIBRARY | {"io", "measure", "plot", "walk", "diagnose", "cuda/host"},
    "cli": LIBRARY | TOOLS,
    "bench": LIBRARY | TOOLS | {"cpu/simd", "cpu/matrix", "cuda/ptx", "cuda/host", "cuda/tile", "cuda/shared", "cuda/block"},
    "python": LIBRARY | TOOLS,
    "web": LIBRARY | TOOLS | {"cli"},
    "examples": {"include"},
    "llama": {"include", "io"},
    "tests": LIBRARY | TOOLS | CPU_PRIMITIVES | {"llama", "cpu", "cpu/steps", "cuda", "cuda/ptx", "cuda/host", "cuda/tile", "cuda/shared",
                                            "cli"},
}

# Start of a third-party header -> the layers that may include it.
THIRD_PARTY = {
    "hwy/": {"cpu", "cpu/simd", "cpu/matrix", "tests", "llama"},
    "tbb/": {"api", "tests", "llama"},
    "nlohmann/": TOOLS | {"cli", "bench", "tests", "web", "llama"},
    "CLI/": {"cli", "web", "llama"},
    "zlib.h": {"diagnose", "plot", "tests"},
    "sqlite3.h": {"diagnose", "tests"},
    "librsvg/": {"plot"},
    "cairo": {"plot"},
    "gtest/": {"tests"},
    "gmock/": {"tests"},
    "rapidcheck": {"tests"},
    "cuda": {"device", "tests", "bench", "examples"} | {layer for layer in ALLOWED if layer.startswith("cuda")},
    "fmt/": set(ALLOWED) - {"include", "examples"},
    "xla/": {"python"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b")
OPEN_POINT = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")


def layer_of(path: str) -> str:
    layer = LAYER_OF[max((prefix for prefix in LAYER_OF if path.startswith(prefix)), key=len)]
    schedule = re.match(r"src/cuda/(\w+)/(host/)?", path) if layer == "cuda" else None
    if schedule is None:
        return layer
    return "cuda/host" if schedule[2] else f"cuda/{schedule[1]}"


def may_include(layer: str, other: str) -> bool:
    lists_schedules = layer == "cuda" and other.startswith("cuda/")
    return other == layer or lists_schedules or other in ALLOWED.get(layer, CUDA_SCHEDULE)


def source_files(root: pathlib.Path):
    for folder in FOLDERS + ("tools", "scripts", "cmake"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES + WITHOUT_INCLUDES and not {"corpus", "dist"} & set(path.parts):
                yield path


def find_header(root: pathlib.Path, includer: pathlib.Path, header: str):
    for folder in (includer.parent, root / "include", root / "src", root / "toolkit", root / "cli", root / "examples", root / "tests"):
        candidate = (folder / header).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None  # generated in the build folder


def check_includes(root: pathlib.Path, path: pathlib.Path, name: str, text: str):
    layer = layer_of(name)
    for match in INCLUDE.finditer(text):
        header = match[1] or match[2]
        line = text.count("\n", 0, match.start(0)) + 1 + match[0].startswith("\n")
        for prefix, layers in THIRD_PARTY.items():
            third_party = layer if layer in ALLOWED else "cuda"
            if header.startswith(prefix) and third_party not in layers and find_header(root, path, header) is None:
                yield f"{name}:{line}: {layer} does not use <{header}>"
        target = find_header(root, path, header)
        if target is None:
            continue
        other = layer_of(target)
        if not may_include(layer, other):
            yield f"{name}:{line}: {layer} may not include {other} ({header})"


def check_text(name: str, text: str):
    lines = text.count("\n")
    if lines > MAX_LINES:
        yield f"{name}: {lines} lines, at most {MAX_LINES} are allowed"
    if name.endswith(SUFFIXES) and "SPDX-License-Identifier: Apache-2.0" not in "".join(text.splitlines(True)[:2]):
        yield f"{name}:1: the first line does not name the license"
    for number, line in enumerate(text.splitlines(), 1):
        if OPEN_POINT.search(line):
            yield f"{name}:{number}: an open point is left: {line.strip()}"
    if name.endswith(SUFFIXES) and not name.startswith("src/cuda/ptx/"):
        if ASM.search(COMMENT_OR_STRING.sub('""', text)):
            yield f"{name}: asm is allowed in src/cuda/ptx only"


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    problems = []
    count = 0
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        count += 1
        problems += check_text(name, text)
        if path.suffix in SUFFIXES and name.startswith(FOLDERS):
            problems += check_includes(root, path, name, text)
    for problem in problems:
        print(problem)
    print(f"{count} files, {len(problems)} violations")
    return 1 if problems or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
