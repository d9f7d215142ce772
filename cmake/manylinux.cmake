# SPDX-License-Identifier: Apache-2.0
#
# Builds for manylinux_2_28 (glibc 2.28, RHEL 8 and later) with Debian 12's GCC 12, for x86-64 or for 64-bit Arm:
#
#     scripts/manylinux_sysroot.sh x86_64|aarch64 FOLDER
#     cmake --toolchain cmake/manylinux.cmake -DTESSERA_PROCESSOR=x86_64|aarch64 -DTESSERA_SYSROOT=FOLDER
#
# scripts/wheel.sh --manylinux does both. A symbol that manylinux_2_28 does not have is an error of the linker.
set(TESSERA_PROCESSOR x86_64 CACHE STRING "x86_64 or aarch64")
set(TESSERA_SYSROOT "" CACHE PATH "Where scripts/manylinux_sysroot.sh made the sysroot")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_PROCESSOR TESSERA_SYSROOT)
if(TESSERA_PROCESSOR STREQUAL "aarch64")
    include(${CMAKE_CURRENT_LIST_DIR}/aarch64.cmake)
    # The cross compiler looks into its own glibc first, so all its system folders are named here, in their usual order.
    set(cxx_headers /usr/aarch64-linux-gnu/include/c++/12)
    set(gcc_headers /usr/lib/gcc-cross/aarch64-linux-gnu/12/include)
else()
    set(CMAKE_C_COMPILER x86_64-linux-gnu-gcc)
    set(CMAKE_CXX_COMPILER x86_64-linux-gnu-g++)
    set(CMAKE_LIBRARY_ARCHITECTURE x86_64-linux-gnu)
    set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
    set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
    set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
    set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
    set(cxx_headers /usr/include/c++/12)
    set(gcc_headers /usr/lib/gcc/x86_64-linux-gnu/12/include)
endif()
set(CMAKE_FIND_ROOT_PATH ${TESSERA_SYSROOT}/libraries)
set(triple ${CMAKE_LIBRARY_ARCHITECTURE})
if(TESSERA_PROCESSOR STREQUAL "aarch64")
    set(cxx_of_triple ${cxx_headers}/${triple})
else()
    set(cxx_of_triple /usr/include/${triple}/c++/12)
endif()

set(c_options --sysroot=${TESSERA_SYSROOT} -nostdinc)
foreach(folder ${gcc_headers} ${TESSERA_SYSROOT}/usr/include/${triple} ${TESSERA_SYSROOT}/usr/include)
    list(APPEND c_options -isystem ${folder})
endforeach()
set(cxx_options -nostdinc++ -isystem ${cxx_headers} -isystem ${cxx_of_triple} -isystem ${cxx_headers}/backward
                ${c_options})
list(JOIN c_options " " CMAKE_C_FLAGS_INIT)
list(JOIN cxx_options " " CMAKE_CXX_FLAGS_INIT)

# The sysroot's startup files and libraries come before the compiler's own. Symbols of static libraries stay inside the
# file that holds them. In glibc 2.28 threads and dlopen are libraries of their own.
set(libraries ${TESSERA_SYSROOT}/usr/lib/${triple})
set(link "-B${libraries} -L${libraries} -L${TESSERA_SYSROOT}/lib/${triple}")
foreach(kind EXE SHARED MODULE)
    set(CMAKE_${kind}_LINKER_FLAGS_INIT "--sysroot=${TESSERA_SYSROOT} ${link} -Wl,--exclude-libs,ALL")
endforeach()
set(CMAKE_C_STANDARD_LIBRARIES "-lpthread -ldl -lrt -lm")
set(CMAKE_CXX_STANDARD_LIBRARIES "-lpthread -ldl -lrt -lm")

# nvcc hands them on to the compiler of the host, and links with it when CMake tries nvcc out. TESSERA_CUDA_LIBRARIES is
# the folder of libcudart_static.a for the processor, where the toolkit of this machine has none.
set(TESSERA_CUDA_LIBRARIES "" CACHE PATH "Folder of libcudart_static.a, if not that of the CUDA toolkit")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_CUDA_LIBRARIES)
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
find_program(TESSERA_NVCC nvcc PATHS /usr/local/cuda/bin)
if(TESSERA_NVCC)  # the toolkit is no part of the sysroot
    get_filename_component(toolkit ${TESSERA_NVCC} DIRECTORY)
    get_filename_component(toolkit ${toolkit} DIRECTORY)
    get_filename_component(real_toolkit ${toolkit} REALPATH)
    list(APPEND CMAKE_FIND_ROOT_PATH ${toolkit} ${real_toolkit})
endif()
list(JOIN cxx_options "," cuda_options)
string(REPLACE " " "," cuda_link ${link})
set(CMAKE_CUDA_FLAGS_INIT "-Xcompiler=${cuda_options},${cuda_link}")
if(TESSERA_CUDA_LIBRARIES)
    # The toolkit's headers are the same for every processor; nvcc would look for a folder of their own.
    string(APPEND CMAKE_CUDA_FLAGS_INIT " -target-dir=x86_64-linux -L${TESSERA_CUDA_LIBRARIES}")
    set(CUDA_CUDART ${TESSERA_CUDA_LIBRARIES}/libcudart_static.a CACHE FILEPATH "" FORCE)
    set(CUDA_cudart_static_LIBRARY ${TESSERA_CUDA_LIBRARIES}/libcudart_static.a CACHE FILEPATH "" FORCE)
endif()
