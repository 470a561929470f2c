// What the sources of the extension share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <turboattention.hpp>
#include <utility>

#include "gil.h"

namespace nb = nanobind;
using namespace nb::literals;

inline nb::object package(const char* module, const char* name) {
    return nb::module_::import_(module).attr(name);
}

// f without the GIL. Errors of the library are thrown as ta::Error.
template <class F>
auto unlocked(F&& f) {
    const Unlocked gil;
    return f();
}
// A call of the C ABI: f(ta_error*) -> ta_status.
template <class F>
void call(F&& f) {
    unlocked([&] { ta::Throwing::run(f); });
}

template <class T>
nb::list to_list(std::vector<T> items) {
    nb::list list;
    for (T& item : items) list.append(nb::cast(std::move(item)));
    return list;
}

// Signatures are written out where nanobind would only say "object".
inline constexpr const char* kClose =
    "Gives up the handle: later calls raise StateError (CLOSED). What still needs it keeps it alive.";

// What ``close`` does: nothing where the object has ended already, was closed with its pool, or moved to another rank.
template <class F>
void unless_gone(F&& end) {
    const auto is_gone = [](int kind) { return kind == TA_E_CLOSED || kind == TA_E_STALE; };
    try {
        end();
    } catch (const ta::Error& error) {
        if (!is_gone(error.status())) throw;
    } catch (nb::python_error& error) {
        if (!error.matches(package("turboattention._errors", "StateError"))) throw;
        if (!is_gone(nb::cast<int>(error.value().attr("kind")))) throw;
    }
}

template <class T, class... Extra>
void add_context_manager(nb::class_<T, Extra...>& type) {
    type.def(
        "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> typing.Self"));
    type.def(
        "__exit__", [](nb::handle self, nb::args) { self.attr("close")(); },
        nb::sig("def __exit__(self, *exception: object) -> None"));
}

// Bind what their sources are named for.
struct ContextObject;
void bind_structs(nb::module_& m);
nb::class_<ContextObject> bind_context(nb::module_& m);
void bind_pool(nb::module_& m, nb::class_<ContextObject>& context);
void bind_prefix(nb::module_& m);
void bind_sequence(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_group(nb::module_& m, nb::class_<ContextObject>& context);
