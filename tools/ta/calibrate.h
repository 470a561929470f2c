// ta calibrate: chooses the bits of each head by what fewer bits cost it, and tells how certain the choice is.
#pragma once

#include <string>

#include "tools/ta/table.h"

namespace ta::tools {

struct CalibrateOptions {
    std::string costs;   // path of a cost file: docs/numerics.md, section 5
    double bits = 4;     // average per element of K and V
    std::string output;  // file for the maps as JSON; empty: none
};

// Throws WrongInput.
Json calibrate(const CalibrateOptions& options);
void print_calibration(const Json& calibration, bool all_units);

}  // namespace ta::tools
