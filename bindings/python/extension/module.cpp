// The extension module turboattention._core: turboattention.hpp for Python.
#include <exception>

#include "arrays.h"
#include "callbacks.h"
#include "objects.h"

namespace {

void raise(const ta::Error& error) try {
    const ta_error& d = error.detail();
    const nb::object exception = package("turboattention._errors", "_make")(
        d.code, nb::str(d.message), d.layer, d.head, d.argument, d.tier, d.rank, d.sequence, d.block, d.token, d.bytes);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
} catch (nb::python_error& other) {
    other.restore();
}

}  // namespace

NB_MODULE(_core, m) {
    use_numpy();
    nb::set_leak_warnings(false);  // what is alive at the interpreter's end is no defect
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const ta::Error& error) {
            raise(error);
        }
    });
    nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { shut_door(); }));
    bind_structs(m);
    nb::class_<ContextObject> context = bind_context(m);
    bind_pool(m, context);
    bind_prefix(m);
    bind_sequence(m);
    bind_plan(m);
    bind_group(m, context);
}
