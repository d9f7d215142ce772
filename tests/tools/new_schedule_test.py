#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds a schedule to a copy of the source, as docs/architecture.md promises, and builds the command with it.

    new_schedule_test.py SOURCE_FOLDER BUILD_FOLDER

The schedule "example" forwards to fa1 on the CPU; on CUDA it is a copy of fa1 that takes no bias. Its new files are its
own; the existing files that had to be edited must be those that the page names, no others. Compiled anew, without
optimisation, are the files that make a list of schedules; the rest is linked from BUILD_FOLDER (Ninja's), whose objects do
not change by one more enumerator. The command then plans the CUDA kernels for GPUs that are not here. A build with CUDA also
compiles their host code and one instance.
"""
import concurrent.futures
import filecmp
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

SOURCE, BUILD = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
PLAIN = str(SOURCE / "src/cpu/backend.cc")  # compiled by itself in each build, without options of its own
FOLDERS = ("include", "src", "toolkit", "cli", "tools", "tests/kernels")
KNOWS_SCHEDULES = re.compile(
    r"\b(TESSERA_SCHEDULES|parse_schedule|schedule_names|order_of)\b|case Schedule::|_order\(\)|name_of\(kernel\.schedule\)|"
    r"kEntries")  # the list itself, names that this test uses below, and causes of warnings

HEADER = """// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cpu::example {
std::size_t forward_workspace(const Plan& plan);
void forward(const ForwardCall& call);
std::size_t backward_workspace(const Plan& plan);
void backward(const BackwardCall& call);
}  // namespace tessera::cpu::example
"""
KERNELS = """// SPDX-License-Identifier: Apache-2.0
#include "cpu/example/schedule.hpp"
#include "cpu/schedules.hpp"

namespace tessera::cpu::example {
std::size_t forward_workspace(const Plan& plan) { return fa1::forward_workspace(plan); }
void forward(const ForwardCall& call) { fa1::forward(call); }
std::size_t backward_workspace(const Plan& plan) { return fa1::backward_workspace(plan); }
void backward(const BackwardCall& call) { fa1::backward(call); }
}  // namespace tessera::cpu::example
"""
STEPS = """// SPDX-License-Identifier: Apache-2.0
#include "schedule/emit.hpp"

namespace tessera::schedule {
Order example_order() { return fa1_order(); }
}  // namespace tessera::schedule
"""


REFUSALS = """Refusal refuse_example_{0}(const Problem& p, const AskedTile& tile, const Limits& limits) {{
    if (p.bias) return "takes no additive bias";
    return refuse_fa1_{0}(p, tile, limits);
}}

"""


def promised(what):
    """The existing files that docs/architecture.md says "A new schedule" or "A new schedule on CUDA" edits."""
    page = (SOURCE / "docs/architecture.md").read_text()
    text = re.search(rf"\n- {what}:(.*?)\n- ", page, re.DOTALL)[1]
    edited = re.search(r"\bedits (.*?)\.\s", text + " ", re.DOTALL)[1]
    return set(re.findall(r"`([^`]+/[^`]+)`", edited))


def edit(path, pattern, replacement):
    text = path.read_text()
    changed, count = re.subn(pattern, replacement, text, count=1, flags=re.DOTALL)
    assert count == 1, f"{path}: nothing matches {pattern}"
    path.write_text(changed)


def add_schedule(copy):
    edit(copy / "include/tessera/kernel.hpp", r"(    row\(fa3\)[^\n]*)\n", r"\1 \\\n    row(example)\n")
    backend = copy / "src/cpu/backend.cc"
    row = re.search(r"    \{Schedule::fa1,.*?\},\n", backend.read_text(), re.DOTALL)[0]
    own = row.replace("fa1", "example").replace("K/V blocks outer", "an example")
    edit(backend, re.escape(row), lambda _: row + own)
    edit(backend, r'#include "cpu/schedules.hpp"\n', '#include "cpu/example/schedule.hpp"\n#include "cpu/schedules.hpp"\n')
    (copy / "src/cpu/example").mkdir()
    (copy / "src/cpu/example/schedule.hpp").write_text(HEADER)
    (copy / "src/cpu/example/forward.cc").write_text(KERNELS)
    (copy / "src/schedule/example.cc").write_text(STEPS)


def add_to_cuda(copy):
    """fa1 once more, under another name and without bias."""
    folder = copy / "src/cuda/example"
    shutil.copytree(copy / "src/cuda/fa1", folder, ignore=shutil.ignore_patterns("*.md"))
    for path in folder.rglob("*.*"):
        path.write_text(path.read_text().replace("fa1", "example"))
    backend = copy / "src/cuda/backend.cc"
    edit(backend, r'(#include "cuda/)fa1(/kernels.hpp"\n)', r"\1example\2\1fa1\2")
    edit(backend, r"fa1::kernels, ", r"fa1::kernels, example::kernels, ")
    table = copy / "src/cuda/host/kernel_table.cc"
    for header in ("config.h", "dispatch.hpp"):
        edit(table, rf'#include "cuda/fa1/host/{header}"\n', rf'#include "cuda/example/host/{header}"\n\g<0>')
    edit(table, r"\n}  // namespace\n", lambda end: "\n" + "".join(map(REFUSALS.format, ("forward", "backward"))) + end[0][1:])
    for row in re.findall(r'        \{"cuda\.fa1\.[^"]*".*?>\},\n', table.read_text(), re.DOTALL):
        own = row.replace("cuda.fa1", "cuda.example").replace("Schedule::fa1", "Schedule::example")
        edit(table, re.escape(row), lambda _: row + own.replace("refuse_fa1", "refuse_example").replace("fa1::", "example::"))
    edit(copy / "toolkit/check/limits.hpp", r"(    )(return kernel\.schedule == Schedule::fa3)",
         r'\1if (kernel.name.starts_with("cuda.example") && p.bias) return "takes no additive bias";\n\1\2')
    checks = copy / "tools/check_kernels.py"
    for row in re.findall(r'^    \(r?"fa1.*\n', checks.read_text(), re.MULTILINE):
        edit(checks, re.escape(row), lambda _: row + row.replace("fa1", "example"))


def edited_files(copy):
    """Files of the source that differ in the copy."""
    return {str(path.relative_to(SOURCE)) for folder in FOLDERS for path in (SOURCE / folder).rglob("*")
            if path.is_file() and not filecmp.cmp(path, copy / path.relative_to(SOURCE), shallow=False)}


def expect_edited(copy, wanted):
    edited = edited_files(copy)
    assert edited == wanted, f"edited {sorted(edited)}; docs/architecture.md says {sorted(wanted)}"
    return edited


def compile_commands():
    commands = subprocess.run(["ninja", "-C", BUILD, "-t", "compdb"], check=True, capture_output=True, text=True).stdout
    rows = (row for row in json.loads(commands) if row["file"].endswith((".cc", ".cxx", ".cu")))
    return {os.path.normpath(BUILD / row["file"]): row for row in rows}


def compile_file(copy, path, like, commands):
    """Compiles a file of the copy as the build compiles `like`, C++ without optimisation. Returns the object."""
    words = shlex.split(commands[like]["command"].replace(like, str(path)).replace(str(SOURCE / "include"), f"{copy}/include"))
    for folder in ("src", "toolkit", "cli"):
        words = [f"-I{copy}/{folder}" if word == f"-I{SOURCE}/{folder}" else word for word in words]
    made = copy / (str(path.relative_to(copy)).replace("/", "_") + ".o")
    for flag in ("-o", "-MF", "-MT"):
        if flag in words:
            i = words.index(flag)
            del words[i:i + 2]
    # -Winvalid-pch: precompiled headers are for an optimised build; without them it takes their text.
    words = [word for word in words if word not in ("-MD", "-g", "-Winvalid-pch")] + ["-o", str(made)]
    if path.suffix != ".cu":
        words.append("-O0")
    subprocess.run(words, check=True, cwd=BUILD)
    return str(made)


def files_that_know(copy, commands):
    """The files to compile again: (file of the copy, file of the build that it is compiled like)."""
    for path in sorted([*(copy / "src").rglob("*.cc"), *(copy / "toolkit").rglob("*.cc")]):
        original = str(SOURCE / path.relative_to(copy))
        if "/cuda/example/" in str(path) or path == copy / "src/cuda/backend.cc":
            continue  # without the kernels themselves they can't be linked
        if original in commands and (KNOWS_SCHEDULES.search(path.read_text()) or path.name == "kernel_table.cc"):
            yield path, original
        elif "example" in str(path.relative_to(copy)):
            yield path, PLAIN
    # The command's files are compiled several at a time, the library's folders with TESSERA_TOGETHER.
    for original in sorted(commands):
        if "/tessera_cli.dir/Unity/" in original or "/tessera.dir/Unity/" in original:
            path = copy / pathlib.Path(original).name
            path.write_text(re.sub(rf'"{re.escape(str(SOURCE))}/(src|cli)/', rf'"{copy}/\1/', pathlib.Path(original).read_text()))
            yield path, original


def build_command(copy):
    """Links the command: files that know the schedules from the copy, the rest from the build."""
    commands = compile_commands()
    files = list(files_that_know(copy, commands))
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        made = list(pool.map(lambda file: compile_file(copy, *file, commands), files))
    lines = subprocess.run(["ninja", "-C", BUILD, "-t", "commands", "tessera"], check=True, capture_output=True, text=True).stdout
    line = next(line for line in reversed(lines.splitlines()) if " -o tessera " in line)
    # Ninja's line is ": && LINK && COMMANDS AFTER THE LINK".
    link = shlex.split(next(command for command in line.split(" && ") if " -o tessera " in command))
    at = link.index("-o")
    link[at + 1] = str(copy / "tessera")
    first = next(i for i, word in enumerate(link) if word.endswith(".o"))
    # The new objects come first: the linker takes the first of inline functions and of a library's objects of one name.
    link = link[:first] + made + [word for word in link[first:] if "/tessera_cli.dir/" not in word]
    subprocess.run(link, check=True, cwd=BUILD)
    return copy / "tessera", len(files)


def check_cuda(copy, tessera):
    """The plain C++ of the CUDA schedule: its layers, its rows for GPUs that are not here, its limits in the tests."""
    run(sys.executable, copy / "tools/check_layers.py", copy)
    on_h100 = ("plan", "--device", "h100", "--dtype", "bf16", "--schedule", "example")
    for options, kernel in (((), "cuda.example.forward"), (("--backward",), "cuda.example.backward")):
        assert kernel in run(tessera, *on_h100, *options), f"{kernel} is not planned"
    refused = subprocess.run([tessera, *on_h100, "--bias"], capture_output=True, text=True)
    assert "takes no additive bias" in refused.stdout + refused.stderr, refused.stdout + refused.stderr
    commands = compile_commands()
    words = shlex.split(commands[PLAIN]["command"].replace(str(SOURCE), str(copy)))
    includes = [word for word in words if word.startswith(("-I", "-std"))]
    run(words[0] if "ccache" not in words[0] else words[1], *includes, "-fsyntax-only", "-x", "c++",
        copy / "toolkit/check/limits.hpp")


def compile_cuda(copy):
    """Compiles the host code of the CUDA schedule and one instance, if the build has CUDA. Returns how many files."""
    commands = compile_commands()
    host = str(SOURCE / "src/cuda/fa1/kernels.cc")
    device = [file for file in commands if file.endswith(".cu") and "fa1" in file and "bf16" in file]
    if host not in commands or not device:
        return 0
    files = [(path, host) for path in (copy / "src/cuda/example").glob("*.cc")]
    files.append((copy / "src/cuda/backend.cc", str(SOURCE / "src/cuda/backend.cc")))
    files.append((copy / "src/cuda/example/instances/forward_head_dim_64_bf16.cu", device[0]))
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return len(list(pool.map(lambda file: compile_file(copy, *file, commands), files)))


def run(*words):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in FOLDERS:
            shutil.copytree(SOURCE / name, copy / name)
        add_schedule(copy)
        expect_edited(copy, promised("A new schedule"))
        add_to_cuda(copy)
        edited = expect_edited(copy, promised("A new schedule") | promised("A new schedule on CUDA"))
        tessera, compiled = build_command(copy)

        listed = json.loads(run(tessera, "list", "--json"))["kernels"]
        names = [kernel["name"] for kernel in listed if kernel["schedule"] == "example"]
        assert names == ["cpu.example.forward", "cpu.example.backward"], names
        assert "cpu.example.forward" in run(tessera, "list"), "the table of kernels lacks it"
        assert "fa3, example" in " ".join(run(tessera, "roofline", "--help").split()), "--help lacks it"
        run(tessera, "roofline", "--device", "h100", "--schedule", "standard", "--len", "1024")
        ran = run(tessera, "run", SOURCE / "examples/data/kjv-layer2.safetensors", "--layout", "bhsd", "--schedule", "example",
                  "--check")
        assert "cpu.example.forward" in ran, ran
        check_cuda(copy, tessera)
        compiled += compile_cuda(copy)
    print(f"a new schedule: {compiled} files compiled, edited {', '.join(sorted(edited))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
