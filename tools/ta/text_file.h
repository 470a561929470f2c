#pragma once

#include <string>

namespace ta::tools {

// Reads a whole file, which may be a pipe. WrongInput: it cannot be read.
std::string read_text(const std::string& path);
// Writes to another name first, then renames: an old file stays until the new one is complete. WrongInput: the file cannot be
// written.
void write_text(const std::string& path, const std::string& text);

}  // namespace ta::tools
