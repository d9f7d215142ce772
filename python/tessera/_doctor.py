# SPDX-License-Identifier: Apache-2.0
"""`tessera doctor`: installed packages, the kernels that can run here, and the libraries that load or why they do
not."""
import ctypes
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import textwrap

from . import _command as _command_of_wheel
from . import _native

_PACKAGES = ("numpy", "ml_dtypes", "torch", "jax", "cupy", "transformers")


def report(width: int) -> tuple:
    """(text, healthy). healthy: libtessera loads and has a CPU kernel for each pass."""
    rows = [("python", f"{platform.python_version()}, {platform.machine()}, {platform.platform(terse=True)}")]
    rows.append(("package", str(pathlib.Path(__file__).parent)))
    healthy = _library(rows)
    if healthy:
        healthy = _kernels(rows)
    if name := os.environ.get("TESSERA_PROMPT_KERNEL"):
        rows.append(("kernels", f"{name}: prompts on a cache, by TESSERA_PROMPT_KERNEL"))
    rows.append(("command", _command()))
    for name in _PACKAGES:
        rows.append((name, _version(name)))
    if healthy:  # those libraries need libtessera
        rows += _torch() + _jax()
    lines = []
    for label, text in rows:
        wrapped = textwrap.wrap(text, max(width - 13, 40), break_on_hyphens=False) or [""]
        lines += [f"{label if i == 0 else '':<12} {line}" for i, line in enumerate(wrapped)]
    lines += ["", "ready" if healthy else "not usable: see above"]
    return "\n".join(lines), healthy


def _library(rows) -> bool:
    try:
        version = _native.library().tessera_version().decode()
    except ImportError as error:
        rows.append(("libtessera", str(error.__cause__ or error)))
        return False
    rows.append(("libtessera", f"{version}, loaded from {_native.library_dir()}"))
    return True


def _planned(backend: int, pass_code: int, dtype: int):
    """(PlanInfo, None) of a small problem, or (None, why not)."""
    problem, options = _native.new_problem(), _native.sized(_native.Options)
    problem.dtype, problem.len_q, problem.len_kv = dtype, 128, 128
    options.backend = backend
    info = _native.sized(_native.PlanInfo)
    try:
        _native.check(_native.library().tessera_plan_query(ctypes.byref(problem), ctypes.byref(options), pass_code,
                                                           ctypes.byref(info)))
    except (ValueError, RuntimeError) as error:
        return None, str(error).split("\n")[0].removeprefix("backend: ")
    return info, None


def _kernels(rows) -> bool:
    found = 0
    for backend in ("cpu", "cuda"):
        for pass_name, pass_code in (("forward", _native.FORWARD), ("backward", _native.BACKWARD)):
            for dtype_name, dtype in (("float32", _native.FP32), ("bfloat16", _native.BF16)):
                info, reason = _planned(_native.BACKENDS[backend], pass_code, dtype)
                found += info is not None and backend == "cpu"
                label = f"{backend} {pass_name}, {dtype_name}"
                rows.append(("kernels", f"{label}: {_chosen(info) if info else 'none: ' + reason}"))
            if backend == "cuda" and info is None and reason and "no kernel" not in reason:
                rows[-2:] = [("kernels", f"cuda: none: {reason}")]  # one line for the device's reason
                return found == 4
    return found == 4


def _chosen(info) -> str:
    unit = info.matrix_unit.decode()
    return f"{info.kernel.decode()} ({info.target.decode()}{', ' + unit if unit else ''})"


def _command() -> str:
    program = _command_of_wheel.program()
    if not program.exists():
        return f"{program} does not exist: this is no installed wheel"
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"{program} can't be run: {error}"
    if said.returncode != 0:
        return f"{program} fails: {said.stderr.strip()}"
    where = shutil.which("tessera")
    return said.stdout.strip() + (f", as {where}" if where else ", not on PATH: python -m tessera runs it too")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(package) is not None:
            return "there, of unknown version"
        return "not installed"


def _torch() -> list:
    if importlib.util.find_spec("torch") is None:
        return [("for torch", "PyTorch is not installed: its operators are not loaded")]
    try:
        from .torch import _library
        rows = [("for torch", f"{name}: {'loaded' if reason is None else reason}")
                for name, reason in _library.status().items()]
        return rows if _library.status()[_library.CPU_LIBRARY] else rows + [("for torch", _provider(_library.status()))]
    except Exception as error:  # a broken PyTorch may raise anything
        return [("for torch", f"PyTorch can't be imported: {type(error).__name__}: {error}")]


def _provider(status) -> str:
    """Which backend PyTorch's own attention would run once the provider is active."""
    from torch.nn import attention

    from .torch import _library, _provider
    if not hasattr(attention, "register_flash_attention_impl"):
        return "provider: this PyTorch has no torch.nn.attention.register_flash_attention_impl"
    if status[_library.CUDA_LIBRARY] is not None:
        return "provider, once activated: PyTorch's attention runs tessera on the CPU, and its own kernels on CUDA"
    first, *others = _provider.order_when_active()
    return (f"provider, once activated: PyTorch's attention runs tessera on the CPU, and on CUDA wherever {first} "
            f"takes the call; it is asked first, then {', '.join(others)}")


def _jax() -> list:
    path = _native.library_dir() / "libtessera_jax.so"
    if not path.exists():
        return [("for jax", f"{path} does not exist: this build of tessera was made without it")]
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return [("for jax", f"{path} can't be loaded: {error}")]
    return [("for jax", "libtessera_jax.so: loaded, with handlers for the CPU and for CUDA")]


def main() -> int:
    text, healthy = report(shutil.get_terminal_size().columns)
    print(text)
    return 0 if healthy else 1
