# SPDX-License-Identifier: Apache-2.0
"""The package itself: what an import brings, the doctor, and the command."""
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

import tessera

ROOT = pathlib.Path(__file__).parents[2]

ENVIRONMENT = {**os.environ, "COLUMNS": "80"}


def python(*arguments, **keywords):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env={**ENVIRONMENT, **keywords})


def test_import_brings_no_other_package_and_no_library():
    said = python("-c", "import sys; before = set(sys.modules); import tessera; print(*set(sys.modules) - before);"
                        "maps = open('/proc/self/maps').read(); print('libtessera' in maps)")
    modules, library = said.stdout.splitlines()
    foreign = {m.split(".")[0] for m in modules.split()} - {"tessera"} - set(sys.stdlib_module_names)
    assert not foreign and library == "False", said


def test_modules_come_when_they_are_named():
    said = python("-c", "import sys, tessera; print('tessera.compat' in sys.modules, tessera.compat.installed());"
                        "sys.modules['torch'] = None\ntry: tessera.torch\nexcept ImportError as e: print(e)\n"
                        "print(hasattr(tessera, 'nothing'))")
    assert said.stdout.split("\n")[0] == "False False" and "torch" in said.stdout.split("\n")[1], said
    assert said.stdout.endswith("\nFalse\n"), said


def test_version():
    assert tessera.__version__ == "0.1.0"


def test_doctor():
    said = python("-m", "tessera", "doctor")
    assert said.returncode == 0 and said.stdout.rstrip().endswith("ready"), said
    for expected in ("cpu forward, float32: cpu.fa2.forward", "cpu backward, bfloat16: cpu.fa2.backward", "cuda",
                     "for torch", "for jax"):
        assert expected in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 110, "a path may be long; nothing else passes 80 columns"
    assert "TESSERA_PROMPT_KERNEL" not in said.stdout
    said = python("-m", "tessera", "doctor", TESSERA_PROMPT_KERNEL="cuda.fa3.forward")
    assert "cuda.fa3.forward: prompts on a cache, by TESSERA_PROMPT_KERNEL" in said.stdout


def test_the_doctor_says_what_the_provider_would_run():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from tessera import _doctor
    from tessera.torch import _library
    loaded = dict.fromkeys((_library.CPU_LIBRARY, _library.CUDA_LIBRARY))
    assert "its own kernels on CUDA" in _doctor._provider({**loaded, _library.CUDA_LIBRARY: "no CUDA"})
    text = _doctor._provider(loaded)
    assert "on CUDA wherever FLASH_ATTENTION takes the call" in text and "CUDNN_ATTENTION" in text


def test_doctor_names_a_library_that_does_not_load(tmp_path):
    (tmp_path / "libtessera.so").write_bytes(b"no library")
    for folder, reason in ((tmp_path, "file too short"), (tmp_path / "none", "No such file")):
        said = python("-m", "tessera", "doctor", TESSERA_LIBRARY_DIR=str(folder))
        assert said.returncode == 1 and reason in " ".join(said.stdout.split()), said
        assert said.stdout.rstrip().endswith("not usable: see above")


def test_without_the_library_the_import_works_and_the_call_says_why():
    said = python("-c", "import tessera\ntry: tessera.attention(0, 0, 0)\nexcept ValueError as e: print(e)\n"
                        "s = tessera.Spec((1, 2, 1, 8))\ntry: tessera.plan(s, s, s)\nexcept ImportError as e: print(e)",
                  TESSERA_LIBRARY_DIR="/nowhere")
    assert "q: expected a NumPy array" in said.stdout and "`python -m tessera doctor` says more" in said.stdout


def test_command():
    said = python("-m", "tessera", "--version")
    assert said.returncode == 0 and said.stdout.startswith("tessera 0.1.0"), said
    listed = python("-m", "tessera", "list")
    assert "cpu.fa2.forward" in listed.stdout
    beside = pathlib.Path(sys.executable).with_name("tessera")
    if beside.exists():  # an installed wheel
        assert subprocess.run([beside, "--version"], capture_output=True, text=True).stdout == said.stdout
    wrong = python("-m", "tessera", "plan", "--len", "x")
    assert wrong.returncode == 2 and "--len" in wrong.stderr
    suites = python("-m", "tessera", "bench", "--suite", "none-of-them")
    assert "lengths" in suites.stderr, "the suites are in the wheel"


def test_metadata():
    try:
        distribution = importlib.metadata.distribution("tessera-attention")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no wheel is installed: the package comes from PYTHONPATH")
    said = distribution.metadata
    assert said["Version"] == tessera.__version__ and said["License-Expression"] == "Apache-2.0", said
    assert said["Requires-Python"] == ">=3.9" and not said.get_all("Requires-Dist"), said
    files = [str(file) for file in distribution.files]
    for name in said.get_all("License-File"):
        assert any(file.endswith("dist-info/licenses/" + name) for file in files), (name, files)
    assert "tessera/py.typed" in files and not any(file.endswith(".cc") for file in files), files


def test_source_distribution_has_what_a_build_needs(tmp_path):
    pytest.importorskip("scikit_build_core")
    build = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], check=True, capture_output=True, cwd=ROOT)
    archive, = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    needed = [ROOT / name for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")]
    for folder in ("bench/suites", "cli", "cmake", "include", "python/jax_ffi", "python/licenses", "python/tessera",
                   "python/torch_ops", "src", "toolkit"):
        needed += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    missing = sorted(str(path.relative_to(ROOT)) for path in needed if str(path.relative_to(ROOT)) not in names)
    assert not missing, missing
    assert not any(name.startswith(("tests/", "bench/results/", "examples/data/", "build")) for name in names)
    assert archive.stat().st_size < 3e6, "bytes; a file was added that a build does not need"
