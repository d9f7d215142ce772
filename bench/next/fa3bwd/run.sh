#!/bin/bash
# bash bench/next/fa3bwd/run.sh BUILD OUT [NAME=LIBRARY ...]: on a machine with an H200, from the root of the repository.
# BUILD: a build of this commit (shared library, tests). NAME=LIBRARY: libtessera.so of other commits, timed beside it
# (those of the commit before, and of every idea alone). Some 90 s on 16 cores, parts of it with limits of their own.
BUILD=$1 OUT=$2; shift 2; mkdir -p "$OUT"; HERE=$(dirname "$0")
LIBS="new=$BUILD/src/libtessera.so"; for lib in "$@"; do LIBS="$LIBS,$lib"; done
FILTER='cases/CudaHeldGradients*:CudaGradients*:all_kernels/CudaRested*:CudaRestOfO*:all_kernels/CudaCases*:all_kernels/CudaRandomCases*:all_kernels/FeatureCases*cuda*:all_kernels/FeatureCounts*'
for i in $(seq 0 14); do
    GTEST_TOTAL_SHARDS=15 GTEST_SHARD_INDEX=$i timeout 120 "$BUILD/tests/kernels_test" --gtest_filter="$FILTER" > "$OUT/tests$i.log" 2>&1 &
done; wait
grep -h -E "^\[  (PASSED|FAILED)" "$OUT"/tests*.log | sort | uniq -c | sort -rn | head -40; grep -L "tests ran" "$OUT"/tests*.log
timeout 60 "$BUILD/tests/cuda/cuda_stress_test" --gtest_filter='Large*' > "$OUT/large.log" 2>&1; grep -E 'ms\)|Failure' "$OUT/large.log"
timeout 30 python3 "$HERE/accuracy.py" "$BUILD/src/libtessera.so" 2>&1 | tee "$OUT/accuracy.log"
timeout 120 python3 "$HERE/times.py" "$LIBS" 100 2>&1 | tee "$OUT/times.log"
