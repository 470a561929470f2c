// The kernels that attend to many query rows, and which of them a call takes. A kernel for another architecture is a folder beside
// sm90 (prefill.h is what others see of it), one row of kPrefillVariants, or of kDistrVariants for DistrAttention, and its sources in
// kernels/CMakeLists.txt. Instructions of its own go to ptx/.
//
// Up to 16 query rows of a sequence and kv head take the decode kernel (any/decode) on every GPU. More rows take the first variant
// that runs on the GPU and does not refuse the call. If there is none, the decode kernel takes the rows 16 at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <iterator>

#include "kernels/cuda/sm80/distr/distr.h"
#include "kernels/cuda/sm80/prefill/prefill.h"
#include "kernels/cuda/sm90/distr/distr.h"
#include "kernels/cuda/sm90/prefill/prefill.h"

namespace ta::cuda {

struct PrefillVariant {
    // GPUs that run it: those that run code of this kernel_generation() or a later one; with this first number of the compute
    // capability, 0: whatever it is (code for one architecture alone, as sm_90a's, runs on no other); that allow a CTA so much
    // shared memory.
    int generation, major, shared_bytes;
    int rows;  // of a tile
    // Channel pages are expanded first (any/expand) if on the average at least so many tiles read each.
    int least_reads;

    // Why the kernel cannot run a call, or nullptr if it can.
    const char* (*refusal)(const AttendArgs& args);
    // Up to how many keys of a sequence its resident tiles may have (schedule.h); 0: it has none for such calls.
    int (*resident_keys)(const AttendArgs& args);
    // Loads the kernel that a captured call takes.
    cudaError_t (*load)(const AttendArgs& args);
    cudaError_t (*launch)(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream);

    constexpr bool runs_on(int code, int capability, int most_shared_bytes) const {
        return code >= generation && (major == 0 || capability == major) && most_shared_bytes >= shared_bytes;
    }
};

constexpr int no_resident_keys(const AttendArgs&) {
    return 0;
}

inline constexpr PrefillVariant kPrefillVariants[] = {
    {9, 9, 0, prefill::sm90::kRowsOfTile, 4, prefill::sm90::refusal, prefill::sm90::resident_keys, prefill::sm90::load,
     prefill::sm90::launch},
    {8, 0, prefill::sm80::kSharedBytes, prefill::sm80::kRowsOfTile, 2, prefill::sm80::refusal, no_resident_keys,
     prefill::sm80::load, prefill::sm80::launch},
    {8, 0, prefill::sm80::kWideSharedBytes, prefill::sm80::kRowsOfWideTile, 2, prefill::sm80::wide_refusal, no_resident_keys,
     prefill::sm80::load, prefill::sm80::launch},
};

// The variant for a call, or nullptr if the decode kernel takes it.
inline const PrefillVariant* choose_prefill(int generation, int major, int shared_bytes, const AttendArgs& args) {
    for (const PrefillVariant& v : kPrefillVariants) {
        if (v.runs_on(generation, major, shared_bytes) && !v.refusal(args)) return &v;
    }
    return nullptr;
}

struct DistrVariant {
    int generation, major;  // as PrefillVariant's
    const char* (*refusal)(const DistrArgs& args);
    cudaError_t (*launch)(const DistrArgs& args, cudaStream_t stream);
};

inline constexpr DistrVariant kDistrVariants[] = {
    {9, 9, distr::sm90::refusal, distr::sm90::launch},
    {8, 0, distr::sm80::refusal, distr::sm80::launch},
};

// The variant for a call. The last runs on every GPU that the library runs on, and takes every call.
inline const DistrVariant& choose_distr(int generation, int major, const DistrArgs& args) {
    for (const DistrVariant& v : kDistrVariants) {
        if (generation >= v.generation && (v.major == 0 || major == v.major) && !v.refusal(args)) return v;
    }
    return kDistrVariants[std::size(kDistrVariants) - 1];
}

}  // namespace ta::cuda
