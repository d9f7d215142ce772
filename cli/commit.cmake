# SPDX-License-Identifier: Apache-2.0
# Writes the version and the commit that is being built into OUTPUT, and touches it only when they changed.
set(commit unknown)
find_package(Git QUIET)
set(ENV{GIT_OPTIONAL_LOCKS} 0)
if(GIT_FOUND)
    execute_process(COMMAND ${GIT_EXECUTABLE} describe --always --dirty --exclude=* --abbrev=12
                    WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE described RESULT_VARIABLE failed
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT failed)
        set(commit ${described})
    endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
// SPDX-License-Identifier: Apache-2.0
#pragma once
#define TESSERA_VERSION "@VERSION@"
#define TESSERA_COMMIT "@commit@"
#define TESSERA_COMPILER "@COMPILER@"
]] @ONLY)
