// The products of many rows by vpdpbusd.
#include "kernels/cpu/avx512/paths.h"
#include "kernels/cpu/avx512/prefill_impl.h"
#include "kernels/cpu/avx512/vnni_products.h"

namespace ta::cpu::avx512 {
namespace {

struct VnniProducts {
    static void arrange(int, int, bool, Block&) {}
    template <int VECTORS>
    static void scores(int d, const uint8_t* const* q, const Lanes* lanes, Block& block) {
        scores_by_vnni<VECTORS>(d, q, lanes, block);
    }
    template <int VECTORS, int PLANES>
    static void values(int d, int stored, OOrder order, Block& block, float* o) {
        values_by_vnni<VECTORS, PLANES>(d, stored, order, block, o);
    }
};

}  // namespace

void attend_tiles(const AttendTask& task) {
    attend_tiles_by<VnniProducts>(task);
}

}  // namespace ta::cpu::avx512
