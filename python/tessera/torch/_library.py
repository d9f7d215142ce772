# SPDX-License-Identifier: Apache-2.0
"""Loads the operator libraries of this package into PyTorch ; status() says why one did not load."""
import functools

import torch

from .. import _native

OLDEST_TORCH = (2, 10)
CPU_LIBRARY, CUDA_LIBRARY = "libtessera_torch.so", "libtessera_torch_cuda.so"


def torch_version() -> tuple:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _load(name: str):
    """Loads one library. Returns None, or the reason why it is not loaded."""
    path = _native.library_dir() / name
    if torch_version() < OLDEST_TORCH:
        return f"PyTorch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}"
    if not path.exists():
        return f"{path} does not exist: this build of tessera was made without it"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} can't be loaded: {error}"
    return None


@functools.lru_cache(maxsize=None)
def status() -> dict:
    """Loads the libraries, once. Library -> None if it is loaded, else the reason why it is not."""
    found = {CPU_LIBRARY: _load(CPU_LIBRARY)}
    if found[CPU_LIBRARY] is not None:
        found[CUDA_LIBRARY] = f"{CPU_LIBRARY}, which defines the operators, is not loaded"
    elif torch.version.cuda is None:
        found[CUDA_LIBRARY] = f"PyTorch {torch.__version__} has no CUDA"
    else:
        found[CUDA_LIBRARY] = _load(CUDA_LIBRARY)
    return found


def require() -> None:
    """Raises ImportError with the reason unless the operators for the CPU are loaded."""
    reason = status()[CPU_LIBRARY]
    if reason is not None:
        raise ImportError(f"tessera.torch: {reason}; `python -m tessera doctor` says more")
