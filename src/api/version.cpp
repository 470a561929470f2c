#include "src/api/api.h"

#define TA_STRING_(x) #x
#define TA_STRING(x) TA_STRING_(x)

extern "C" {

const char* ta_status_name(ta_status status) {
    switch (status) {
#define TA_CASE(name) \
    case name:        \
        return #name
        TA_CASE(TA_OK);
        TA_CASE(TA_E_INVALID);
        TA_CASE(TA_E_STRUCT);
        TA_CASE(TA_E_SHAPE);
        TA_CASE(TA_E_DTYPE);
        TA_CASE(TA_E_ALIGNMENT);
        TA_CASE(TA_E_UNSUPPORTED);
        TA_CASE(TA_E_STATE);
        TA_CASE(TA_E_BUSY);
        TA_CASE(TA_E_STALE);
        TA_CASE(TA_E_CLOSED);
        TA_CASE(TA_E_FORKED);
        TA_CASE(TA_E_CANCELLED);
        TA_CASE(TA_E_MEMORY);
        TA_CASE(TA_E_TIER_FULL);
        TA_CASE(TA_E_LIMIT);
        TA_CASE(TA_E_NONFINITE);
        TA_CASE(TA_E_CORRUPT);
        TA_CASE(TA_E_DEVICE);
        TA_CASE(TA_E_DEVICE_LOST);
        TA_CASE(TA_E_IO);
        TA_CASE(TA_E_PEER_LOST);
        TA_CASE(TA_E_TIMEOUT);
        TA_CASE(TA_E_MISMATCH);
        TA_CASE(TA_E_INTERNAL);
#undef TA_CASE
        default:
            return "unknown";
    }
}

uint32_t ta_version(void) {
    return TA_VERSION_MAJOR * 10000 + TA_VERSION_MINOR * 100 + TA_VERSION_PATCH;
}

uint32_t ta_abi_version(void) {
    return TA_ABI_VERSION;
}

const char* ta_build_info(void) {
    return "turboattention " TA_STRING(TA_VERSION_MAJOR) "." TA_STRING(TA_VERSION_MINOR) "." TA_STRING(
        TA_VERSION_PATCH) "; compiler: " __VERSION__
                          "; cpu: scalar"
#if TA_HAVE_AVX2
                          " avx2"
#endif
#if TA_HAVE_AVXVNNI
                          " avx-vnni"
#endif
#if TA_HAVE_AVX512
                          " avx512-vnni"
#endif
#if TA_HAVE_AMX
                          " amx-int8"
#endif
#if TA_HAVE_CUDA
                          "; cuda: yes";
#else
                          "; cuda: no";
#endif
}

}  // extern "C"
