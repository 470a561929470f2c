# Looks for a CUDA toolkit as TA_ENABLE_CUDA asks, and says what was found. Sets TA_CUDA_FOUND and TA_CUDA_STATUS (a sentence).
set(TA_CUDA_FOUND OFF)
if(NOT TA_ENABLE_CUDA MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "TA_ENABLE_CUDA is '${TA_ENABLE_CUDA}'; it takes AUTO, ON or OFF")
endif()

if(TA_ENABLE_CUDA STREQUAL "OFF")
    set(TA_CUDA_STATUS "off, as TA_ENABLE_CUDA=OFF asks")
else()
    find_package(CUDAToolkit QUIET)
    if(NOT CUDAToolkit_FOUND)
        set(TA_CUDA_STATUS "no toolkit found (put nvcc on PATH or set CUDAToolkit_ROOT)")
    elseif(NOT EXISTS "${CUDAToolkit_NVCC_EXECUTABLE}")
        set(TA_CUDA_STATUS "toolkit ${CUDAToolkit_VERSION} in ${CUDAToolkit_BIN_DIR} has no nvcc")
    elseif(CUDAToolkit_VERSION VERSION_LESS 12.0)
        set(TA_CUDA_STATUS "toolkit ${CUDAToolkit_VERSION} in ${CUDAToolkit_BIN_DIR} is too old: sm_90 needs 12.0")
    else()
        set(TA_CUDA_FOUND ON)
        set(TA_CUDA_STATUS "toolkit ${CUDAToolkit_VERSION} in ${CUDAToolkit_BIN_DIR}")
    endif()
    if(TA_ENABLE_CUDA STREQUAL "ON" AND NOT TA_CUDA_FOUND)
        message(FATAL_ERROR "TA_ENABLE_CUDA=ON: ${TA_CUDA_STATUS}")
    endif()
endif()
message(STATUS "TurboAttention: CUDA: ${TA_CUDA_STATUS}")

if(TA_CUDA_FOUND)
    set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
    set(CMAKE_CUDA_ARCHITECTURES "${TA_CUDA_ARCHITECTURES}")
    enable_language(CUDA)
endif()

# ta_cuda_sources(<name> <architectures> <file>...)
# Adds CUDA sources to the library, compiled for the architectures alone. nvcc may contract a*b+c on the device: what has to be
# bit-exact with the CPU is written with the _rn intrinsics there. Never --use_fast_math.
function(ta_cuda_sources name architectures)
    set(target turboattention_cuda_${name})
    add_library(${target} OBJECT ${ARGN})
    set_target_properties(${target} PROPERTIES
        CUDA_ARCHITECTURES "${architectures}"
        POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    )
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}")
    target_link_libraries(${target} PRIVATE TurboAttention_xxhash)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-Xcompiler=-ffp-contract=off>")
    set_property(GLOBAL APPEND PROPERTY TA_CUDA_OBJECTS $<TARGET_OBJECTS:${target}>)
endfunction()
