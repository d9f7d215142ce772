# SPDX-License-Identifier: Apache-2.0
#
# Builds for manylinux_2_28 (glibc 2.28, RHEL 8 and later) on Debian 12, for x86-64 or for 64-bit Arm:
#
#     scripts/manylinux_sysroot.sh x86_64|aarch64 FOLDER
#     cmake --toolchain cmake/manylinux.cmake -DTESSERA_PROCESSOR=x86_64|aarch64 -DTESSERA_SYSROOT=FOLDER
#
# scripts/wheel.sh --manylinux does both. Compiling is that of every build. The linker sees FOLDER's older C and C++
# libraries instead of the compiler's, so a symbol that manylinux_2_28 does not have is an error there.
set(TESSERA_PROCESSOR x86_64 CACHE STRING "x86_64 or aarch64")
set(TESSERA_SYSROOT "" CACHE PATH "Where scripts/manylinux_sysroot.sh made the sysroot")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_PROCESSOR TESSERA_SYSROOT)
if(TESSERA_PROCESSOR STREQUAL "aarch64")
    include(${CMAKE_CURRENT_LIST_DIR}/aarch64.cmake)
else()
    set(CMAKE_LIBRARY_ARCHITECTURE x86_64-linux-gnu)
    set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
    set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
    set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
    set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
endif()
set(CMAKE_FIND_ROOT_PATH ${TESSERA_SYSROOT}/libraries)

# -B: the older startup files too. Symbols of static libraries stay inside the file that holds them. In glibc 2.28
# threads and dlopen are libraries of their own.
set(libraries ${TESSERA_SYSROOT}/usr/lib/${CMAKE_LIBRARY_ARCHITECTURE})
set(link "--sysroot=${TESSERA_SYSROOT} -B${libraries} -L${libraries}")
string(APPEND link " -L${TESSERA_SYSROOT}/lib/${CMAKE_LIBRARY_ARCHITECTURE} -Wl,--exclude-libs,ALL")
set(CMAKE_EXE_LINKER_FLAGS_INIT ${link})
set(CMAKE_SHARED_LINKER_FLAGS_INIT ${link})
set(CMAKE_MODULE_LINKER_FLAGS_INIT ${link})
set(CMAKE_C_STANDARD_LIBRARIES "-lpthread -ldl -lrt -lm")
set(CMAKE_CXX_STANDARD_LIBRARIES "-lpthread -ldl -lrt -lm")

# The CUDA toolkit is no part of the sysroot.
find_program(TESSERA_NVCC nvcc PATHS /usr/local/cuda/bin)
if(TESSERA_NVCC)
    get_filename_component(toolkit ${TESSERA_NVCC} DIRECTORY)
    get_filename_component(toolkit ${toolkit} DIRECTORY)
    get_filename_component(real_toolkit ${toolkit} REALPATH)
    list(APPEND CMAKE_FIND_ROOT_PATH ${toolkit} ${real_toolkit})
endif()
set(TESSERA_CUDA_LIBRARIES "" CACHE PATH "Folder of libcudart_static.a for the processor, if not the toolkit's")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_CUDA_LIBRARIES)
if(TESSERA_CUDA_LIBRARIES)
    # The toolkit's headers serve every processor, but nvcc looks for a folder of them that is named after the processor.
    set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
    set(CMAKE_CUDA_FLAGS_INIT "-target-dir=x86_64-linux -L${TESSERA_CUDA_LIBRARIES}")
    set(CUDA_CUDART ${TESSERA_CUDA_LIBRARIES}/libcudart_static.a CACHE FILEPATH "" FORCE)
    set(CUDA_cudart_static_LIBRARY ${TESSERA_CUDA_LIBRARIES}/libcudart_static.a CACHE FILEPATH "" FORCE)
endif()
