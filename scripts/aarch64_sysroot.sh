#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#     aarch64_sysroot.sh FOLDER
#
# Downloads the libraries that tessera and its tests are built with, for 64-bit Arm, and unpacks them in FOLDER. Nothing
# of the machine changes and root is not needed: apt works on lists and a cache of its own, as on an Arm machine with
# nothing installed. Exit status 77: they cannot be had here, and the last line says why.
set -euo pipefail

PACKAGES=(libhwy-dev libtbb-dev libfmt-dev libgtest-dev librapidcheck-dev nlohmann-json3-dev libcli11-dev
          zlib1g-dev libsqlite3-dev)
# They come with the cross compiler.
OF_THE_COMPILER='^(libc6|libgcc-s1|libstdc\+\+6|libcrypt1|gcc-[0-9]+-base)_'

cannot() { echo "no libraries for 64-bit Arm: $*"; exit 77; }

[[ $# == 1 ]] || { echo "usage: ${0##*/} FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
wanted="${PACKAGES[*]}"
[[ -f $folder/complete && $(<"$folder/complete") == "$wanted" ]] && exit 0

for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || cannot "there is no $tool here"
done

apt=$folder/apt
rm -rf "$apt"
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
: >"$apt/status"
options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Install-Recommends=false -o Debug::NoLocking=1
         -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User="$(id -un)"
         -o APT::Update::Error-Mode=any)
# Ubuntu keeps Arm packages on another server than those of x86-64.
# shellcheck source=/dev/null
source /etc/os-release
if [[ ${ID:-} == ubuntu ]]; then
    for suite in "$VERSION_CODENAME" "$VERSION_CODENAME-updates"; do
        echo "deb [signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] http://ports.ubuntu.com/ubuntu-ports $suite main universe"
    done >"$apt/sources.list"
    options+=(-o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=-)
fi

apt-get "${options[@]}" update -qq >"$apt/log" 2>&1 || cannot "apt-get update: $(tail -n 1 "$apt/log")"
apt-get "${options[@]}" install -qq -y --download-only "${PACKAGES[@]}" >"$apt/log" 2>&1 ||
    cannot "apt-get: $(tail -n 1 "$apt/log")"
for package in "$apt"/cache/archives/*.deb; do
    [[ ${package##*/} =~ $OF_THE_COMPILER ]] || dpkg-deb -x "$package" "$folder"
done
rm -rf "$apt"
echo "$wanted" >"$folder/complete"
