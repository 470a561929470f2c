// The two ways through a task; attend.cpp chooses. Both give the same bits.
#pragma once

#include "kernels/cpu/attend.h"

namespace ta::cpu::avx512 {

// Few rows: works on the codes as they are stored, with the steps folded into q and into the result.
void attend_codes(const AttendTask& task);
// Many rows: unpacks a page to INT8 tiles that stay in L1 while the rows pass. The only one that knows v_float.
void attend_tiles(const AttendTask& task);

}  // namespace ta::cpu::avx512
