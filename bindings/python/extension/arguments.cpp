#include "arguments.h"

#include <cstring>

void wrong_type(const std::string& name, const char* wanted, nb::handle object) {
    throw nb::type_error((name + " must be " + wanted + ", not " + nb::type_name(object.type()).c_str()).c_str());
}

bool to_bool(nb::handle value, const std::string& name) {
    const int truth = PyObject_IsTrue(value.ptr());
    if (truth < 0) throw nb::python_error();
    // Other packages have a bool of their own. What is merely true, such as "no", is none.
    const int same = PyObject_RichCompareBool(value.ptr(), truth ? Py_True : Py_False, Py_EQ);
    if (same < 0) throw nb::python_error();
    if (!same) wrong_type(name, "a bool", value);
    return truth;
}

ta_switch to_switch(nb::handle value, const char* name) {
    if (value.is_none()) return TA_DEFAULT;
    return to_bool(value, name) ? TA_ON : TA_OFF;
}

std::optional<std::string> to_path(nb::handle path) {
    if (path.is_none()) return std::nullopt;
    const auto bytes = nb::cast<nb::bytes>(package("os", "fsencode")(path));
    if (std::memchr(bytes.c_str(), 0, bytes.size())) throw nb::value_error("embedded null byte");
    return std::string(bytes.c_str(), bytes.size());
}

std::string to_bytes(nb::handle object) {
    const Buffer buffer(object);
    return {buffer.bytes().begin(), buffer.bytes().end()};
}

std::vector<ta::LayerGroup> to_layer_groups(nb::iterable groups) {
    std::vector<ta::LayerGroup> all;
    for (const nb::handle g : groups)
        all.push_back({.first = field<uint32_t>(g, "first"),
                       .layers = field<uint32_t>(g, "layers"),
                       .window = field<int64_t>(g, "window"),
                       .kv_heads = field<uint32_t>(g, "kv_heads"),
                       .head_dim = field<uint32_t>(g, "head_dim"),
                       .v_head_dim = field<uint32_t>(g, "v_head_dim")});
    return all;
}

std::vector<int32_t> to_counts(nb::handle object, size_t n, const char* name) {
    if (PyLong_Check(object.ptr()) || (PyIndex_Check(object.ptr()) && !nb::hasattr(object, "__len__")))
        return std::vector<int32_t>(n, to_integer<int32_t>(object, name));
    std::vector<int32_t> counts = to_integers<int32_t>(object, name);
    if (counts.size() != n) throw ta::Error(TA_E_INVALID, std::string(name) + " needs one number for each sequence");
    return counts;
}

std::vector<ta::Key> to_keys(nb::handle object) {
    std::string bytes;
    if (PyObject_CheckBuffer(object.ptr())) {
        bytes = to_bytes(object);
    } else {
        for (nb::handle key : object) {
            const std::string one = to_bytes(key);
            if (one.size() != sizeof(ta::Key)) throw ta::Error(TA_E_INVALID, "a key has 32 bytes");
            bytes += one;
        }
    }
    if (bytes.size() % sizeof(ta::Key) != 0) throw ta::Error(TA_E_INVALID, "keys have 32 bytes each");
    std::vector<ta::Key> keys(bytes.size() / sizeof(ta::Key));
    if (!bytes.empty()) std::memcpy(keys.data(), bytes.data(), bytes.size());
    return keys;
}
