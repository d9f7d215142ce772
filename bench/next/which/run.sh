#!/bin/bash
# bash run.sh FOLDER OUT: traces of new cases, three processes beside each other, and PyTorch's answers to random calls
cd "$1" || exit 1  # a folder with tools/which_*.py, python/tessera/_sdpa_choice.py and an empty python/tessera/__init__.py
out=$2; mkdir -p "$out/traces"
export TORCHINDUCTOR_CACHE_DIR=/tmp/which_inductor TRITON_CACHE_DIR=/tmp/which_triton
run() { timeout -k 2 "$1" python3 tools/which_traces.py "$out/traces" "${@:3}" > "$out/$2.log" 2>&1; echo "$2 $? $SECONDS s"; }
run 64 calls step_calls step_hands & run 66 compiled step_triton step_compiled & run 64 language step_language &
(timeout -k 2 55 python3 tools/which_rules.py --random 20261124 --record "$out/random.tsv" > "$out/random.log" 2>&1; echo "rules $? $SECONDS s") &
wait
ls "$out/traces"/*.gz | wc -l; du -sh "$out"
cat "$out"/traces/*.tsv | cut -c1-150
