// The instantiations of the prefill kernel, one source file per head_dim and kind: instantiations/d*.cu.
#pragma once

namespace ta::cuda::prefill::sm90 {

struct Kernels {
    // [without softcap, ALiBi and SAS; with any of them]: kernels of three arguments, AttendArgs, PrefillSchedule* and uint8_t*
    // (the workspace).
    const void* attend[2];
    int threads;
    int smem_bytes;
};

// For pools without channel pages.
Kernels kernels_d64();
Kernels kernels_d128();
// The same for long tiles.
Kernels kernels_d64_long();
Kernels kernels_d128_long();
// The same for resident tiles.
Kernels kernels_d64_resident();
Kernels kernels_d128_resident();
// For pools that may have channel pages.
Kernels kernels_d64_channels();
Kernels kernels_d128_channels();
// The same where K or V of some heads has 8 bits.
Kernels kernels_d64_any_bits();
Kernels kernels_d128_any_bits();

}  // namespace ta::cuda::prefill::sm90
