#include "kernels/cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ta::cpu {
namespace {

#if defined(__x86_64__)
// CPUID 7.1, EAX bit 4. clang's __builtin_cpu_supports knows the name from version 15 on.
bool has_avxvnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif

#if defined(__linux__) && defined(__x86_64__)
// CPUID 7.0: AMX-TILE and AMX-INT8. Linux gives a process the tiles when it asks for them; it refuses where a thread's alternate signal
// stack has no room for them.
bool may_use_amx() {
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kTile) || !(d & kInt8)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool may_use_amx() {
    return false;
}
#endif

bool runs_here(ta_cpu_isa isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    switch (isa) {
        case TA_CPU_ISA_SCALAR:
            return true;
        case TA_CPU_ISA_AVX2:
            return avx2;
        case TA_CPU_ISA_AVX_VNNI:
            return avx2 && has_avxvnni();
        case TA_CPU_ISA_AVX512:
            return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
        case TA_CPU_ISA_AMX: {
            static const bool may = runs_here(TA_CPU_ISA_AVX512) && may_use_amx();
            return may;
        }
        default:
            return false;
    }
#else
    return isa == TA_CPU_ISA_SCALAR;
#endif
}

}  // namespace

const Kernels* find_kernels(ta_cpu_isa isa) {
    // TA_HAVE_*: the build has the kernels (kernels/CMakeLists.txt).
    static const Kernels all[] = {
#if TA_HAVE_AMX
        {TA_CPU_ISA_AMX, "amx-int8", attend_amx, join_avx512, merge_avx512, &page_codec_avx512(), &distr_kernel_avx512()},
#endif
#if TA_HAVE_AVX512
        {TA_CPU_ISA_AVX512, "avx512-vnni", attend_avx512, join_avx512, merge_avx512, &page_codec_avx512(),
         &distr_kernel_avx512()},
#endif
#if TA_HAVE_AVXVNNI
        {TA_CPU_ISA_AVX_VNNI, "avx-vnni", attend_avxvnni, join_avx2, merge_avx2, &page_codec_avx2(), &distr_kernel_avx2()},
#endif
#if TA_HAVE_AVX2
        {TA_CPU_ISA_AVX2, "avx2", attend_avx2, join_avx2, merge_avx2, &page_codec_avx2(), &distr_kernel_avx2()},
#endif
        {TA_CPU_ISA_SCALAR, "scalar", attend_scalar, join_scalar, merge_scalar, &page_codec_scalar(), &distr_kernel_scalar()},
    };
    for (const Kernels& k : all) {
        if ((isa == TA_CPU_ISA_AUTO || k.isa == isa) && runs_here(k.isa)) return &k;
    }
    return nullptr;
}

}  // namespace ta::cpu
