# The header is the one place that states the versions. Sets TA_VERSION (major.minor.patch) and TA_ABI_VERSION.
set(_ta_header "${CMAKE_CURRENT_LIST_DIR}/../include/turboattention.h")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_ta_header}")

foreach(_ta_macro IN ITEMS VERSION_MAJOR VERSION_MINOR VERSION_PATCH ABI_VERSION)
    file(STRINGS "${_ta_header}" _ta_line REGEX "^#define TA_${_ta_macro} [0-9]+")
    if(NOT _ta_line MATCHES "^#define TA_${_ta_macro} ([0-9]+)")
        message(FATAL_ERROR "include/turboattention.h has no line '#define TA_${_ta_macro} <number>'")
    endif()
    set(TA_${_ta_macro} "${CMAKE_MATCH_1}")
endforeach()
set(TA_VERSION "${TA_VERSION_MAJOR}.${TA_VERSION_MINOR}.${TA_VERSION_PATCH}")
