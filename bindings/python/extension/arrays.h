// Arrays of Python as tensors of the library, without copies: of numpy, by DLPack (PyTorch, JAX, CuPy),
// __cuda_array_interface__ (Numba) or the buffer protocol. An Array holds what it looks at until it goes; it is made and destroyed with the GIL held.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <string>
#include <turboattention.hpp>

namespace nb = nanobind;

// Where a call computes: what its arrays have to be reachable from.
struct Place {
    bool cuda = false;
    ta_stream stream = nullptr;
};

class Array {
  public:
    // name: of the parameter, for messages
    Array(nb::handle object, const char* name, const Place& place, bool written);
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    // [tokens, heads, head_dim]
    ta_tensor tensor() const;
    // [first, second] or, where second is 0, [first], of F32 without gaps
    float* floats(int64_t first, int64_t second = 0) const;

  private:
    void take_numpy(nb::handle object, bool written);
    void take_buffer(nb::handle object, bool written);
    void take_dlpack(nb::handle object, const Place& place, bool written);
    void take_cuda_array(nb::handle object, const Place& place, bool written);
    [[noreturn]] void fail(ta_status status, const std::string& message) const;
    void set_axes(int64_t axes);
    void set_axis(int64_t axis, int64_t length, int64_t stride_bytes);
    bool dense() const;

    const char* name_;
    void* data_ = nullptr;
    ta_dtype dtype_ = 0;
    bool on_gpu_ = false;
    int64_t axes_ = 0;
    std::array<int64_t, 3> shape_{}, strides_{};  // strides in elements
    nb::object owner_;
    struct Buffer : Py_buffer {
        Buffer() : Py_buffer{} {}
        ~Buffer() {
            if (obj) PyBuffer_Release(this);
        }
    } buffer_;
};

// Called when the module is loaded.
void use_numpy();

// A float32 numpy array of this shape.
nb::object new_array(int64_t tokens, int64_t heads, int64_t head_dim);
