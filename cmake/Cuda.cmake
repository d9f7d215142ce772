# TESSERA_CUDA: are the CUDA kernels built? By default when there is a CUDA compiler that knows them; no GPU is needed to
# build, and a library with CUDA kernels runs on machines without one.
set(TESSERA_LEAST_CUDA 12.4)

# Sets `result` to the reason why CUDA kernels can't be built, or to nothing.
function(tessera_cuda_problem result)
    include(CheckLanguage)
    find_package(CUDAToolkit QUIET)  # also looks where nvcc is not on the PATH
    if(CUDAToolkit_NVCC_EXECUTABLE AND NOT DEFINED ENV{CUDACXX})
        set(ENV{CUDACXX} ${CUDAToolkit_NVCC_EXECUTABLE})
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
        unset(CMAKE_CUDA_COMPILER CACHE)  # check_language keeps what it did not find, too
        check_language(CUDA)
    endif()
    set(problem "")
    if(NOT CMAKE_CUDA_COMPILER)
        set(problem "no CUDA compiler was found")
    elseif(NOT CUDAToolkit_FOUND)
        set(problem "there is ${CMAKE_CUDA_COMPILER}, but no CUDA toolkit was found")
    elseif(CUDAToolkit_VERSION VERSION_LESS TESSERA_LEAST_CUDA)
        set(problem "the CUDA toolkit is ${CUDAToolkit_VERSION}, ${TESSERA_LEAST_CUDA} or later is needed")
    endif()
    set(${result} "${problem}" PARENT_SCOPE)
endfunction()

if(NOT DEFINED TESSERA_CUDA OR TESSERA_CUDA)
    tessera_cuda_problem(TESSERA_CUDA_PROBLEM)
    if(TESSERA_CUDA_PROBLEM AND TESSERA_CUDA)
        message(FATAL_ERROR "TESSERA_CUDA is ON, but ${TESSERA_CUDA_PROBLEM}")
    elseif(TESSERA_CUDA_PROBLEM)
        message(STATUS "CUDA kernels: not built, ${TESSERA_CUDA_PROBLEM}")
    endif()
endif()
if(TESSERA_CUDA_PROBLEM)
    set(TESSERA_CUDA_DEFAULT OFF)
else()
    set(TESSERA_CUDA_DEFAULT ON)
endif()
option(TESSERA_CUDA "Build the CUDA kernels" ${TESSERA_CUDA_DEFAULT})
set(TESSERA_CUDA_ARCHITECTURES "80-real;90-real;90-virtual" CACHE STRING
    "What the kernels of standard, fa1 and fa2 are compiled for; fa3's are for sm_90a alone")
option(TESSERA_CUDA_LINE_INFO "Keep source lines in CUDA kernels, for profilers: a library four times the size" OFF)

if(TESSERA_CUDA)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES OFF)  # every target of this project names its own
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit ${TESSERA_LEAST_CUDA} REQUIRED)
    message(STATUS "CUDA kernels: built with ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}")
endif()

# tessera_cuda_host_sources(NAME FILES...): files of host code that are compiled with CUDA's headers. The target's other
# files are compiled as without CUDA, so that ccache has one object for both.
function(tessera_cuda_host_sources name)
    foreach(folder IN LISTS CUDAToolkit_INCLUDE_DIRS)
        set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -isystem ${folder})
    endforeach()
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS TESSERA_HAS_CUDA)
    target_link_libraries(${name} PRIVATE $<LINK_ONLY:CUDA::cudart_static>)
endfunction()

# tessera_cuda_target(NAME ARCHITECTURES...): what every target with .cu files is compiled with. Architectures are set
# for a whole target.
function(tessera_cuda_target name)
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${ARGN}" CUDA_RUNTIME_LIBRARY None
                                             POSITION_INDEPENDENT_CODE ON)
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    # CMake 3.25 does not know that nvcc has C++20: no CUDA_STANDARD, nor a CXX_STANDARD, which would stand in for it.
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --expt-relaxed-constexpr
                                           -Xcompiler=-Wall,-Wextra>)
    if(TESSERA_CUDA_LINE_INFO)
        target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
    endif()
    if(TESSERA_WERROR)
        target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
    endif()
endfunction()

# tessera_cuda_together(NAME VARIABLE FILES...): makes one file that includes all files, and sets the variable to it. Of the
# 13 seconds that nvcc takes for one file of kernels, and the 15 for one of tests, 9 and 12 go into the headers.
function(tessera_cuda_together name variable)
    list(TRANSFORM ARGN REPLACE "(.+)" "#include \"\\1\"" OUTPUT_VARIABLE includes)
    list(JOIN includes "\n" content)
    set(made ${CMAKE_CURRENT_BINARY_DIR}/${name}.cu)
    file(CONFIGURE OUTPUT ${made} CONTENT "${content}\n" @ONLY)
    set(${variable} ${made} PARENT_SCOPE)
endfunction()

# tessera_cuda_kernels(NAME FOLDER ARCHITECTURES...): the .cu files of a folder, compiled for these architectures, become
# part of the library.
function(tessera_cuda_kernels name folder)
    file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cu)
    if(NOT sources)
        return()
    endif()
    if(TESSERA_TOGETHER)
        set(files ${sources})
        set(sources "")
        foreach(dtype bf16 fp16 fp32)
            set(of_dtype ${files})
            list(FILTER of_dtype INCLUDE REGEX "_${dtype}\\.cu$")
            list(FILTER files EXCLUDE REGEX "_${dtype}\\.cu$")
            if(of_dtype)
                tessera_cuda_together(${name}_${dtype} together ${of_dtype})
                list(APPEND sources ${together})
            endif()
        endforeach()
        list(APPEND sources ${files})
    endif()
    add_library(${name} OBJECT ${sources})
    tessera_cuda_target(${name} ${ARGN})
    target_sources(tessera PRIVATE $<TARGET_OBJECTS:${name}>)
    # The test check_kernels (tests/tools) reads these objects, and what the compiler said of them.
    set_property(GLOBAL APPEND PROPERTY TESSERA_KERNEL_TARGETS ${name})
    if(TESSERA_BUILD_TESTS)
        find_package(Python3 REQUIRED COMPONENTS Interpreter)
        set(launcher ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/keep_compiler_log.py
                     ${CMAKE_CUDA_COMPILER_LAUNCHER})
        set_target_properties(${name} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
    endif()
endfunction()
