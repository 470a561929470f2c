// The manual page and the shell completions, generated from the description that parses the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace ta::tools {

std::string manual_page(const CLI::App& app, const std::string& version);
// For "bash", "zsh" or "fish".
std::string completion(const CLI::App& app, const std::string& shell);

}  // namespace ta::tools
