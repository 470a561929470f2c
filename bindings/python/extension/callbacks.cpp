#include "callbacks.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace {

// Counts what calls back from threads of the library. From the interpreter's end on nothing does: a thread that asks for the GIL
// then is stopped for good.
class Door {
  public:
    bool enter() {
        ++inside_;
        if (!shut_) return true;
        --inside_;
        return false;
    }
    void leave() { --inside_; }
    void shut() {
        shut_ = true;
        unlocked([&] {
            while (inside_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        });
    }

  private:
    std::atomic<bool> shut_ = false;
    std::atomic<int> inside_ = 0;
};
Door door;

// A Python object that is held by the library: any thread may let go of it.
class Held {
  public:
    explicit Held(nb::object object) : object_(object.release().ptr()) {}
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        if (!door.enter()) return;
        const nb::gil_scoped_acquire gil;
        Py_DECREF(object_);
        door.leave();
    }
    nb::handle get() const { return object_; }

  private:
    PyObject* object_;
};

}  // namespace

void shut_door() {
    door.shut();
}

ta::Log to_log(nb::object callback) {
    return [held = std::make_shared<Held>(std::move(callback))](ta_log_level level, std::string_view message) {
        if (!door.enter()) return;
        {
            const nb::gil_scoped_acquire gil;
            try {
                held->get()(package("turboattention._enums", "LogLevel")(level), nb::str(message.data(), message.size()));
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("the log callback of a turboattention.Context");
            }
        }
        door.leave();
    };
}

ta::Progress to_progress(const nb::object& callback) {
    return [&callback](uint64_t done, uint64_t total) {
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        return callback.is_none() || !callback(done, total).is(nb::bool_(false));
    };
}
