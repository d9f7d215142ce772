#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#     manylinux_sysroot.sh x86_64|aarch64 FOLDER
#
# Makes a folder that the linker takes for an older system, with which GCC 12 builds for manylinux_2_28: startup files of
# Debian 11, stubs of its C and C++ libraries (tools/stub_library.py), and in FOLDER/libraries static builds of fmt,
# Highway, oneTBB, SQLite and zlib. Nothing of the machine changes and root is not needed. cmake/manylinux.cmake is the
# toolchain file that uses it. Exit status 77: the packages cannot be had here, and the last line says why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cannot() { echo "no sysroot for manylinux_2_28: $*"; exit 77; }
usage() { echo "usage: ${0##*/} x86_64|aarch64 FOLDER" >&2; exit 2; }

[[ $# == 2 ]] || usage
case $1 in
    x86_64) debian=amd64 compiler=x86_64-linux-gnu-gcc cxx=/usr/lib/gcc/x86_64-linux-gnu/12 ;;
    aarch64) debian=arm64 compiler=aarch64-linux-gnu-gcc cxx=/usr/lib/gcc-cross/aarch64-linux-gnu/12 ;;
    *) usage ;;
esac
triple=$1-linux-gnu
mkdir -p "$2"
folder=$(cd "$2" && pwd)
# A change of what makes it makes a new sysroot.
made_by=$(cat scripts/manylinux_sysroot.sh scripts/manylinux_newer_libc.c tools/stub_library.py | sha256sum)
[[ -f $folder/complete && $(<"$folder/complete") == "$made_by" ]] && exit 0
rm -rf "${folder:?}"/*

# shellcheck source=/dev/null
source /etc/os-release
[[ ${ID:-} == debian && ${VERSION_CODENAME:-} == bookworm ]] || cannot "this is not Debian 12"
for tool in apt-get dpkg-deb cmake ninja readelf python3 "$compiler"; do
    command -v "$tool" >/dev/null || cannot "there is no $tool here"
done
# shellcheck disable=SC2016  # apt puts in what it stands for
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
[[ -n $mirror ]] || cannot "apt knows no mirror of Debian 12"

# apt works on lists and a cache of its own.
apt=$folder/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/packages" "$apt/sources"
: >"$apt/status"
cat >"$apt/sources.list" <<LIST
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bullseye main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main
deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main
LIST
options=(-qq -o APT::Architecture="$debian" -o APT::Architectures="$debian" -o Debug::NoLocking=1 -o Dir::State="$apt"
         -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User="$(id -un)"
         -o APT::Update::Error-Mode=any -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=-)
apt-get "${options[@]}" update >"$apt/log" 2>&1 || cannot "apt-get update: $(tail -n 1 "$apt/log")"
# download FOLDER PACKAGE...: unpacks packages.
download() {
    local into=$1
    shift
    rm -f "$apt"/packages/*.deb
    (cd "$apt/packages" && apt-get "${options[@]}" download "$@") >"$apt/log" 2>&1 ||
        cannot "apt-get download: $(tail -n 1 "$apt/log")"
    for package in "$apt"/packages/*.deb; do dpkg-deb -x "$package" "$into"; done
}
download "$folder" {libc6,libc6-dev,libgcc-s1,libstdc++6}/bullseye
download "$folder/libraries" {zlib1g-dev,libsqlite3-dev}/bullseye {nlohmann-json3-dev,libcli11-dev}/bookworm
rm "$folder/libraries/usr/lib/$triple"/lib{sqlite3,z}.so  # which leaves the static ones
(cd "$apt/sources" && apt-get "${options[@]}" source --download-only fmtlib highway onetbb) >"$apt/log" 2>&1 ||
    cannot "apt-get source: $(tail -n 1 "$apt/log")"

# A package's absolute links lead out of the sysroot.
find "$folder/usr/lib" "$folder"/lib* -type l -lname '/*' | while read -r link; do
    ln -sfn "$folder$(readlink "$link")" "$link"
done

stubs=("$folder"/lib/"$triple"/lib{c,m}.so.6 "$folder"/lib/"$triple"/lib{pthread.so.0,dl.so.2,rt.so.1,gcc_s.so.1}
       "$folder"/lib/"$triple"/ld-linux-*.so.* "$folder/usr/lib/$triple/libstdc++.so.6")
python3 tools/stub_library.py "$compiler" "${stubs[@]}"
# C++ that GCC 8's libstdc++ does not have comes from GCC 12's static library, into the file that needs it.
ln -s "$cxx/libstdc++.a" "$folder/usr/lib/$triple/libstdc++_newer.a"
"$compiler" -O2 -Wall -Wextra -fPIC -fvisibility=hidden -c -o "$apt/newer_libc.o" scripts/manylinux_newer_libc.c
ar rcs "$folder/usr/lib/$triple/libnewer_libc.a" "$apt/newer_libc.o"
echo "INPUT ( libstdc++.so.6 libstdc++_newer.a libnewer_libc.a )" >"$folder/usr/lib/$triple/libstdc++.so"

# build NAME OPTION...: installs a static library from its source.
build() {
    local name=$1 source=$apt/sources/$1
    shift
    mkdir -p "$source"
    tar -xf "$apt/sources/$name"_*.orig.tar.* -C "$source" --strip-components=1
    { cmake -G Ninja -S "$source" -B "$source/build" --toolchain "$PWD/cmake/manylinux.cmake" \
        -DTESSERA_SYSROOT="$folder" -DTESSERA_PROCESSOR="$processor" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_INSTALL_PREFIX="$folder/libraries/usr" -DCMAKE_INSTALL_LIBDIR="lib/$triple" -DBUILD_SHARED_LIBS=OFF \
        -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DBUILD_TESTING=OFF "$@" &&
        cmake --build "$source/build" -j "${JOBS:-$(nproc)}" && cmake --install "$source/build"
    } >"$folder/$name.log" 2>&1 || { tail -n 40 "$folder/$name.log" >&2; echo "could not build $name" >&2; exit 1; }
}
processor=$1
build fmtlib -DFMT_TEST=OFF -DFMT_DOC=OFF
build highway -DHWY_ENABLE_TESTS=OFF -DHWY_ENABLE_EXAMPLES=OFF -DHWY_ENABLE_CONTRIB=OFF
# Highway 1.0.3 installs no package for CMake.
mkdir -p "$folder/libraries/usr/lib/$triple/cmake/hwy"
cat >"$folder/libraries/usr/lib/$triple/cmake/hwy/hwy-config.cmake" <<CONFIG
add_library(hwy::hwy STATIC IMPORTED)
set_target_properties(hwy::hwy PROPERTIES IMPORTED_LOCATION "$folder/libraries/usr/lib/$triple/libhwy.a"
                                          INTERFACE_INCLUDE_DIRECTORIES "$folder/libraries/usr/include")
CONFIG
build onetbb -DTBB_TEST=OFF -DTBB_STRICT=OFF -DTBBMALLOC_BUILD=OFF -DTBB_DISABLE_HWLOC_AUTOMATIC_SEARCH=ON
rm -rf "$apt"
echo "$made_by" >"$folder/complete"
