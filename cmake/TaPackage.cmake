# cpack -G DEB: libturboattention<ABI> (the shared library), libturboattention-dev (headers, static library, CMake, pkg-config,
# documents) and turboattention-tools (ta, its manual page and completions). They take what was built; cpack builds nothing.
# scripts/check-packages makes and tries them. Those of a CUDA build are libturboattention<ABI>-cu<major> and so on. They stand in for the
# others and are not installed beside them.
if(NOT TA_BUILD_SHARED)
    return() # the tools and the names of the packages need the shared library
endif()

set(CPACK_PACKAGE_NAME turboattention)
set(CPACK_PACKAGE_VENDOR TurboAttention)
set(TA_PACKAGE_CONTACT "The maintainers of TurboAttention <maintainers@turboattention.invalid>" CACHE STRING
    "Maintainer of the Debian packages; those that are passed on need a real address")
set(TA_PACKAGE_REVISION 1 CACHE STRING "Revision of the Debian packages of one version")
set(CPACK_PACKAGE_CONTACT "${TA_PACKAGE_CONTACT}")
set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_GENERATOR DEB)
set(CPACK_VERBATIM_VARIABLES ON)

set(CPACK_COMPONENTS_ALL runtime dev)
if(TARGET ta)
    list(APPEND CPACK_COMPONENTS_ALL tools)
endif()
if(TARGET turboattention_valkey)
    list(APPEND CPACK_COMPONENTS_ALL valkey)
endif()
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

# Programs run with every later library of the same SONAME. The headers and the tools need the library of their own version.
set(_ta_cuda)
if(TA_CUDA_FOUND)
    set(_ta_cuda "-cu${CUDAToolkit_VERSION_MAJOR}")
endif()
set(_ta_runtime "libturboattention${TA_ABI_VERSION}${_ta_cuda}")
set(_ta_package_version "${PROJECT_VERSION}-${TA_PACKAGE_REVISION}")
set(_ta_same_runtime "${_ta_runtime} (= ${_ta_package_version})")
set(_ta_valkey "libturboattention-valkey${TA_ABI_VERSION}${_ta_cuda}")
set(CPACK_DEBIAN_PACKAGE_RELEASE "${TA_PACKAGE_REVISION}")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${PROJECT_BINARY_DIR}")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")

set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME "${_ta_runtime}")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS "libnuma1, liburing2") # opened at run time
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "${PROJECT_DESCRIPTION}: the shared library")

set(CPACK_DEBIAN_DEV_PACKAGE_NAME "libturboattention-dev${_ta_cuda}")
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "${_ta_same_runtime}")
if(TARGET turboattention_valkey) # its header is there, its link, and its target for CMake
    string(APPEND CPACK_DEBIAN_DEV_PACKAGE_DEPENDS ", ${_ta_valkey} (= ${_ta_package_version})")
endif()
set(CPACK_DEBIAN_DEV_PACKAGE_SHLIBDEPS OFF)
set(CPACK_COMPONENT_DEV_DESCRIPTION "${PROJECT_DESCRIPTION}: headers for C and C++, static library, documents")

set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME "turboattention-tools${_ta_cuda}")
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION utils)
set(CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS "${_ta_same_runtime}")
set(CPACK_DEBIAN_TOOLS_PACKAGE_SUGGESTS "python3-matplotlib")
set(CPACK_COMPONENT_TOOLS_DESCRIPTION "${PROJECT_DESCRIPTION}: the command ta")

set(CPACK_DEBIAN_VALKEY_PACKAGE_NAME "${_ta_valkey}")
set(CPACK_DEBIAN_VALKEY_PACKAGE_SECTION libs)
set(CPACK_COMPONENT_VALKEY_DESCRIPTION "${PROJECT_DESCRIPTION}: published blocks in a Valkey or Redis server")

# Debian wants the licences of each package in a place of its own.
foreach(_ta_component IN ITEMS runtime dev tools valkey)
    string(TOUPPER "${_ta_component}" _ta_upper)
    install(FILES NOTICE RENAME copyright DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${_ta_upper}_PACKAGE_NAME}"
        COMPONENT ${_ta_component} EXCLUDE_FROM_ALL)
    if(_ta_cuda)
        string(REGEX REPLACE "${_ta_cuda}$" "" _ta_plain "${CPACK_DEBIAN_${_ta_upper}_PACKAGE_NAME}")
        set(CPACK_DEBIAN_${_ta_upper}_PACKAGE_PROVIDES "${_ta_plain} (= ${_ta_package_version})")
        set(CPACK_DEBIAN_${_ta_upper}_PACKAGE_CONFLICTS "${_ta_plain}")
        set(CPACK_DEBIAN_${_ta_upper}_PACKAGE_REPLACES "${_ta_plain}")
    endif()
endforeach()

include(CPack)
