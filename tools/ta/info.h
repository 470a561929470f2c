// ta info: the loaded library, the devices that it works on, and what is missing on this machine and why.
#pragma once

#include "tools/ta/table.h"

namespace ta::tools {

std::string library_version();  // "0.2.0"
Json collect_info();
void print_info(const Json& info);

}  // namespace ta::tools
