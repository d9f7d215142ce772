# tessera_target(NAME): what every target of this project is compiled with: C++20, warnings, sanitizers.
function(tessera_target name)
    set_target_properties(${name} PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF C_STANDARD 11
                                             POSITION_INDEPENDENT_CODE ON)
    target_compile_options(${name} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wno-missing-field-initializers)
    # Built as a part of a project without a build type, the kernels would run at a thirtieth of their speed.
    if(NOT CMAKE_CXX_FLAGS MATCHES "-O")
        target_compile_options(${name} PRIVATE $<$<AND:$<STREQUAL:$<CONFIG>,>,$<COMPILE_LANGUAGE:C,CXX>>:-O2>)
    endif()
    if(TESSERA_WERROR)
        target_compile_options(${name} PRIVATE -Werror)
    endif()
    # Results are defined by IEEE arithmetic: no contraction or reordering beyond what the source says.
    target_compile_options(${name} PRIVATE -ffp-contract=off)
    if(TESSERA_SANITIZE)
        target_compile_options(${name} PRIVATE -fsanitize=${TESSERA_SANITIZE} -fno-sanitize-recover=all
                                               -fno-omit-frame-pointer -g)
        target_link_options(${name} PRIVATE -fsanitize=${TESSERA_SANITIZE})
    endif()
endfunction()

# tessera_judge_sources(FILES...): the reference and the judge, two thirds of what the kernels' tests take under sanitizers,
# and the same code in each of them. With TESSERA_SANITIZE_JUDGE=OFF they are optimised there and not instrumented.
function(tessera_judge_sources)
    if(TESSERA_SANITIZE AND NOT TESSERA_SANITIZE_JUDGE)
        set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "-O2;-fno-sanitize=all" SKIP_PRECOMPILE_HEADERS ON)
    endif()
endfunction()

# tessera_quick_to_compile(NAME SANITIZED): for programs in which no time is spent, the command and the tests: what they
# measure and judge with is the library's, and that is optimised. At -O3 they would take half as long again to compile.
# SANITIZED is the level under sanitizers. Without TESSERA_SANITIZE_JUDGE the program itself is not instrumented, but the
# library is.
function(tessera_quick_to_compile name sanitized)
    if(TESSERA_SANITIZE)
        target_compile_options(${name} PRIVATE ${sanitized})
        if(NOT TESSERA_SANITIZE_JUDGE)
            target_compile_options(${name} PRIVATE -fno-sanitize=all)
        endif()
    else()
        target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
    endif()
endfunction()

# Compile options of the files that Highway compiles for several instruction sets. On x86-64 the least is SSE4.2 (2008;
# kernels refuse an older processor); of the others AVX2 and AVX-512 are built. On 64-bit Arm it is NEON alone: vectors
# of SVE have no size at compile time, and the register blocks are arrays of vectors.
set(TESSERA_SIMD_OPTIONS "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(left_out "HWY_SSSE3|HWY_AVX3_DL")
    # Under the sanitizers clang takes 75 seconds more for the AVX-512 of one file, which is the AVX2's text.
    if(TESSERA_SANITIZE AND NOT TESSERA_SANITIZE_JUDGE)
        string(APPEND left_out "|HWY_AVX3")
    endif()
    set(TESSERA_SIMD_OPTIONS "-march=x86-64-v2;-DHWY_DISABLE_PCLMUL_AES;-DHWY_DISABLED_TARGETS=(${left_out})")
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
    set(TESSERA_SIMD_OPTIONS "-DHWY_DISABLED_TARGETS=(HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
endif()
