# cmake -DSOURCE=<checkout> -DBUILD=<built tree> -DWORK=<scratch folder> -DGENERATOR= -DC_COMPILER= -DCXX_COMPILER=
#       -DCONFIG= -DTOGETHER= -P consumer_test.cmake
# Builds and runs project/ against the installed library, against the source as a subdirectory and a shared library, and
# against that installed.
set(EXPECTED_CPP "C++ 0.0000 0.5000 1.0000 1.5000\nfa3 wins\nerror 1 head_dim\n")
set(EXPECTED_C "C 0.0000 0.5000 1.0000 1.5000\ntwice the cores win\nerror 1 head_dim\n")

function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT status EQUAL 0)
        list(JOIN ARGN " " command)
        message(FATAL_ERROR "${command}\nfailed (${status}):\n${output}")
    endif()
endfunction()

function(expect_output program expected)
    execute_process(COMMAND ${program} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE errors)
    if(NOT status EQUAL 0 OR NOT output STREQUAL expected)
        message(FATAL_ERROR "${program} (${status}): expected\n${expected}got\n${output}${errors}")
    endif()
endfunction()

# build_and_run(NAME FOLDER OPTIONS...): configures project/ into FOLDER, builds, runs and compares.
function(build_and_run name folder)
    run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${CMAKE_CURRENT_LIST_DIR}/project -B ${WORK}/${folder}
        -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_BUILD_TYPE=${CONFIG} ${ARGN})
    run(${CMAKE_COMMAND} --build ${WORK}/${folder})
    expect_output(${WORK}/${folder}/from_cpp "${EXPECTED_CPP}")
    expect_output(${WORK}/${folder}/from_c "${EXPECTED_C}")
    message(STATUS "${name}: ok")
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix --component library)
if(NOT EXISTS ${WORK}/prefix/include/tessera/tessera.h OR NOT EXISTS ${WORK}/prefix/share/licenses/tessera/LICENSE)
    message(FATAL_ERROR "the headers or the license were not installed")
endif()
build_and_run("find_package" installed -DCMAKE_PREFIX_PATH=${WORK}/prefix)

# with_pkg_config(PREFIX): from_c.c by hand, with what tessera.pc says.
function(with_pkg_config prefix)
    file(GLOB_RECURSE pc ${prefix}/tessera.pc)
    get_filename_component(folder "${pc}" DIRECTORY)
    get_filename_component(libraries "${folder}" DIRECTORY)
    execute_process(COMMAND ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${folder} pkg-config --cflags --libs tessera
                    RESULT_VARIABLE status OUTPUT_VARIABLE flags ERROR_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "pkg-config tessera: ${flags}")
    endif()
    separate_arguments(flags)
    run(${C_COMPILER} -std=c11 ${CMAKE_CURRENT_LIST_DIR}/project/from_c.c -o ${prefix}/from_pc ${flags}
        -Wl,-rpath,${libraries})
    expect_output(${prefix}/from_pc "${EXPECTED_C}")
    message(STATUS "pkg-config in ${prefix}: ok")
endfunction()
find_program(PKG_CONFIG pkg-config)
if(PKG_CONFIG)
    with_pkg_config(${WORK}/prefix)
endif()
# This build is without CUDA kernels, which are in the installed library and would take most of the time, and without
# much optimisation, since it tests that the project builds. The library is shared, because the installed one is static.
build_and_run("add_subdirectory, shared" subdirectory -DTESSERA_CHECKOUT=${SOURCE} -DTESSERA_CUDA=OFF
              -DTESSERA_TOGETHER=${TOGETHER} "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" -DBUILD_SHARED_LIBS=ON
              -DTESSERA_INSTALL=ON)

# A project that names no build type gets kernels that are optimised all the same.
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${CMAKE_CURRENT_LIST_DIR}/project -B ${WORK}/no_build_type
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DTESSERA_CHECKOUT=${SOURCE} -DTESSERA_CUDA=OFF
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
file(STRINGS ${WORK}/no_build_type/compile_commands.json commands REGEX "command.*cpu/simd/matmul.cc")
if(NOT commands MATCHES " -O2 ")
    message(FATAL_ERROR "without a build type, expected matmul.cc to be compiled with -O2, got: ${commands}")
endif()
message(STATUS "add_subdirectory without a build type: ok")

# An installed shared library needs none of its own dependencies at hand.
run(${CMAKE_COMMAND} --install ${WORK}/subdirectory --prefix ${WORK}/shared_prefix --component library)
build_and_run("find_package, shared" installed_shared -DCMAKE_PREFIX_PATH=${WORK}/shared_prefix
              -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON -DCMAKE_DISABLE_FIND_PACKAGE_TBB=ON)
if(PKG_CONFIG)
    with_pkg_config(${WORK}/shared_prefix)
endif()

# The library exports the C ABI and the C++ names that include/tessera declares, but no internal namespace, nothing of
# fmt or of TBB.
file(GLOB library ${WORK}/shared_prefix/lib*/libtessera.so ${WORK}/shared_prefix/lib*/*/libtessera.so)
execute_process(COMMAND nm -D -C --defined-only ${library} OUTPUT_VARIABLE symbols RESULT_VARIABLE status)
string(REGEX REPLACE "\n$" "" symbols "${symbols}")
string(REPLACE ";" "," symbols "${symbols}")
string(REPLACE "\n" ";" symbols "${symbols}")
list(LENGTH symbols count)
set(strange ${symbols})
list(FILTER strange EXCLUDE REGEX " [A-Za-z] (tessera_[a-z_]+$|tessera::[A-Za-z_]+(\\[|\\(|::[~A-Z_a-z]+|$)|tessera::operator|(typeinfo|typeinfo name|vtable) for tessera::[A-Z])")
set(rooms ${symbols})
list(FILTER rooms INCLUDE REGEX " [A-Za-z] tessera::[a-z]+::")  # namespaces of src/ are in small letters
list(APPEND strange ${rooms})
if(NOT status EQUAL 0 OR strange OR count LESS 40 OR count GREATER 150)
    list(JOIN strange "\n" strange)
    message(FATAL_ERROR "${library} exports ${count} symbols, expected 40 to 150, and not these:\n${strange}")
endif()
message(STATUS "${count} exported symbols: ok")
