// The instantiations of the prefill kernel, one source file per head_dim and kind: instantiations/d*.cu.
#pragma once

namespace ta::cuda {

struct PrefillKernels {
    // [without softcap, ALiBi and SAS; with any of them]: kernels of three arguments, AttendArgs, PrefillSchedule* and uint8_t*
    // (the workspace).
    const void* attend[2];
    int threads;
    int smem_bytes;
};

// For pools without channel pages.
PrefillKernels prefill_kernels_d64();
PrefillKernels prefill_kernels_d128();
// The same for long tiles.
PrefillKernels prefill_kernels_d64_long();
PrefillKernels prefill_kernels_d128_long();
// The same for resident tiles.
PrefillKernels prefill_kernels_d64_resident();
PrefillKernels prefill_kernels_d128_resident();
// For pools that may have channel pages.
PrefillKernels prefill_kernels_d64_channels();
PrefillKernels prefill_kernels_d128_channels();
// The same where K or V of some heads has 8 bits.
PrefillKernels prefill_kernels_d64_any_bits();
PrefillKernels prefill_kernels_d128_any_bits();

}  // namespace ta::cuda
