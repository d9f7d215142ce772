#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The trial of tools/planted_bugs.py in CUDA kernels on a machine with a GPU, nvcc and g++, but without this project's
packages.

  tools/planted_bugs_packed.py pack BUILD FOLDER      here: BUILD is a Ninja build of kernels_test for GPUs. FOLDER gets
                                                      its objects, and shared libraries
  tools/planted_bugs_packed.py run FOLDER [NAME...]   there, in a copy of this checkout with FOLDER: for each bug, compiles
                                                      the instances that contain it, links kernels_test and runs its tests

A bug is compiled into the few instances that its tests need, in one dtype. Its tests stop at the first failure. A row says whether
a test failed, which one, or that the tests did not end. Exit status: 0 when every bug that ran was caught.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import planted_bugs  # noqa: E402

SECONDS = 100  # of a bug's tests


def commands(build, target):
    return subprocess.run(["ninja", "-C", build, "-t", "commands", target], check=True, capture_output=True,
                          text=True).stdout.splitlines()


def objects(command):
    return [word for word in command.split() if word.endswith(".o")]


def sources_of(build):
    """The text of all files that each object was compiled from."""
    deps = subprocess.run(["ninja", "-C", build, "-t", "deps"], check=True, capture_output=True, text=True).stdout
    return {entry.split(":", 1)[0]: entry for entry in deps.split("\n\n")}


# Bugs in a file of several schedules whose line is not in fa2's kernels.
COMPILED_IN = {"fa2_dropout_of_next_keys": "/fa1/instances/forward"}


def instances_of(bug, sources, instances):
    """The instances to compile for a bug, as few as its tests need: those that include its file, of its schedule (fa2 for
    what several share) and one dtype, of head_dim 64, and of the score option that its tests are about."""
    folder = pathlib.Path(bug.file).relative_to("src/cuda").parts[0]
    dtype = "fp32" if "fp32" in bug.name else "fp16" if "fp16" in bug.name else "bf16"
    including = [re.sub(r".*\.dir/", "", instance)[:-2] for instance in instances
                 if f"{bug.file}\n" in sources[instance] + "\n"]
    found = [name for name in including if dtype in name or not re.search("bf16|fp16|fp32", name)]
    for part in (COMPILED_IN.get(bug.name, f"/{folder}/"), "/fa2/"):
        if own := [name for name in found if part in name]:
            break
    else:
        own = found
    own = [name for name in own if not re.search(r"head_dim_(96|128|192|256)", name)]
    option = next((word for word in ("softcap", "alibi", "dropout") if any(word in test for test in bug.tests)), "head_dim")
    words = {"softcap": "capped|general", "head_dim": "head_dim"}.get(option, f"{option}|general")
    return [name for name in own if re.search(words, name)] or own


def pack(build, folder):
    build, folder = pathlib.Path(build).resolve(), pathlib.Path(folder).resolve()
    (folder / "libs").mkdir(parents=True, exist_ok=True)
    lines = commands(build, "kernels_test")
    link = next(line for line in lines if "-o tests/kernels_test " in line)
    inside = objects(next(line for line in lines if re.search(r"ar qc src/libtessera(_inside)?\.a", line)))
    instances = [name for name in inside if "/instances/" in name]
    rest = objects(link) + [name for name in inside if name not in instances]
    archives = [word for word in link.split() if word.endswith(".a") and "cudart" not in word and "libtessera." not in word
                and "inside" not in word]
    main = [name for name in archives if "gtest_main" in name]
    others = [name for name in dict.fromkeys(archives) if name not in main and "librt" not in name]
    subprocess.run(["ld", "-r", "-o", folder / "rest.o", *rest, "--whole-archive", *main, "--no-whole-archive", *others],
                   check=True, cwd=build)
    subprocess.run(["strip", "-g", folder / "rest.o"], check=True)
    (folder / "libinstances.a").unlink(missing_ok=True)
    subprocess.run(["ar", "qc", folder / "libinstances.a", *instances], check=True, cwd=build)
    for library in (word for word in link.split() if ".so" in word):
        name = re.search(r"SONAME +(\S+)", subprocess.run(["objdump", "-p", library], capture_output=True, text=True).stdout)[1]
        shutil.copy(library, folder / "libs" / name)
    plan, sources = {}, sources_of(build)
    for bug in planted_bugs.bugs_of("cuda"):
        filters = [test.split("--gtest_filter=")[1] for test in bug.tests if "kernels_test" in test]
        plan[bug.name] = {"instances": instances_of(bug, sources, instances), "tests": filters}
    (folder / "plan.json").write_text(json.dumps(plan, indent=1))


def compile_instance(source, output, instance):
    architecture = "90a" if "/fa3/" in instance else "90"
    done = subprocess.run(["nvcc", f"-I{ROOT}/include", f"-I{source}", "-O3", "-DNDEBUG", "-std=c++20",
                           "--expt-relaxed-constexpr", "-w", "-Xcompiler=-fPIC", "-x", "cu", "-c", source / instance,
                           f"--generate-code=arch=compute_{architecture},code=[sm_{architecture}]", "-o", output],
                          capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def trial(bug, wanted, folder, work, compilers, turn):
    """(whether a test caught the bug, None if that is open; what the row says)"""
    if not wanted["tests"]:
        return None, "open: its tests are not in kernels_test"
    source = work / bug.name / "src"
    shutil.copytree(ROOT / "src", source)
    planted_bugs.plant(bug, work / bug.name / bug.file)
    outputs = [work / bug.name / f"{n}.o" for n in range(len(wanted["instances"]))]
    errors = list(compilers.map(lambda pair: compile_instance(source, *pair), zip(outputs, wanted["instances"])))
    if any(errors):
        return False, "does not compile: " + "".join(errors)[-300:]
    program = work / bug.name / "kernels_test"
    libraries = sorted((folder / "libs").iterdir())
    subprocess.run(["g++", "-o", program, *outputs, folder / "rest.o", folder / "libinstances.a", *libraries,
                    "-L/usr/local/cuda/lib64", "-lcudart_static", "-lrt", "-lpthread", "-ldl",
                    f"-Wl,-rpath,{folder / 'libs'}"], check=True)
    with turn:
        try:
            done = subprocess.run([program, "--gtest_filter=" + ":".join(wanted["tests"]), "--gtest_brief=1"],
                                  capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "GTEST_FAIL_FAST": "1"})
        except subprocess.TimeoutExpired:
            return None, f"open: its tests did not end in {SECONDS} s"
    if done.returncode == 0:
        return False, ""
    return True, planted_bugs.first_failure(done.stdout) or f"exit status {done.returncode}"


def run(folder, names):
    import tempfile
    import threading
    folder = pathlib.Path(folder).resolve()
    plan = json.loads((folder / "plan.json").read_text())
    bugs = planted_bugs.chosen("cuda", names)
    survived = 0
    turn = threading.Semaphore(6)  # programs that share the GPU
    with tempfile.TemporaryDirectory() as work, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as compilers, \
            concurrent.futures.ThreadPoolExecutor(len(bugs)) as pool:
        rows = {pool.submit(trial, bug, plan[bug.name], folder, pathlib.Path(work), compilers, turn): bug for bug in bugs}
        for result in concurrent.futures.as_completed(rows):
            caught, said = result.result()
            survived += caught is False
            planted_bugs.row(rows[result], said)
    return 1 if survived else 0


def main(arguments):
    if len(arguments) == 3 and arguments[0] == "pack":
        return pack(*arguments[1:])
    if len(arguments) >= 2 and arguments[0] == "run":
        return run(arguments[1], arguments[2:])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
