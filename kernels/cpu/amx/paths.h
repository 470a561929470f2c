// Many rows with AMX; kernels/cpu/avx512/paths.h has the other way through a task.
#pragma once

#include "kernels/cpu/attend.h"

namespace ta::cpu::amx {

void attend_tiles(const AttendTask& task);

}  // namespace ta::cpu::amx
