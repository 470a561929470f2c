#include "kernels/cpu/distr_impl.h"

namespace ta::cpu {
const DistrKernel& distr_kernel_scalar() {
    return kDistrKernel;
}
}  // namespace ta::cpu
