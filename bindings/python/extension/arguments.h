// What Python's values are to the library.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common.h"

[[noreturn]] void wrong_type(const std::string& name, const char* wanted, nb::handle object);
// What has __index__ as a T, as far as it can hold it. What fails names the argument: TypeError says what it must be.
template <class T>
T to_integer(nb::handle object, const std::string& name, const char* wanted = "an integer") {
    if (!PyIndex_Check(object.ptr())) wrong_type(name, wanted, object);
    const nb::object number = nb::steal(PyNumber_Index(object.ptr()));
    if (!number) throw nb::python_error();
    T value;
    if (!nb::try_cast(number, value)) throw ta::Error(TA_E_INVALID, name + " is outside its range");
    return value;
}
// An attribute that is one.
template <class T>
T field(nb::handle options, const char* name) {
    return to_integer<T>(options.attr(name), name);
}
// Integers of an iterable.
template <class T>
std::vector<T> to_integers(nb::handle object, const std::string& name) {
    if (!nb::hasattr(object, "__iter__") && !PySequence_Check(object.ptr())) wrong_type(name, "made of integers", object);
    std::vector<T> numbers;
    for (nb::handle number : object) numbers.push_back(to_integer<T>(number, name, "made of integers"));
    return numbers;
}

bool to_bool(nb::handle value, const std::string& name);
ta_switch to_switch(nb::handle value, const char* name);  // None: the default
// A path as the system takes it, and nothing for None.
std::optional<std::string> to_path(nb::handle path);
// What is in a bytes-like object, which stays as it is meanwhile. With the GIL.
class Buffer {
  public:
    explicit Buffer(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_CONTIG_RO) != 0) throw nb::python_error();
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }
    std::span<const uint8_t> bytes() const { return {static_cast<const uint8_t*>(view_.buf), static_cast<size_t>(view_.len)}; }

  private:
    Py_buffer view_;
};
// Bytes of a bytes-like object.
std::string to_bytes(nb::handle object);
// Keys: bytes-like with 32 bytes for each, or an iterable of such.
std::vector<ta::Key> to_keys(nb::handle object);

std::vector<ta::LayerGroup> to_layer_groups(nb::iterable groups);

// A number for each of n sequences: one for all, or an iterable.
std::vector<int32_t> to_counts(nb::handle object, size_t n, const char* name);

inline ta_stream to_stream(uintptr_t stream) {
    return reinterpret_cast<ta_stream>(stream);
}
