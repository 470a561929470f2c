#include "arrays.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_24_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <string_view>

#include "arguments.h"

namespace {

// Of dlpack.h, https://dmlc.github.io/dlpack
struct DLTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;  // may be null: dense
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void* context;
    void (*deleter)(DLManagedTensor*);
};
struct DLManagedTensorVersioned {
    uint32_t major, minor;
    void* context;
    void (*deleter)(DLManagedTensorVersioned*);
    uint64_t flags;
    DLTensor tensor;
};
enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };
enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 };
constexpr uint64_t kDLReadOnly = 1;

// Of "f", "<f4", "e", "=H", ...: 0 for what is no element type of the library. uint16 stands for the bits of a bfloat16.
ta_dtype dtype_of_format(const char* format) {
    if (*format == '<' || *format == '=' || *format == '@') ++format;
    const std::string_view f = format;
    if (f == "f" || f == "f4") return TA_DTYPE_F32;
    if (f == "e" || f == "f2") return TA_DTYPE_F16;
    if (f == "H" || f == "u2") return TA_DTYPE_BF16;
    return 0;
}

ta_dtype dtype_of_code(const DLTensor& t) {
    if (t.lanes != 1) return 0;
    if (t.code == kDLFloat && t.bits == 32) return TA_DTYPE_F32;
    if (t.code == kDLFloat && t.bits == 16) return TA_DTYPE_F16;
    if ((t.code == kDLBfloat || t.code == kDLUInt) && t.bits == 16) return TA_DTYPE_BF16;
    return 0;
}

// numpy has no bfloat16: packages register one (ml_dtypes).
bool is_bfloat16(PyArray_Descr* type) {
    return nb::handle(reinterpret_cast<PyObject*>(type->typeobj)).attr("__name__").equal(nb::str("bfloat16"));
}

ta_dtype dtype_of_numpy(PyArrayObject* array) {
    if (!PyArray_ISNBO(PyArray_DESCR(array)->byteorder)) return 0;
    switch (PyArray_TYPE(array)) {
        case NPY_FLOAT:
            return TA_DTYPE_F32;
        case NPY_HALF:
            return TA_DTYPE_F16;
        case NPY_USHORT:
            return TA_DTYPE_BF16;
        default:
            return PyArray_TYPE(array) >= NPY_USERDEF && is_bfloat16(PyArray_DESCR(array)) ? TA_DTYPE_BF16 : 0;
    }
}

}  // namespace

Array::Array(nb::handle object, const char* name, const Place& place, bool written) : name_(name) {
    if (PyArray_Check(object.ptr())) {
        take_numpy(object, written);
    } else if (nb::hasattr(object, "__dlpack__")) {
        take_dlpack(object, place, written);
    } else if (nb::hasattr(object, "__cuda_array_interface__")) {
        take_cuda_array(object, place, written);
    } else if (PyObject_CheckBuffer(object.ptr())) {
        take_buffer(object, written);
    } else {
        throw nb::type_error(
            (std::string(name) + " is no array: it has no __dlpack__, __cuda_array_interface__ or buffer").c_str());
    }
    if (std::find(shape_.begin(), shape_.begin() + axes_, 0) != shape_.begin() + axes_) {  // the strides tell nothing
        for (int64_t i = axes_ - 1, stride = 1; i >= 0; stride *= shape_[i--]) strides_[i] = stride;
    }
    if (dtype_ == 0) {
        const bool named = nb::hasattr(object, "dtype");
        const std::string found =
            named ? "is " + std::string(nb::str("{}").format(object.attr("dtype")).c_str()) : "is of another type";
        fail(TA_E_DTYPE, found + ": it takes float32, float16, bfloat16 or uint16 (the bits of a bfloat16)");
    }
    if (on_gpu_ && !place.cuda) fail(TA_E_INVALID, "is in GPU memory, and the context is of a CPU");
}

void Array::fail(ta_status status, const std::string& message) const {
    throw ta::Error(status, std::string(name_) + " " + message);
}

void Array::set_axes(int64_t axes) {
    if (axes < 1 || axes > 3) fail(TA_E_SHAPE, "has " + std::to_string(axes) + " axes, not 1 to 3");
    axes_ = axes;
}

void Array::set_axis(int64_t axis, int64_t length, int64_t stride_bytes) {
    const int64_t element = dtype_ == TA_DTYPE_F32 ? 4 : 2;
    if (length > 1 && stride_bytes % element != 0) fail(TA_E_SHAPE, "has strides that are no multiples of its elements");
    shape_[axis] = length;
    strides_[axis] = stride_bytes / element;
}

void Array::take_numpy(nb::handle object, bool written) {
    auto* const array = reinterpret_cast<PyArrayObject*>(object.ptr());
    owner_ = nb::borrow(object);
    if (written && !PyArray_ISWRITEABLE(array)) fail(TA_E_INVALID, "is read-only");
    dtype_ = dtype_of_numpy(array);
    if (dtype_ == 0) return;  // the constructor says so
    set_axes(PyArray_NDIM(array));
    for (int i = 0; i < PyArray_NDIM(array); ++i) set_axis(i, PyArray_DIM(array, i), PyArray_STRIDE(array, i));
    data_ = PyArray_DATA(array);
}

void Array::take_buffer(nb::handle object, bool written) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_FORMAT | PyBUF_STRIDES) != 0) throw nb::python_error();
    if (written && buffer_.readonly) fail(TA_E_INVALID, "is read-only");
    dtype_ = buffer_.format ? dtype_of_format(buffer_.format) : 0;
    if (dtype_ == 0) return;
    set_axes(buffer_.ndim);
    for (int i = 0; i < buffer_.ndim; ++i) set_axis(i, buffer_.shape[i], buffer_.strides[i]);
    data_ = buffer_.buf;
}

void Array::take_dlpack(nb::handle object, const Place& place, bool written) {
    nb::dict options;
    // 1 is the legacy default stream.
    if (place.cuda && nb::cast<int>(object.attr("__dlpack_device__")()[0]) == kDLCUDA)
        options["stream"] = place.stream ? reinterpret_cast<uintptr_t>(place.stream) : uintptr_t{1};
    if (written) {
        // Only versioned capsules say whether they may be written.
        options["max_version"] = nb::make_tuple(1, 0);
        try {
            owner_ = object.attr("__dlpack__")(**options);
        } catch (nb::python_error& error) {
            if (!error.matches(PyExc_TypeError)) throw;
            nb::del(options["max_version"]);
        }
    }
    if (!owner_) owner_ = object.attr("__dlpack__")(**options);
    const DLTensor* t = nullptr;
    // The capsule is never renamed to used_dltensor: it stays the owner, and its destructor calls the deleter.
    if (PyCapsule_IsValid(owner_.ptr(), "dltensor_versioned")) {
        const auto* managed = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(owner_.ptr(), "dltensor_versioned"));
        if (managed->major != 1) fail(TA_E_UNSUPPORTED, "is of another version of DLPack");
        if (written && (managed->flags & kDLReadOnly)) fail(TA_E_INVALID, "is read-only");
        t = &managed->tensor;
    } else if (PyCapsule_IsValid(owner_.ptr(), "dltensor")) {
        t = &static_cast<DLManagedTensor*>(PyCapsule_GetPointer(owner_.ptr(), "dltensor"))->tensor;
    } else {
        fail(TA_E_INVALID, "gave no DLPack capsule");
    }
    const bool host = t->device_type == kDLCPU || t->device_type == kDLCUDAHost;
    on_gpu_ = t->device_type == kDLCUDA || t->device_type == kDLCUDAManaged;
    if (!host && !on_gpu_) fail(TA_E_INVALID, "is on a device that is neither a CPU nor a CUDA GPU");
    dtype_ = dtype_of_code(*t);
    if (dtype_ == 0) return;
    set_axes(t->ndim);
    int64_t dense_stride = 1;
    for (int i = t->ndim - 1; i >= 0; --i) {
        shape_[i] = t->shape[i];
        strides_[i] = t->strides ? t->strides[i] : dense_stride;
        dense_stride *= shape_[i];
    }
    data_ = static_cast<char*>(t->data) + t->byte_offset;
}

void Array::take_cuda_array(nb::handle object, const Place& place, bool written) {
    const std::string name = std::string(name_) + ".__cuda_array_interface__";
    const nb::object description = object.attr("__cuda_array_interface__");
    if (!nb::isinstance<nb::dict>(description)) wrong_type(name, "a dict", description);
    const auto part = [&](const char* key) {
        PyObject* const value = PyDict_GetItemString(description.ptr(), key);
        return nb::borrow(value ? value : Py_None);
    };
    const auto name_of = [&](const char* key) { return name + "['" + key + "']"; };
    const auto tuple = [&](const char* key, size_t length) {
        const nb::object value = part(key);
        if (!nb::isinstance<nb::tuple>(value)) wrong_type(name_of(key), "a tuple", value);
        auto elements = nb::borrow<nb::tuple>(value);
        if (length != 0 && elements.size() != length)
            throw nb::type_error((name_of(key) + " must have " + std::to_string(length) + " elements").c_str());
        return elements;
    };
    const nb::tuple shape = tuple("shape", 0), data = tuple("data", 2);
    owner_ = nb::borrow(object);
    on_gpu_ = true;
    if (written && to_bool(data[1], name_of("data"))) fail(TA_E_INVALID, "is read-only");
    if (const nb::object stream = part("stream"); !stream.is_none()) {
        // 1 is the legacy default stream. To order work of another stream before ours takes calls of CUDA.
        const auto number = to_integer<uintptr_t>(stream, name_of("stream"));
        if ((number == 1 ? 0 : number) != reinterpret_cast<uintptr_t>(place.stream))
            fail(TA_E_INVALID, "is used on another stream: give this one to the plan or the call, or synchronize");
    }
    const nb::object type = part("typestr");
    const char* const format = nb::isinstance<nb::str>(type) ? PyUnicode_AsUTF8AndSize(type.ptr(), nullptr) : nullptr;
    if (!format) {
        PyErr_Clear();  // of a str that is no text
        wrong_type(name_of("typestr"), "a str such as '<f4'", type);
    }
    dtype_ = dtype_of_format(format);
    if (dtype_ == 0) return;
    set_axes(static_cast<int64_t>(shape.size()));
    const nb::tuple strides = part("strides").is_none() ? nb::tuple() : tuple("strides", shape.size());
    int64_t dense_stride = dtype_ == TA_DTYPE_F32 ? 4 : 2;
    for (int64_t i = axes_ - 1; i >= 0; --i) {
        const auto length = to_integer<int64_t>(shape[i], name_of("shape"));
        set_axis(i, length, strides.size() != 0 ? to_integer<int64_t>(strides[i], name_of("strides")) : dense_stride);
        dense_stride *= length;
    }
    data_ = reinterpret_cast<void*>(to_integer<uintptr_t>(data[0], name_of("data")));
}

ta_tensor Array::tensor() const {
    if (axes_ != 3) fail(TA_E_SHAPE, "has " + std::to_string(axes_) + " axes; [tokens, heads, head_dim] is wanted");
    if (shape_[2] > 1 && strides_[2] != 1) fail(TA_E_SHAPE, "must have its channels side by side (stride 1)");
    return ta_tensor_make_strided(data_, dtype_, shape_[0], shape_[1], shape_[2], strides_[0], strides_[1]);
}

bool Array::dense() const {
    int64_t stride = 1;
    for (int64_t i = axes_ - 1; i >= 0; stride *= shape_[i--])
        if (shape_[i] > 1 && strides_[i] != stride) return false;
    return true;
}

float* Array::floats(int64_t first, int64_t second) const {
    const int64_t axes = second == 0 ? 1 : 2;
    if (dtype_ != TA_DTYPE_F32) fail(TA_E_DTYPE, "must be float32");
    if (axes_ != axes || shape_[0] != first || (axes == 2 && shape_[1] != second) || !dense())
        fail(TA_E_SHAPE,
             "must be [" + std::to_string(first) + (axes == 2 ? ", " + std::to_string(second) : "") + "] without gaps");
    return static_cast<float*>(data_);
}

nb::object new_array(int64_t tokens, int64_t heads, int64_t head_dim) {
    npy_intp shape[] = {tokens, heads, head_dim};
    PyObject* const array = PyArray_SimpleNew(3, shape, NPY_FLOAT);
    if (!array) throw nb::python_error();
    return nb::steal(array);
}

void use_numpy() {
    if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
}
