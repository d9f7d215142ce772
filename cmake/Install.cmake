# Installation: library, headers, license and the CMake package "tessera" (find_package(tessera), tessera::tessera).
option(TESSERA_INSTALL "Generate the install rules" ${PROJECT_IS_TOP_LEVEL})

# The version of tessera.h is what C and C++ callers see; it stands in two places, so it is compared here.
file(STRINGS include/tessera/tessera.h TESSERA_HEADER_VERSION REGEX "#define TESSERA_VERSION ")
if(NOT TESSERA_HEADER_VERSION MATCHES "\"${PROJECT_VERSION}\"")
    message(FATAL_ERROR "project(tessera VERSION ${PROJECT_VERSION}), but tessera.h has: ${TESSERA_HEADER_VERSION}")
endif()

# Until 1.0 a new minor version may change the ABI. Without an export macro the objects of a static and of a shared
# library are the same.
set_target_properties(tessera PROPERTIES DEFINE_SYMBOL "")
if(NOT TESSERA_PYTHON)  # a wheel holds one library, and no links to it
    set_target_properties(tessera PROPERTIES VERSION ${PROJECT_VERSION}
                                             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()

if(TESSERA_INSTALL)
    include(CMakePackageConfigHelpers)
    set(TESSERA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
    get_target_property(TESSERA_LIBRARY_TYPE tessera TYPE)
    configure_package_config_file(cmake/tesseraConfig.cmake.in ${PROJECT_BINARY_DIR}/tesseraConfig.cmake
                                  INSTALL_DESTINATION ${TESSERA_PACKAGE_DIR})
    write_basic_package_version_file(${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)

    # For builds without CMake. A static library leaves it to the program to link what it is made of: with
    # `pkg-config --static` too, since there is no other way to use it.
    set(TESSERA_PC_STATIC "")
    if(TESSERA_LIBRARY_TYPE STREQUAL "STATIC_LIBRARY")
        set(TESSERA_PC_STATIC " -lfmt -ltbb -lhwy -lstdc++ -lm -lpthread -ldl")
        if(TESSERA_CUDA)
            string(APPEND TESSERA_PC_STATIC " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt")
        endif()
    endif()
    file(RELATIVE_PATH TESSERA_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
    string(REGEX REPLACE "/$" "" TESSERA_PREFIX_FROM_PC "${TESSERA_PREFIX_FROM_PC}")
    configure_file(cmake/tessera.pc.in ${PROJECT_BINARY_DIR}/tessera.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)

    install(TARGETS tessera EXPORT tesseraTargets COMPONENT library
            LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
    install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/tessera COMPONENT library)
    install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${TESSERA_PACKAGE_DIR} COMPONENT library)
    install(FILES ${PROJECT_BINARY_DIR}/tesseraConfig.cmake ${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake
            DESTINATION ${TESSERA_PACKAGE_DIR} COMPONENT library)
    if(TARGET tessera_cli)
        file(RELATIVE_PATH TESSERA_LIB_FROM_BIN /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
        set_target_properties(tessera_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${TESSERA_LIB_FROM_BIN}")
        install(TARGETS tessera_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT command)
        # The command looks for them at ../share/tessera/suites from where it lies.
        install(DIRECTORY bench/suites DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera COMPONENT command)
        if(NOT CMAKE_CROSSCOMPILING)
            install(FILES ${TESSERA_COMPLETIONS}/tessera.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT command
                    OPTIONAL)
            install(FILES ${TESSERA_COMPLETIONS}/bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
                    RENAME tessera COMPONENT command OPTIONAL)
            install(FILES ${TESSERA_COMPLETIONS}/zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions
                    RENAME _tessera COMPONENT command OPTIONAL)
            install(FILES ${TESSERA_COMPLETIONS}/fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d
                    RENAME tessera.fish COMPONENT command OPTIONAL)
        endif()
        # So for the Records that roofline --accuracy reads.
        install(DIRECTORY bench/results DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera COMPONENT command)
    endif()
endif()
