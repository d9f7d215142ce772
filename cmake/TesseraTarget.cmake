# tessera_target(NAME): what every target of this project is compiled with: C++20, warnings, sanitizers.
function(tessera_target name)
    set_target_properties(${name} PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF C_STANDARD 11
                                             POSITION_INDEPENDENT_CODE ON)
    target_compile_options(${name} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wno-missing-field-initializers)
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
