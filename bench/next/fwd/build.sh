#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# bash build.sh: all variants of plan.py, into so/. bash build.sh NAME REVISION PATCH|- [flags of nvcc]: one.
# A variant is a revision of this repository with one of patches/ over it. BASE is the commit before the kernels change.
cd "$(dirname "$0")"; here=$PWD; root=$(git rev-parse --show-toplevel)
of() { git log -1 --format=%h --grep="$1"; }
BASE=$(of '^fa3: long causal rows of few heads'); SKIP=$(of '^fa3: nothing is exponentiated'); ONLY=$(of '^fa3: a row with one block'); TURN=$(of '^fa3: at head_dim 64 the turn')
one() {
    local name=$1 revision=$2 patch=$3 at; shift 3; at=$(mktemp -d); mkdir -p so
    (cd "$root" && git archive "$revision" src include) | tar x -C "$at"
    [ "$patch" = - ] || (cd "$at" && patch -sp1 < "$here/patches/$patch.patch")
    nvcc -std=c++20 -O3 --generate-code=arch=compute_90a,code=sm_90a -I "$at/src" -I "$at/include" --expt-relaxed-constexpr \
        -Xptxas -v -DNDEBUG -Xcompiler -fPIC -shared -cudart shared "$@" -o "so/$name.so" driver.cu 2>&1 |
        grep -E "error|C75|spill" | grep -v " 0 bytes spill stores" | sed "s/^/$name: /"
    rm -r "$at"
}
if [ $# -gt 0 ]; then one "$@"; exit; fi
one base "$BASE" -
one skip "$SKIP" -
one only "$ONLY" -
one turn "$TURN" -
one stamps "$BASE" stamps -DSTAMPS
one lean "$BASE" lean -DNO192
one spin "$BASE" spin -DNO192
one q4 "$BASE" tiles -DONLY64 -DQ4
one k64 "$BASE" tiles -DONLY256 -DK64
for part in NOPARTIAL NOGUARD NOEPI NOSLACK NOEXP NOTURN; do one p_$part "$BASE" price -DNO192 -D$part; done
one p_all "$BASE" price -DNO192 -DNOPARTIAL -DNOEPI -DNOSLACK -DNOEXP
for i in 1 3 7 15 16; do one pf$i "$BASE" prefetch -DNO192 -DPF=$i; done
nvcc -O2 -cudart shared -o once once.cpp -ldl
python3 plan.py
