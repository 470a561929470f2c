// ta inspect and ta verify: what a file of the library holds, and whether it is intact.
#pragma once

#include <string>

#include "tools/ta/table.h"

namespace ta::tools {

// `blocks`: adds a row for each block. Throws WrongInput.
Json inspect(const std::string& path, bool blocks);
void print_inspection(const Json& file, uint64_t most_blocks);

// "good": all hashes match; "damage": what does not. Throws WrongInput.
Json verify(const std::string& path);
void print_verification(const Json& result);

}  // namespace ta::tools
