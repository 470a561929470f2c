#include "kernels/cpu/avx512/paths.h"
#include "kernels/cpu/avx512/prefill_impl.h"
#include "kernels/cpu/avx512/vnni_products.h"

namespace ta::cpu::avx512 {

void attend_tiles(const AttendTask& task) {
    attend_tiles_by<VnniProducts>(task);
}

}  // namespace ta::cpu::avx512
