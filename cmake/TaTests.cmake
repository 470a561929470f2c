# Compiling the tests costs more than running them. So they are not optimised much, except those that compute a lot by themselves,
# and GoogleTest with what tests include anyway is compiled once.
function(ta_precompile_for target kind)
    if(NOT TA_PRECOMPILE)
        return()
    endif()
    set(headers ta_test_headers_${kind})
    if(NOT TARGET ${headers})
        add_library(${headers} OBJECT "${PROJECT_SOURCE_DIR}/tests/support/headers.cpp")
        ta_target_defaults(${headers} RELAXED)
        ta_optimise_test(${headers} ${kind})
        target_link_libraries(${headers} PRIVATE GTest::gtest_main Threads::Threads)
        target_precompile_headers(${headers} PRIVATE <gtest/gtest.h> <algorithm> <atomic> <chrono> <cstring> <filesystem>
            <functional> <map> <memory> <random> <set> <span> <string> <thread> <vector>
        )
    endif()
    target_precompile_headers(${target} REUSE_FROM ${headers})
endfunction()
function(ta_optimise_test target kind)
    if(kind STREQUAL "calls")
        target_compile_options(${target} PRIVATE "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>")
    endif()
endfunction()

# ta_add_test(NAME <name> SOURCES <file>... [LIBS <target>...] [LABELS <label>...] [TIMEOUT <seconds>] [LOCK <name>]
#     [ABI] [PLAIN] [WHOLE] [COMPUTES])
# A GoogleTest program and one CTest per test case in it, called <name>.<suite>.<case>. It sees the internal headers (include
# root: the repository) and links the static library.
#   ABI    links only libturboattention.so and sees only include/; the test is left out where that is not built
#   PLAIN  no GoogleTest: the program itself is the test, exit status 0 passes
#   COMPUTES  it does so much arithmetic itself that it is compiled with full optimisation
#   WHOLE  one CTest for the whole program, for those whose cases are too many or too short to start a process each
#   LOCK   tests of the same lock do not run beside each other
# Labels are selected by regular expression, ctest -L slow or -LE slow. The label slow keeps a test out of the sanitizer run
# of .ci/run. TIMEOUT defaults to 120. TA_TEST_DIR is the path of tests/, for test data.
function(ta_add_test)
    cmake_parse_arguments(PARSE_ARGV 0 arg "ABI;PLAIN;WHOLE;COMPUTES" "NAME;TIMEOUT;LOCK" "SOURCES;LIBS;LABELS")
    if(NOT arg_NAME OR NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
        message(FATAL_ERROR "ta_add_test: NAME and SOURCES are needed; not understood: '${arg_UNPARSED_ARGUMENTS}'")
    endif()
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 120)
    endif()
    if((arg_ABI AND NOT TARGET turboattention) OR (NOT arg_PLAIN AND NOT TARGET GTest::gtest_main))
        return()
    endif()

    set(target test_${arg_NAME})
    add_executable(${target} ${arg_SOURCES})
    ta_target_defaults(${target} RELAXED)
    set(kind calls)
    if(arg_COMPUTES)
        set(kind computes)
    endif()
    ta_optimise_test(${target} ${kind})
    target_compile_definitions(${target} PRIVATE "TA_TEST_DIR=\"${PROJECT_SOURCE_DIR}/tests\"")
    if(arg_ABI)
        target_link_libraries(${target} PRIVATE turboattention Threads::Threads ${arg_LIBS})
    else()
        target_link_libraries(${target} PRIVATE turboattention_internal ${arg_LIBS})
    endif()

    if(arg_PLAIN)
        add_test(NAME ${arg_NAME} COMMAND ${target})
    else()
        target_link_libraries(${target} PRIVATE GTest::gtest_main)
        ta_precompile_for(${target} ${kind})
        if(NOT arg_WHOLE)
            set(properties TIMEOUT ${arg_TIMEOUT})
            if(arg_LABELS)
                # One label "a b" for the labels a and b: how a list has to be escaped differs between versions of CMake.
                string(JOIN " " labels ${arg_LABELS})
                list(APPEND properties LABELS "${labels}")
            endif()
            if(arg_LOCK)
                list(APPEND properties RESOURCE_LOCK ${arg_LOCK})
            endif()
            gtest_discover_tests(${target} TEST_PREFIX "${arg_NAME}." NO_PRETTY_VALUES
                DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                PROPERTIES ${properties}
            )
            return()
        endif()
        add_test(NAME ${arg_NAME} COMMAND ${target} --gtest_brief=1)
    endif()
    set_tests_properties(${arg_NAME} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
endfunction()
