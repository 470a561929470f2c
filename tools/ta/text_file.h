#pragma once

#include <string>

namespace ta::tools {

// All of a file that may be a pipe; WrongInput: it cannot be read.
std::string read_text(const std::string& path);
// Under another name first: what was there stays until the new file is whole. WrongInput: it cannot be written.
void write_text(const std::string& path, const std::string& text);

}  // namespace ta::tools
