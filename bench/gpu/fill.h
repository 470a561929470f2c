// Large tensors that are made and compared where they are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ta::bench {

// F16 values that are uniform in [0, 1), of the seed and the element's index.
void fill_uniform(void* to, size_t elements, uint64_t seed);
// How many 32-bit words differ. Waits.
uint64_t count_differences(const void* a, const void* b, size_t bytes);

}  // namespace ta::bench
