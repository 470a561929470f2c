// ta plot: the JSON of a benchmark as a picture, drawn by python3 with matplotlib.
#pragma once

#include <string>

namespace ta::tools {

// `out` ends in .svg or .png. Throws WrongInput, and Failure where python3 or matplotlib is missing.
void plot(const std::string& json_path, const std::string& out, const std::string& python);

}  // namespace ta::tools
