// Attention for AMX-INT8: AVX-512's, but for the products of many rows.
#include "kernels/cpu/attend.h"

#include "kernels/cpu/amx/paths.h"
#include "kernels/cpu/avx512/paths.h"

namespace ta::cpu {
namespace {

// Rows up to which work goes on codes. Queries with rests, which tiles do not take, have up to as many. Without rests tiles are as fast
// from 12 rows on: measured, d = 128, 4 bits.
constexpr int kMaxRowsOnCodes = 16;

}  // namespace

void attend_amx(const AttendTask& task) {
    if (task.rows <= kMaxRowsOnCodes && !task.v_float) {
        avx512::attend_codes(task);
    } else {
        amx::attend_tiles(task);
    }
}

}  // namespace ta::cpu
