// Attention for AVX-512 with VNNI. This folder holds what that instruction set makes different, and nothing else.
#include "kernels/cpu/attend.h"

#include "kernels/cpu/avx512/paths.h"

namespace ta::cpu {
namespace {

// Rows up to which working on codes is faster than unpacking them. With two bytes of P the multiplications of P V are the same
// in both; with one byte the tiles need half as many for K.
constexpr int kMaxRowsOnCodes = 16;

}  // namespace

void attend_avx512(const AttendTask& task) {
    if (task.rows <= kMaxRowsOnCodes && !task.v_float) {
        avx512::attend_codes(task);
    } else {
        avx512::attend_tiles(task);
    }
}

}  // namespace ta::cpu
