# SPDX-License-Identifier: Apache-2.0
#
# Cross-compiling for 64-bit Arm on Debian and Ubuntu, tests run by qemu-user:
#
#     scripts/aarch64_sysroot.sh FOLDER
#     cmake --preset ci -B build-aarch64 --toolchain cmake/aarch64.cmake -DTESSERA_SYSROOT=FOLDER
#
# libc and libstdc++ are those of the cross compiler; FOLDER holds the other libraries.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# Nothing but programs comes from the machine that builds.
set(TESSERA_SYSROOT "" CACHE PATH "Where scripts/aarch64_sysroot.sh unpacked the libraries")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_SYSROOT)
set(CMAKE_FIND_ROOT_PATH ${TESSERA_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${TESSERA_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig)
