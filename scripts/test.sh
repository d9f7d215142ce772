#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that a change must pass: the checks of the source, all tests of the release build (GCC), all tests of a
# build with clang under ASan and UBSan, the kernels on threads under TSan, and the CPU kernels for 64-bit Arm (NEON) under
# qemu-user. The last line sums up; the exit status is 0 only when all went well.
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"

need "${BUILD_PACKAGES[@]}" libgtest-dev librapidcheck-dev clang libclang-rt-dev python3
if ! command -v clang-format-14 >/dev/null && command -v apt-get >/dev/null; then
    apt_install clang-format-14 || echo "clang-format-14 cannot be had here: the format is not checked"
fi

passed=0
failed=0
problems=()
skipped=()

# problem WHAT: something failed that is no test of ctest's.
problem() {
    echo "FAILED: $1"
    problems+=("$1")
    failed=$((failed + 1))
}

# build NAME FOLDER OPTION...
build() {
    local name=$1 folder=$2
    shift 2
    say "$name: build"
    configure_and_build "$folder" "$@" && return
    problem "$name: build"
    return 1
}

# tests NAME FOLDER CTEST-ARGUMENT...: runs ctest and adds to the sums.
tests() {
    local name=$1 folder=$2 line
    shift 2
    say "$name: tests"
    ctest --test-dir "$folder" --output-on-failure --timeout 900 -j "$JOBS" "$@" 2>&1 | tee "$folder/ctest.log" | short || true
    # "97% tests passed, 3 tests failed out of 100"
    line=$(grep -E '^[0-9]+% tests passed, ' "$folder/ctest.log" | tail -n 1 || true)
    if [[ $line =~ ([0-9]+)\ tests?\ failed\ out\ of\ ([0-9]+) ]]; then
        failed=$((failed + BASH_REMATCH[1]))
        passed=$((passed + BASH_REMATCH[2] - BASH_REMATCH[1]))
        [[ ${BASH_REMATCH[1]} == 0 ]] || problems+=("$name: ${BASH_REMATCH[1]} tests")
    else
        problem "$name: no test was run"
    fi
}

check_format() {
    local files
    mapfile -t files < <(git ls-files '*.hpp' '*.h' '*.cc' '*.c' '*.cuh' '*.cu')
    [[ ${#files[@]} == 0 ]] || clang-format-14 --dry-run --Werror "${files[@]}"
}

say "source"
python3 tools/check_layers.py || problem "layers"
if command -v clang-format-14 >/dev/null && git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    if check_format; then echo "format ok"; else problem "format"; fi
fi

WITH_TESTS=(-DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON)
if build release build --preset ci "${WITH_TESTS[@]}"; then
    tests release build
    # What the CUDA kernels and the inner loops of the CPU are made of; the tests themselves have judged them.
    ctest --test-dir build -R '^check_(kernels|loops)$' --verbose | sed -n '/: Test command\|: Working\|: Test timeout/d; s/^[0-9]*: //p' || true
fi

# The second compiler and the sanitizers in one build. -O1 and line numbers only: compiled in a fraction of the time.
# Without NDEBUG, so assertions are on. Without CUDA: nvcc has its own host compiler, and no kernel could run here.
SANITIZED=(-DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ "${WITH_TESTS[@]}" -DTESSERA_CUDA=OFF
           -DCMAKE_C_FLAGS_RELWITHDEBINFO="-O1 -gline-tables-only" -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -gline-tables-only")
if build "clang, ASan and UBSan" build-asan --preset asan "${SANITIZED[@]}"; then
    tests "clang, ASan and UBSan" build-asan
fi

# The kernels on plain threads: ThreadSanitizer can't see what orders oneTBB's tasks, since that isn't compiled with it.
if build "clang, TSan" build-tsan --preset tsan "${SANITIZED[@]}" -- c_api_threads_test; then
    tests "clang, TSan" build-tsan -R c_api_threads_test
fi

# NEON, cross-compiled and emulated: are the results right? All kernels, all corner cases, all random cases and the tile
# words' tests; not the tests of the checks themselves, of bf16 units, which only x86-64 has, nor those that take long
# because of their sizes, which are no matter of the instruction set.
NOT_EMULATED='^compare\.|^MatrixKernels\.|Cuda|bug_26_30|bug_27|bug_30|bug_32'

# Prints why that can't be done here, or nothing.
no_neon() {
    local packages=(g++-aarch64-linux-gnu qemu-user) missing
    if [[ $(uname -m) != x86_64 ]]; then echo "this is no x86-64 machine; on Arm the release build has tested it"; return; fi
    mapfile -t missing < <(missing_packages "${packages[@]}" 2>/dev/null || true)
    if [[ ${#missing[@]} != 0 ]] &&
        ! (as_root apt-get update -qq && apt_install "${missing[@]}") >"$NEON/packages.log" 2>&1; then
        echo "could not install ${missing[*]}: $(tail -n 1 "$NEON/packages.log")"
        return
    fi
    if ! command -v aarch64-linux-gnu-g++ >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
        echo "aarch64-linux-gnu-g++ and qemu-aarch64 are not here"
        return
    fi
    # Another status than 3 is a failure, which the build will report.
    scripts/aarch64_sysroot.sh "$NEON/sysroot" >"$NEON/packages.log" 2>&1 || [[ $? != 3 ]] || tail -n 1 "$NEON/packages.log"
}

NEON=build-aarch64
mkdir -p "$NEON"
reason=$(no_neon)
if [[ -n $reason ]]; then
    say "NEON: skipped: $reason"
    skipped+=("NEON: $reason")
elif build "NEON (qemu-user)" "$NEON" --preset ci -B "$NEON" --toolchain cmake/aarch64.cmake -DTESSERA_CUDA=OFF \
    -DTESSERA_SYSROOT="$PWD/$NEON/sysroot" -DTESSERA_BUILD_TESTS=ON -- kernels_test; then
    tests "NEON (qemu-user)" "$NEON" -L '^kernels_test$' -E "$NOT_EMULATED"
fi

say "sum"
[[ ${#skipped[@]} == 0 ]] || printf 'skipped: %s\n' "${skipped[@]}"
[[ ${#problems[@]} == 0 ]] || printf 'failed: %s\n' "${problems[@]}"
echo "$passed passed, $failed failed"
[[ $failed == 0 ]]
