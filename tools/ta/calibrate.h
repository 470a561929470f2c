// ta calibrate: which heads get how many bits, by what fewer bits cost in each, and how sure that is.
#pragma once

#include <string>

#include "tools/ta/table.h"

namespace ta::tools {

struct CalibrateOptions {
    std::string costs;   // a file: docs/numerics.md, section 5
    double bits = 4;     // of an element of K and V, on average
    std::string output;  // where the maps go as JSON; empty: nowhere
};

// Throws WrongInput.
Json calibrate(const CalibrateOptions& options);
void print_calibration(const Json& calibration, bool all_units);

}  // namespace ta::tools
