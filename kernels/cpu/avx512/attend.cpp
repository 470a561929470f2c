// Attention for AVX-512 with VNNI. This folder holds what that instruction set makes different, and nothing else.
#include "kernels/cpu/attend.h"

#include "kernels/cpu/avx512/paths.h"
#include "kernels/cpu/join.h"

namespace ta::cpu {
namespace {

// Rows up to which working on codes is faster than unpacking them: measured, d = 128, with one and two bytes of P alike.
// Codes take longer with every 4 rows, tiles with every 48.
constexpr int kMaxRowsOnCodes = 20;

}  // namespace

void attend_avx512(const AttendTask& task) {
    if (task.rows <= kMaxRowsOnCodes && !task.v_float) {
        avx512::attend_codes(task);
    } else {
        avx512::attend_tiles(task);
    }
}

void join_avx512(const JoinTask& task) {
    join_rows(task);
}

}  // namespace ta::cpu
