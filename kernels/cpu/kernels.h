// Which CPU kernels this machine can run.
#pragma once

#include "include/turboattention.h"
#include "kernels/cpu/attend.h"
#include "kernels/cpu/distr.h"
#include "kernels/cpu/merge_states.h"
#include "kernels/cpu/page_codec.h"

namespace ta::cpu {

struct Kernels {
    ta_cpu_isa isa;
    const char* name;
    AttendFn attend;
    JoinFn join;
    MergeFn merge;
    const PageCodec* codec;
    const DistrKernel* distr;
};

// The kernels for an instruction set; for TA_CPU_ISA_AUTO the best available. nullptr if this CPU or build lacks them.
const Kernels* find_kernels(ta_cpu_isa isa);

}  // namespace ta::cpu
