// The instantiations of the prefill kernel, one source file per head_dim and kind: instantiations/d*.cu.
#pragma once

namespace ta::cuda::prefill::sm80 {

struct Kernels {
    // [without softcap, ALiBi and SAS; with any of them]: kernels of four arguments, AttendArgs, PrefillSchedule*, uint8_t* (the
    // workspace) and int (the depth).
    const void* attend[2];
    int smem_bytes[2];  // at a depth of 2, of 3
};

// For pools without channel pages.
Kernels kernels_d64();
Kernels kernels_d96();
Kernels kernels_d128();
Kernels kernels_d256();
// For pools that may have channel pages.
Kernels kernels_d64_channels();
Kernels kernels_d128_channels();
Kernels kernels_d256_channels();

}  // namespace ta::cuda::prefill::sm80
