#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by test.sh after setup.sh: runs stages, and sums up what passed, was skipped, failed, and how long each took.
# A stage that breaks counts as failed, whatever results it left: only `skip` and the status CANNOT count as skipped.
# tests/tools/stages_test.py runs it with stages that break in every way.

# Exit status of a script that cannot do its work on this machine; its last line of output says why. Neither pytest
# (0 to 5) nor ctest, apt-get or a compiler ends with it.
CANNOT=77

failed=0          # checks of the source and builds, which are no tests of ctest's
skipped=0         # whole stages
problems=()       # what failed, for the sum
skipped_stages=() # what was skipped, and why
stages=()         # NAME=FOLDER, whose results tools/test_summary.py reads
times=()          # "SECONDS WHAT"

# problem WHAT: something failed that is no test of ctest's.
problem() {
    echo "FAILED: $1"
    problems+=("$1")
    failed=$((failed + 1))
}

# skip WHAT WHY: a whole stage, or a check of the source.
skip() {
    say "$1: skipped: $2"
    skipped=$((skipped + 1))
    skipped_stages+=("$1: $2")
}

# took WHAT BEGIN: SECONDS was BEGIN when it started.
took() {
    times+=("$((SECONDS - $2)) $1")
    echo "$((SECONDS - $2)) s"
}

# build NAME FOLDER OPTION...
build() {
    local name=$1 folder=$2 begin=$SECONDS status=0
    shift 2
    say "$name: build"
    configure_and_build "$folder" "$@" || status=$?
    took "$name: build" "$begin"
    [[ $status == 0 ]] && return
    problem "$name: build"
    return 1
}

# start_of_stage NAME FOLDER: forgets the results of another run.
start_of_stage() {
    mkdir -p "$2"
    rm -rf "$2/results" "$2/ctest.xml" "$2/status"
}

# tests NAME FOLDER CTEST-ARGUMENT...: runs ctest. The output of programs whose tests passed is not shown.
tests() {
    local name=$1 folder=$2 begin=$SECONDS
    shift 2
    say "$name: tests"
    start_of_stage "$name" "$folder"
    stages+=("$name=$folder")
    { ctest --test-dir "$folder" --output-on-failure --timeout 900 -j "$JOBS" --output-junit ctest.xml "$@" 2>&1 &&
        echo 0 >"$folder/status" || echo $? >"$folder/status"; } | tee "$folder/ctest.log" | short || true
    took "$name: tests" "$begin"
}

# script NAME FOLDER COMMAND...: runs a script that leaves pytest's results in FOLDER/ctest.xml.
script() {
    local name=$1 folder=$2 begin=$SECONDS status=0
    shift 2
    say "$name"
    start_of_stage "$name" "$folder"
    "$@" | tee "$folder/log" || status=$?
    if [[ $status == "$CANNOT" ]]; then
        skip "$name" "$(tail -n 1 "$folder/log")"
    else
        echo "$status" >"$folder/status"
        stages+=("$name=$folder")
    fi
    took "$name" "$begin"
}

# Prints the sum. The status is 0 when nothing failed and something ran.
sum() {
    say "sum"
    [[ ${#skipped_stages[@]} == 0 ]] || printf 'skipped: %s\n' "${skipped_stages[@]}"
    [[ ${#problems[@]} == 0 ]] || printf 'failed: %s\n' "${problems[@]}"
    printf 'seconds by stage, %d minutes in all:\n' $(((SECONDS + 30) / 60))
    local entry
    for entry in "${times[@]}"; do printf '%8d  %s\n' "${entry%% *}" "${entry#* }"; done
    echo
    python3 tools/test_summary.py --known "0,$skipped,$failed" "${stages[@]}"
}
