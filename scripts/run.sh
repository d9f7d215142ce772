#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From a fresh checkout to a result: installs what is missing (Debian 12, Ubuntu 24.04), builds the command `tessera`,
# and computes attention, forward and backward, over activations of a real model, once by every schedule. Each result
# is checked against the fp64 reference.
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"

need "${BUILD_PACKAGES[@]}"

say "building into build/"
configure_and_build build --preset release -DTESSERA_BUILD_TESTS=OFF -- tessera_cli

# The schedules that the CPU has backward kernels of, the simplest first.
schedules=$(build/tessera list | sed -n 's/^ *cpu\.\(.*\)\.backward .*/\1/p' | tac)
for schedule in $schedules; do
    say "attention by schedule $schedule"
    command=(build/tessera run examples/data/kjv-layer2.safetensors --layout bhsd --causal bottom-right --scale 0.125
             --schedule "$schedule" --backward --check -o build/kjv-attention.safetensors)
    echo "\$ ${command[*]}"
    "${command[@]}"
done

cat <<'END'

O, LSE, dQ, dK and dV are in build/kjv-attention.safetensors; every schedule was within the limits of docs/numerics.md.
Next: build/tessera --help, or scripts/test.sh for all tests.
END
