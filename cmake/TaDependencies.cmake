# Libraries found on the system. Only xxHash and threads are needed; what else is missing leaves out the parts that need it,
# with a message that names the Debian package. scripts/install-deps installs all of them.
include(GNUInstallDirs)

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# Header only: sources define XXH_INLINE_ALL before they include it, nothing links libxxhash.
find_path(TA_XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(TA_XXHASH_INCLUDE_DIR)
if(NOT TA_XXHASH_INCLUDE_DIR)
    message(FATAL_ERROR "TurboAttention needs xxhash.h: install libxxhash-dev, or set TA_XXHASH_INCLUDE_DIR to its folder")
endif()
add_library(TurboAttention_xxhash INTERFACE IMPORTED)
target_include_directories(TurboAttention_xxhash INTERFACE "${TA_XXHASH_INCLUDE_DIR}")

# Headers only: liburing.so.2 is opened at run time. (libnuma.so.1 too, and needs no header.)
find_path(TA_LIBURING_INCLUDE_DIR liburing.h)
mark_as_advanced(TA_LIBURING_INCLUDE_DIR)
if(NOT TA_LIBURING_INCLUDE_DIR)
    message(STATUS "TurboAttention: liburing.h not found, so the disk tier uses pread and pwrite: install liburing-dev")
endif()

# ta_find_optional(<CMake package> <target it must bring> <Debian package> <what goes missing without it>)
macro(ta_find_optional package target debian use)
    find_package(${package} QUIET)
    if(NOT TARGET ${target})
        message(STATUS "TurboAttention: ${package} not found, so no ${use}: install ${debian}")
    endif()
endmacro()

if(TA_BUILD_TESTS)
    ta_find_optional(GTest GTest::gtest_main libgtest-dev "GoogleTest tests")
endif()
if(TA_BUILD_BENCH)
    ta_find_optional(benchmark benchmark::benchmark libbenchmark-dev "benchmarks")
endif()
if(TA_BUILD_TESTS OR TA_BUILD_BENCH OR TA_BUILD_EXAMPLES OR TA_BUILD_TOOLS)
    ta_find_optional(nlohmann_json nlohmann_json::nlohmann_json nlohmann-json3-dev "programs and tests that read JSON")
endif()
if(TA_BUILD_BENCH OR TA_BUILD_EXAMPLES OR TA_BUILD_TOOLS)
    ta_find_optional(CLI11 CLI11::CLI11 libcli11-dev "programs with command-line options")
endif()
if(TA_BUILD_BENCH OR TA_BUILD_EXAMPLES)
    # OpenBLAS's CMake package defines no target, so ask pkg-config.
    find_package(PkgConfig QUIET)
    if(PkgConfig_FOUND)
        pkg_check_modules(openblas QUIET IMPORTED_TARGET openblas)
    endif()
    if(NOT TARGET PkgConfig::openblas)
        message(STATUS "TurboAttention: OpenBLAS not found, so no programs that multiply dense matrices: "
            "install libopenblas-dev and pkg-config")
    endif()
endif()
