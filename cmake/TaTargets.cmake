# How code is compiled and how the libraries are put together.

get_property(_ta_multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT _ta_multi_config)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release or RelWithDebInfo" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Headers that many files include anyway are compiled once. Not with ccache, which would then cache nothing: so those who build
# with it notice what a file forgets to include.
set(TA_PRECOMPILE ON)
if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    set(TA_PRECOMPILE OFF)
endif()

# What an optimised build is hardened with: overflows of buffers end the program instead of going on with what they wrote, and
# jumps that are not meant are caught on processors with CET. bench/results/cpu-attention.md has what it costs. Sanitizers do better.
set(TA_HARDENING_FLAGS)
if(TA_HARDENING AND NOT TA_SANITIZE)
    set(TA_HARDENING_FLAGS -fstack-protector-strong)
    check_cxx_compiler_flag(-fcf-protection=full TA_COMPILER_HAS_CET) # x86 only
    if(TA_COMPILER_HAS_CET)
        list(APPEND TA_HARDENING_FLAGS -fcf-protection=full)
    endif()
    if(NOT "${CMAKE_C_FLAGS} ${CMAKE_CXX_FLAGS}" MATCHES "_FORTIFY_SOURCE")
        list(APPEND TA_HARDENING_FLAGS -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3) # some distributions define it, with less
    endif()
endif()

# Clang has no macros for its sanitizers before version 21: those of GCC. It links a C program without the C++ part of its runtime.
set(TA_SANITIZER_FLAGS)
set(TA_SANITIZER_LINK_OPTIONS -fsanitize=${TA_SANITIZE})
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    foreach(sanitizer IN ITEMS address thread)
        string(TOUPPER ${sanitizer} name)
        if(TA_SANITIZE MATCHES ${sanitizer})
            list(APPEND TA_SANITIZER_FLAGS -D__SANITIZE_${name}__=1)
        endif()
    endforeach()
    if(TA_SANITIZE MATCHES "undefined")
        list(APPEND TA_SANITIZER_FLAGS -fno-sanitize=vptr)
        list(APPEND TA_SANITIZER_LINK_OPTIONS -fsanitize-link-c++-runtime -lstdc++)
    endif()
endif()

# ta_target_defaults(<target> [RELAXED])
# Language, numerics, warnings and sanitizers of everything compiled here. RELAXED leaves out -Wconversion.
function(ta_target_defaults target)
    cmake_parse_arguments(PARSE_ARGV 1 arg "RELAXED" "" "")
    set_target_properties(${target} PROPERTIES
        C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF
        CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
    )
    set(host "$<COMPILE_LANGUAGE:C,CXX>")
    set(options
        # Results are bit-exact across instruction sets: no contraction to FMA unless written, never -ffast-math.
        -ffp-contract=off -fno-math-errno -fno-trapping-math
        "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=" # __FILE__ does not name the machine
        -Wall -Wextra -Wpedantic -Wshadow -Wvla
        $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
    )
    if(NOT arg_RELAXED)
        list(APPEND options -Wconversion -Wno-sign-conversion)
    endif()
    if(TA_WARNINGS_AS_ERRORS)
        list(APPEND options -Werror)
        if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
            # These come from the optimiser and change with every GCC release and -f flag: shown, not fatal.
            list(APPEND options -Wno-error=array-bounds -Wno-error=maybe-uninitialized -Wno-error=restrict
                -Wno-error=stringop-overflow -Wno-error=stringop-overread)
        endif()
    endif()
    list(APPEND options "$<$<NOT:$<CONFIG:Debug>>:${TA_HARDENING_FLAGS}>") # _FORTIFY_SOURCE needs optimised code
    if(TA_SANITIZE)
        list(APPEND options -fsanitize=${TA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer ${TA_SANITIZER_FLAGS})
        target_link_options(${target} PRIVATE ${TA_SANITIZER_LINK_OPTIONS})
    endif()
    target_compile_options(${target} PRIVATE "$<${host}:${options}>")
endfunction()

# ta_add_library(<target> STATIC|SHARED)
# libturboattention.a or .so from turboattention_objects, with the alias TurboAttention::<target>.
function(ta_add_library target kind)
    get_property(cuda_objects GLOBAL PROPERTY TA_CUDA_OBJECTS)
    add_library(${target} ${kind} $<TARGET_OBJECTS:turboattention_objects> ${cuda_objects})
    add_library(TurboAttention::${target} ALIAS ${target})
    set_target_properties(${target} PROPERTIES OUTPUT_NAME turboattention LINKER_LANGUAGE CXX)
    target_include_directories(${target} INTERFACE
        "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
        "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/bindings/cpp/include>"
        "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>"
    )
    target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
    if(TA_CUDA_FOUND)
        target_link_libraries(${target} PRIVATE CUDA::cudart_static)
    endif()
    if(kind STREQUAL "STATIC")
        # CMake links a C program that uses this library with the C compiler unless C++ is enabled there.
        target_link_libraries(${target} INTERFACE "$<$<LINK_LANGUAGE:C>:stdc++;m>")
        return()
    endif()

    set(map "${PROJECT_SOURCE_DIR}/cmake/turboattention.map")
    set_target_properties(${target} PROPERTIES VERSION ${TA_VERSION} SOVERSION ${TA_ABI_VERSION} LINK_DEPENDS "${map}")
    target_link_options(${target} PRIVATE "LINKER:--version-script=${map}" LINKER:-z,relro LINKER:-z,now LINKER:-z,noexecstack)
    if(TA_HARDENING_FLAGS AND TA_COMPILER_HAS_CET)
        # The C library's start files often have no note. They do nothing that a shadow stack does not bear; that they mark what
        # is jumped to (IBT) is for themselves to say.
        target_link_options(${target} PRIVATE $<$<NOT:$<CONFIG:Debug>>:LINKER:-z,shstk>)
    endif()
    if(TA_SANITIZE)
        target_link_options(${target} PRIVATE ${TA_SANITIZER_LINK_OPTIONS})
    endif()
    if(NOT (TA_SANITIZE AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")) # there the program, not the library, brings the runtime
        target_link_options(${target} PRIVATE LINKER:--no-undefined)
    endif()
endfunction()

# ta_kernel_sources(portable|avx2|avxvnni|avx512|amx <file>...)
# Adds kernel sources to the library with the flags of their instruction set, and defines TA_HAVE_<SET> (the library and
# its tests see it) if there are any and this compiler can build them for this processor family.
set(TA_FLAGS_portable)
set(TA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(TA_FLAGS_avxvnni ${TA_FLAGS_avx2} -mavxvnni)
set(TA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mfma)
set(TA_FLAGS_amx ${TA_FLAGS_avx512} -mamx-tile -mamx-int8)
function(ta_kernel_sources isa)
    if(NOT ARGN)
        return()
    endif()
    if(NOT isa STREQUAL "portable")
        string(TOUPPER "${isa}" ISA)
        string(JOIN " " flags ${TA_FLAGS_${isa}})
        check_cxx_compiler_flag("${flags}" TA_COMPILER_HAS_${ISA})
        if(NOT TA_COMPILER_HAS_${ISA})
            message(STATUS "TurboAttention: no ${isa} kernels: ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} "
                "for ${CMAKE_SYSTEM_PROCESSOR} does not take ${flags}")
            return()
        endif()
        target_compile_definitions(turboattention_objects PUBLIC TA_HAVE_${ISA}=1)
    endif()
    # A call of few tokens enters so many of these functions that looking at the stack would cost 2%.
    set(options -Wno-conversion -fno-stack-protector)
    if(isa MATCHES "^(avx512|amx)$" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
        list(APPEND options -Wno-uninitialized -Wno-maybe-uninitialized) # in its own intrinsics, GCC bug 105593
    endif()
    list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/" OUTPUT_VARIABLE files)
    target_sources(turboattention_objects PRIVATE ${files})
    set_property(SOURCE ${files} TARGET_DIRECTORY turboattention_objects
        APPEND PROPERTY COMPILE_OPTIONS ${options} ${TA_FLAGS_${isa}}
    )
    set_property(SOURCE ${files} TARGET_DIRECTORY turboattention_objects PROPERTY SKIP_PRECOMPILE_HEADERS ON)
endfunction()
