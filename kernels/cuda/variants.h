// The kernels that attend to many query rows, and which of them a call takes. A kernel for another architecture is a folder beside
// sm90 and one row of kPrefillVariants.
//
// Up to 16 query rows of a sequence and kv head take the decode kernel (any/decode) on every GPU. More rows take the first variant
// that runs on the GPU and does not refuse the call. If there is none, the decode kernel takes the rows 16 at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

#include "kernels/cuda/sm90/prefill/prefill.h"

namespace ta::cuda {

// What a plan depends on beside the sequences.
struct PrefillShape {
    int group;
    bool causal;
    int window, kv_heads;
    int ctas;       // of the launch; 0: tiles are not split
    int cut_every;  // parts of a tile begin so many pages, or a multiple, behind the first that its rows see
};

struct PrefillVariant {
    // GPUs that run it: kernel_generation() and the compute capability's first number. Code for one architecture alone (sm_90a)
    // does not run on newer GPUs, which run that of generation 9 without it.
    int generation, major;
    int rows;  // of a tile

    // Why the kernel cannot run a call, or nullptr if it can.
    const char* (*refusal)(const AttendArgs& args);
    // The schedule of a call, which a launch reads from device memory. `walks`: as for PrefillPlan.
    PrefillPlan (*plan)(std::span<const SequenceArgs> sequences, const PrefillShape& shape, std::span<const BlockWalk> walks);
    // Memory for the parts of split tiles, whatever the schedule.
    size_t (*workspace_bytes)(int head_dim, int ctas);
    // Loads the kernel that a captured call takes.
    cudaError_t (*load)(const AttendArgs& args);
    cudaError_t (*launch)(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream);
};

inline constexpr PrefillVariant kPrefillVariants[] = {
    {9, 9, kPrefillRows, prefill_refusal,
     [](std::span<const SequenceArgs> sequences, const PrefillShape& s, std::span<const BlockWalk> walks) {
         return PrefillPlan(sequences, s.group, s.causal, s.window, s.kv_heads, s.ctas, s.cut_every, walks);
     },
     prefill_workspace_bytes, load_prefill, launch_prefill},
};

// The variant for a call, or nullptr if the decode kernel takes it.
inline const PrefillVariant* choose_prefill(int generation, int major, const AttendArgs& args) {
    for (const PrefillVariant& v : kPrefillVariants) {
        if (v.generation == generation && v.major == major && !v.refusal(args)) return &v;
    }
    return nullptr;
}

}  // namespace ta::cuda
