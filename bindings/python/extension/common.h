// What the sources of the extension share.
#pragma once

#include <nanobind/nanobind.h>

#include <turboattention.hpp>
#include <utility>

namespace nb = nanobind;

inline nb::object package(const char* module, const char* name) {
    return nb::module_::import_(module).attr(name);
}

// f without the GIL. Errors of the library are thrown as ta::Error.
template <class F>
auto unlocked(F&& f) {
    const nb::gil_scoped_release release;
    return f();
}
// A call of the C ABI: f(ta_error*) -> ta_status.
template <class F>
void call(F&& f) {
    unlocked([&] { ta::Throwing::run(f); });
}

// Binds the structs that the library fills in.
void bind_structs(nb::module_& m);
