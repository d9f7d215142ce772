#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs everything that a change must pass: the checks of the source, all tests of the release build (GCC), the Python
# package from a wheel (scripts/test_python.sh), the page in a browser (scripts/test_web.sh), all tests of a build with
# clang under ASan and UBSan, the kernels on threads under TSan, and the CPU kernels for 64-bit Arm (NEON) under
# qemu-user. The last lines name the time of each stage and what was skipped and why, and sum up. The exit status is 0
# only when all went well.
#
#   scripts/test.sh [--long] [--without-torch]
#
# --without-torch: the Python package without PyTorch, a download of gigabytes; tests that need it are skipped.
# --long: ten times the random cases and properties, and other ones each day (TESSERA_SEED=NUMBER repeats those of another
# run); on NEON and under the sanitizers also the tests that do not depend on the instruction set or on memory. It takes
# hours, for nights and releases.
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/stages.sh
source scripts/stages.sh

LONG= PYTHON_OPTIONS=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --long) LONG=yes; export TESSERA_LONG=1 ;;
        --without-torch) PYTHON_OPTIONS+=(--without-torch) ;;
        *) die "unknown option $1; usage: scripts/test.sh [--long] [--without-torch]" ;;
    esac
    shift
done

# ccache: the wheel, the consumer of the package and a changed tree compile much of what the release build has.
need "${BUILD_PACKAGES[@]}" libgtest-dev librapidcheck-dev clang libclang-rt-dev python3 python3-venv ccache
use_ccache
if ! command -v clang-format-14 >/dev/null && command -v apt-get >/dev/null; then
    apt_install clang-format-14 || true  # without it the format is not checked, which the sum says
fi

check_format() {
    local files
    mapfile -t files < <(git ls-files '*.hpp' '*.h' '*.cc' '*.c' '*.cuh' '*.cu')
    [[ ${#files[@]} == 0 ]] || clang-format-14 --dry-run --Werror "${files[@]}"
}

if [[ -n $LONG ]]; then
    export TESSERA_SEED=${TESSERA_SEED:-$(date -u +%Y%m%d)}
    echo "random cases of TESSERA_SEED=$TESSERA_SEED"
else
    echo "without what takes long; scripts/test.sh --long has it too"
fi
say "source"
python3 tools/check_layers.py || problem "layers"
python3 tools/check_text.py || problem "pages"
if ! command -v clang-format-14 >/dev/null; then skip "format" "clang-format-14 is not here"
elif ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then skip "format" "git knows no checkout here"
elif check_format; then echo "format ok"
else problem "format"
fi

# A download of gigabytes, beside the builds. The stage below waits for it, and says what went wrong.
scripts/test_python.sh "${PYTHON_OPTIONS[@]}" --packages >/dev/null 2>&1 &

WITH_TESTS=(-DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON)
# Without a GPU the kernels are compiled for one architecture only: the checks of their code find much the same in each.
RELEASE=("${WITH_TESTS[@]}")
if [[ -z $LONG ]] && ! nvidia-smi -L >/dev/null 2>&1; then RELEASE+=("-DTESSERA_CUDA_ARCHITECTURES=90-real"); fi
if build release build --preset ci "${RELEASE[@]}"; then
    tests release build
    # Prints the instructions and registers of the CUDA kernels and the CPU's inner loops; tests have judged them above.
    ctest --test-dir build -R '^check_(kernels|loops)$' --verbose | sed -n '/: Test command\|: Working\|: Test timeout/d; s/^[0-9]*: //p' || true
fi

# The Python package, from a wheel, which is another build: a shared library, without CUDA.
script Python build-python scripts/test_python.sh "${PYTHON_OPTIONS[@]}"

# The page, its core as WebAssembly, in Chromium.
script page build-web scripts/test_web.sh

# The second compiler and the sanitizers in one build. -O1 and line numbers only: compiled in a fraction of the time.
# Without NDEBUG, so assertions are on. Without CUDA: nvcc has its own host compiler, and no kernel could run here.
SANITIZED=(-DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ "${WITH_TESTS[@]}" -DTESSERA_CUDA=OFF
           -DCMAKE_C_FLAGS_RELWITHDEBINFO="-O1 -gline-tables-only" -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -gline-tables-only"
           -DTESSERA_SANITIZE_JUDGE="${LONG:-OFF}")
# Left out under the sanitizers, without --long: the trials of the judge, which are arithmetic of tests on memory of tests;
# statistics; special values in all head dims but the smallest and the one with another for V; the sample on every
# schedule, and cases that are large for their length, whose code is that of small ones; the model beside thousands of
# Records; calibration, which measures; the cures of hundreds of drawn calls; names of kernels cut at each letter. Bits and
# long sums, which are compared on code whose memory other tests check.
NOT_SANITIZED='Compare.*:Tolerances.*:*Planted*:SignedError.*:*every_schedule_is_right_on_the_sample:*queries_without_keys'
NOT_SANITIZED+=':Accuracy.*:*roofline_tells_its_accuracy:Cure.does_what*:Cure.is_missing*'
NOT_SANITIZED+=':Calibrate.cpu_gives_a_machine_that_can_be*:*calibrate_writes_a_machine*:KernelNames.never_takes_a_cut_name*'
NOT_SANITIZED+=':*DecodeBlock.is_right_for_the_shapes_of_models*:Predict.bytes_grow_with_the_length:Sinks.results_are_within*'
NOT_SANITIZED+=':*Few*.have_the_bits_of_many/*:*beside_special_values*:*bits_of_the_tile_path*:*sequence_do_not_depend*'
NOT_SANITIZED+=':*RowBits*:*every_unit_gives_the_bits*:*bits_depend_on_the_row*:*LongSums*:*bug_32*'
for dims in 64x64 96x96 128x128 192x128 192x192 256x256; do
    NOT_SANITIZED+=":*SpecialValues*_$dims:*InfiniteKeys*_$dims"
done
# Likewise the command, drawings, reports and lessons, and the checks of the source: these are a third of the build.
programs=(core_test cuda_host_test diagnose_test io_test kernels_test llama_test c_api_test c_api_decode_block_test
          c_api_errors_test c_api_plan_test c_api_threads_test)
selected=(-R "^($(IFS='|'; echo "${programs[*]}"))([.]|\$)")
filter="-$NOT_SANITIZED"
if [[ -n $LONG ]]; then programs=() selected=() filter='*'; fi
if build "clang, ASan and UBSan" build-asan --preset asan "${SANITIZED[@]}" ${programs[0]+-- "${programs[@]}"}; then
    GTEST_FILTER=$filter tests "clang, ASan and UBSan" build-asan "${selected[@]}"
fi

# The kernels on plain threads: ThreadSanitizer can't see what orders oneTBB's tasks, since that isn't compiled with it.
if build "clang, TSan" build-tsan --preset tsan "${SANITIZED[@]}" -- c_api_threads_test; then
    tests "clang, TSan" build-tsan -R c_api_threads_test
fi

# NEON, cross-compiled and emulated: are the results right? This runs the corner cases, five of the fifteen parts of the
# random cases, special values, few queries without large groups or special values, and the tests of the tile primitives.
# Other tests of kernels (bits that depend on the batch, more head dims, known bugs) are left to --long. Never run here: the
# tests of the checks themselves and of bf16 units, which only x86-64 has, and those that take long because of their sizes,
# which do not depend on the instruction set.
EMULATED='*CornerCase*:*RandomCases*/1?:Cpu/*:*SpecialValues*_24x24:SpecialValuesOnce.*:Stripes.*'
NOT_EMULATED='Compare.*:Matrix*:*MatrixRandomCases*:*Cuda*:*queries_without_keys:*bug_26_30*:*bug_27*:*bug_30*:*bug_32*'

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
    # Any other failure than CANNOT leaves no libraries, and the build reports it.
    scripts/aarch64_sysroot.sh "$NEON/sysroot" >"$NEON/packages.log" 2>&1 || [[ $? != "$CANNOT" ]] ||
        tail -n 1 "$NEON/packages.log"
}

NEON=build-aarch64
mkdir -p "$NEON"
reason=$(no_neon)
if [[ -n $reason ]]; then
    skip "NEON" "$reason"
elif build "NEON (qemu-user)" "$NEON" --preset ci -B "$NEON" --toolchain cmake/aarch64.cmake -DTESSERA_CUDA=OFF \
    -DTESSERA_SYSROOT="$PWD/$NEON/sysroot" -DTESSERA_BUILD_TESTS=ON -- kernels_test; then
    if [[ -n $LONG ]]; then EMULATED='*'
    else NOT_EMULATED+=':*of_a_sequence_do_not_depend*:*/group_of_*:*Few*beside_special_values*'
    fi
    GTEST_FILTER="$EMULATED:-$NOT_EMULATED" tests "NEON (qemu-user)" "$NEON" -L '^kernels_test$'
fi

sum
