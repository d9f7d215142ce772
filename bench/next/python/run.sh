#!/usr/bin/env bash
# run.sh FOLDER OUT [SECONDS]: FOLDER has pack.tar.xz; reports go to OUT, their last lines to the terminal. Seconds of the suites: 220.
folder=$1 out=$2 seconds=${3:-220}
work=$(mktemp -d)
begun=$(date +%s)
say() { echo "== $(($(date +%s) - begun)) s: $*"; }
tar -C "$work" -xJf "$folder/pack.tar.xz" || exit 1
cd "$work" || exit 1
install() { python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$@" 2>&1 | tail -n 1; }
install whl/tessera*.whl
for name in einops pytest expecttest; do
    python3 -c "import $name" 2>/dev/null || install "whl/$name"*.whl whl/pluggy*.whl whl/iniconfig*.whl
done
export PYTHONPATH=$work/site PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
timeout 30 python3 -m tessera doctor >"$out/doctor.txt" 2>&1
say unpacked
timeout 30 python3 host.py "$work/site" 2>&1 | tee "$out/host.txt"
timeout 30 python3 bench/overhead.py --device cuda 2>&1 | tee "$out/overhead.txt"
say overhead
minutes=$(python3 -c "print(($seconds - 25) / 60)")
judge() {  # NAME ARGUMENTS...
    local name=$1
    shift
    timeout "$seconds" python3 tests/judges/run.py "$@" --minutes "$minutes" >"$out/$name.txt" 2>&1
    echo "$name: $(tail -n 1 "$out/$name.txt")"
}
(timeout "$seconds" python3 -m pytest -c pytest.ini --rootdir "$work" -p no:cacheprovider tests --ignore tests/judges >"$out/own.txt" 2>&1
 tail -n 3 "$out/own.txt") &
for i in 0 1 2 3 4 5 6 7; do
    judge "fa_$i" flash-attention "$work/co/flash-attention" --device cuda --count 3800 --seed 21 --longest 800 --part "$i/8" &
done
for i in 0 1 2; do
    judge "fa3_$i" flash-attention-3 "$work/co/flash-attention" --device cuda --count 1000 --seed 22 --longest 800 --part "$i/3" &
done
for i in 0 1 2; do
    judge "pytorch_$i" pytorch "$work/co/pytorch" --count 700 --seed 23 --part "$i/3" -k "not mem_eff and not cudnn and not TestTransformers" &
done
wait
say end
grep -h "^failed" "$out"/fa*.txt
python3 - "$out" <<'P'
import collections
import pathlib
import re
import sys
sums = collections.defaultdict(collections.Counter)
for file in pathlib.Path(sys.argv[1]).glob("*_[0-9].txt"):
    for number, what in re.findall(r"(\d+) (passed|failed|skipped)", "".join(
            line for line in file.read_text().splitlines(True) if re.match(r"\d+ passed, \d+ failed, \d+ skipped", line))):
        sums[file.stem.rpartition("_")[0]][what] += int(number)
for suite, counts in sums.items():
    print(suite, dict(counts))
P
rm -r "$work"
