# SPDX-License-Identifier: Apache-2.0
# Writes the completion of each shell and the manual page into OUTPUT, by the command TESSERA. A command that cannot run
# where it is built leaves them out of the installation.
function(write_answer file)
    execute_process(COMMAND ${TESSERA} ${ARGN} OUTPUT_FILE ${OUTPUT}/${file} RESULT_VARIABLE failed)
    if(failed)
        file(REMOVE ${OUTPUT}/${file})
        message(WARNING "${TESSERA} ${ARGN} ended with ${failed}: ${file} will not be installed")
    endif()
endfunction()
foreach(shell bash zsh fish)
    write_answer(${shell} completion ${shell})
endforeach()
write_answer(tessera.1 man)
