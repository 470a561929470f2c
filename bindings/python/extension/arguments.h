// What Python's values are to the library.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common.h"

ta_switch to_switch(nb::handle value);  // None: the default
// A path as the system takes it, and nothing for None.
std::optional<std::string> to_path(nb::handle path);
// Bytes of a bytes-like object.
std::string to_bytes(nb::handle object);
// Keys: bytes-like with 32 bytes for each, or an iterable of such.
std::vector<ta::Key> to_keys(nb::handle object);

inline ta_stream to_stream(uintptr_t stream) {
    return reinterpret_cast<ta_stream>(stream);
}
