# cmake --install: libraries, headers, their documents, the CMake package TurboAttention, turboattention.pc, a list of what is
# linked (SPDX), and the ta command if it was built. Components: runtime, dev, tools.
include(CMakePackageConfigHelpers)

set(_ta_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/TurboAttention")

# A list of targets for each library: programs that use the shared one alone need nothing of what the static one links.
function(_ta_install_library target)
    install(TARGETS ${target} EXPORT ${target}-targets
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime NAMELINK_COMPONENT dev
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT dev
    )
    install(EXPORT ${target}-targets NAMESPACE TurboAttention:: DESTINATION "${_ta_package_dir}" COMPONENT dev)
endfunction()
_ta_install_library(turboattention_static)
if(TA_BUILD_SHARED)
    _ta_install_library(turboattention)
endif()
install(FILES include/turboattention.h include/turboattention_experimental.h bindings/cpp/include/turboattention.hpp
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT dev)
install(FILES LICENSE NOTICE DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT runtime)
# The headers name documents, and these link to each other and to results of benchmarks.
install(DIRECTORY docs DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT dev)
install(DIRECTORY bench/results DESTINATION "${CMAKE_INSTALL_DOCDIR}/bench" COMPONENT dev FILES_MATCHING PATTERN "*.md")

configure_package_config_file(cmake/TurboAttentionConfig.cmake.in "${PROJECT_BINARY_DIR}/TurboAttentionConfig.cmake"
    INSTALL_DESTINATION "${_ta_package_dir}" PATH_VARS CMAKE_INSTALL_LIBDIR
)
# A program that was written for an earlier version of the same ABI compiles and runs: those from this one on.
set(_ta_first_of_abi 0.2)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/TurboAttentionConfigVersion.cmake" COMPATIBILITY AnyNewerVersion)
file(APPEND "${PROJECT_BINARY_DIR}/TurboAttentionConfigVersion.cmake" "
if(PACKAGE_FIND_VERSION VERSION_LESS \"${_ta_first_of_abi}\" AND NOT PACKAGE_FIND_VERSION STREQUAL \"\")
    set(PACKAGE_VERSION_COMPATIBLE FALSE)
endif()
")
install(FILES "${PROJECT_BINARY_DIR}/TurboAttentionConfig.cmake" "${PROJECT_BINARY_DIR}/TurboAttentionConfigVersion.cmake"
    DESTINATION "${_ta_package_dir}" COMPONENT dev
)

# The .pc files name their prefix relative to themselves, so an installed tree can be moved.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
    set(_ta_pc_prefix "${CMAKE_INSTALL_PREFIX}")
else()
    file(RELATIVE_PATH _ta_up "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
    string(REGEX REPLACE "/$" "" _ta_up "${_ta_up}")
    set(_ta_pc_prefix "\${pcfiledir}/${_ta_up}")
endif()
foreach(_ta_dir IN ITEMS LIBDIR INCLUDEDIR)
    if(IS_ABSOLUTE "${CMAKE_INSTALL_${_ta_dir}}")
        set(_ta_pc_${_ta_dir} "${CMAKE_INSTALL_${_ta_dir}}")
    else()
        set(_ta_pc_${_ta_dir} "\${prefix}/${CMAKE_INSTALL_${_ta_dir}}")
    endif()
endforeach()
set(_ta_pc_libs "-L\${libdir} -lturboattention")
set(_ta_pc_private "-lstdc++ -lpthread -ldl -lm")
if(TA_CUDA_FOUND)
    get_target_property(_ta_cudart CUDA::cudart_static IMPORTED_LOCATION)
    cmake_path(GET _ta_cudart PARENT_PATH _ta_cuda_libdir)
    set(_ta_pc_private "-L${_ta_cuda_libdir} -lcudart_static -lrt ${_ta_pc_private}")
endif()
if(NOT TA_BUILD_SHARED)
    string(APPEND _ta_pc_libs " ${_ta_pc_private}")
endif()
configure_file(cmake/turboattention.pc.in "${PROJECT_BINARY_DIR}/turboattention.pc" @ONLY)
set(_ta_pc_files "${PROJECT_BINARY_DIR}/turboattention.pc")
if(TARGET turboattention_valkey)
    configure_file(cmake/turboattention_valkey.pc.in "${PROJECT_BINARY_DIR}/turboattention_valkey.pc" @ONLY)
    list(APPEND _ta_pc_files "${PROJECT_BINARY_DIR}/turboattention_valkey.pc")
endif()
install(FILES ${_ta_pc_files} DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT dev)

# OPTIONAL: a tree in which only the libraries were built is installed without.
if(TARGET ta)
    install(TARGETS ta RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT tools OPTIONAL)
    set(_ta_generated "${PROJECT_BINARY_DIR}/tools/generated")
    install(FILES "${_ta_generated}/ta.1" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1" COMPONENT tools OPTIONAL)
    install(FILES "${_ta_generated}/ta.bash" RENAME ta
        DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions" COMPONENT tools OPTIONAL)
    install(FILES "${_ta_generated}/ta.zsh" RENAME _ta
        DESTINATION "${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions" COMPONENT tools OPTIONAL)
    install(FILES "${_ta_generated}/ta.fish"
        DESTINATION "${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d" COMPONENT tools OPTIONAL)
endif()

# What TaSbom.cmake.in says of this build.
set(TA_XXHASH_VERSION NOASSERTION)
file(STRINGS "${TA_XXHASH_INCLUDE_DIR}/xxhash.h" _ta_lines REGEX "define XXH_VERSION_(MAJOR|MINOR|RELEASE) +[0-9]+")
if(_ta_lines)
    string(REGEX REPLACE "[^0-9;]" "" TA_XXHASH_VERSION "${_ta_lines}")
    list(JOIN TA_XXHASH_VERSION "." TA_XXHASH_VERSION)
endif()
set(TA_SBOM_LIBURING OFF)
if(TA_LIBURING_INCLUDE_DIR)
    set(TA_SBOM_LIBURING ON)
endif()
set(TA_SBOM_TOOLS OFF)
set(TA_SBOM_FILES "\"${CMAKE_INSTALL_LIBDIR}/libturboattention.a\"")
if(TA_BUILD_SHARED)
    string(APPEND TA_SBOM_FILES " \"${CMAKE_INSTALL_LIBDIR}/libturboattention.so.${PROJECT_VERSION}\"")
endif()
set(TA_SBOM_VALKEY OFF)
if(TARGET turboattention_valkey)
    set(TA_SBOM_VALKEY ON)
    string(APPEND TA_SBOM_FILES " \"${CMAKE_INSTALL_LIBDIR}/libturboattention_valkey.so.${PROJECT_VERSION}\"")
endif()
if(TARGET ta)
    set(TA_SBOM_TOOLS ON)
    string(APPEND TA_SBOM_FILES " \"${CMAKE_INSTALL_BINDIR}/ta\"")
endif()
set(TA_SBOM_BUILD "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, ${CMAKE_SYSTEM_PROCESSOR}; CUDA: ${TA_CUDA_FOUND}")
configure_file(cmake/TaSbom.cmake.in "${PROJECT_BINARY_DIR}/TaSbom.cmake" @ONLY)
install(SCRIPT "${PROJECT_BINARY_DIR}/TaSbom.cmake" COMPONENT runtime)

include(TaPackage)
