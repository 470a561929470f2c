#include "callbacks.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

namespace {

// Counts what calls back from threads of the library. From the interpreter's end on nothing does: a thread that asks for the GIL
// then is stopped for good.
class Door {
  public:
    bool enter() {
        ++here_;
        ++inside_;
        if (!shut_) return true;
        leave();
        return false;
    }
    void leave() {
        --inside_;
        --here_;
    }
    void shut() {
        shut_ = true;
        unlocked([&] {
            while (inside_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        });
    }
    // A child process has one thread: the one that forked. Nobody else is inside.
    void keep_this_thread() { inside_ = here_; }

  private:
    std::atomic<bool> shut_ = false;
    std::atomic<int> inside_ = 0;
    static thread_local int here_;  // of inside_, this thread
};
thread_local int Door::here_ = 0;
Door door;
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { door.keep_this_thread(); });

// A Python object that is held by the library: any thread may let go of it.
class Held {
  public:
    explicit Held(nb::object object) : object_(object.release().ptr()) {}
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        if (!door.enter()) return;
        const Locked gil;
        Py_DECREF(object_);
        door.leave();
    }
    nb::handle get() const { return object_; }

  private:
    PyObject* object_;
};

// Keys and values are bytes.
class Mapping final : public ta::BlockStore {
  public:
    explicit Mapping(nb::object mapping) : held_(std::move(mapping)) {}
    bool exists(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
        return each(items, [](nb::handle mapping, ta_store_item& item) {
            const int has = PyObject_IsTrue(mapping.attr("__contains__")(key_of(item)).ptr());
            if (has < 0) throw nb::python_error();
            return has != 0;
        });
    }
    bool get(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
        return each(items, [](nb::handle mapping, ta_store_item& item) {
            const nb::object value = mapping.attr("get")(key_of(item));
            if (value.is_none()) return false;
            const nb::bytes bytes(value);
            if (bytes.size() <= item.bytes) std::memcpy(item.data, bytes.data(), bytes.size());
            item.bytes = bytes.size();
            return true;
        });
    }
    bool put(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
        return each(items, [](nb::handle mapping, ta_store_item& item) {
            mapping.attr("__setitem__")(key_of(item), nb::bytes(item.data, item.bytes));
            return true;
        });
    }
    bool remove(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
        return each(items, [](nb::handle mapping, ta_store_item& item) {
            mapping.attr("pop")(key_of(item), nb::none());
            return true;
        });
    }

  private:
    static nb::bytes key_of(const ta_store_item& item) { return nb::bytes(item.key, sizeof(ta::Key)); }
    // What raises has failed with the rest.
    template <class F>
    bool each(std::span<ta_store_item> items, F&& f) {
        if (!door.enter()) return false;
        bool good = true;
        {
            const Locked gil;
            try {
                for (ta_store_item& item : items) item.result = f(held_.get(), item) ? TA_STORE_DONE : TA_STORE_ABSENT;
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("the store of a turboattention.Namespace");
                good = false;
            } catch (const std::exception& error) {
                PyErr_SetString(PyExc_RuntimeError, error.what());
                nb::python_error().discard_as_unraisable("the store of a turboattention.Namespace");
                good = false;
            }
        }
        door.leave();
        return good;
    }

    Held held_;
};

}  // namespace

std::shared_ptr<ta::BlockStore> to_store(nb::object mapping, bool is_written) {
    for (const char* name : {"__contains__", "get", "__setitem__", "pop"}) {
        if (!is_written && name == std::string_view("__setitem__")) break;
        if (!PyCallable_Check(nb::getattr(mapping, name, nb::none()).ptr()))
            wrong_type("store", (std::string("a mapping with ") + name).c_str(), mapping);
    }
    return std::make_shared<Mapping>(std::move(mapping));
}

void shut_door() {
    door.shut();
}

ta::Log to_log(nb::object callback) {
    if (!PyCallable_Check(callback.ptr())) wrong_type("log", "callable", callback);
    return [held = std::make_shared<Held>(std::move(callback))](ta_log_level level, std::string_view message) {
        if (!door.enter()) return;
        {
            const Locked gil;
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
    if (!callback.is_none() && !PyCallable_Check(callback.ptr())) wrong_type("progress", "callable", callback);
    return [&callback](uint64_t done, uint64_t total) {
        const Locked gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (callback.is_none()) return true;
        const nb::object result = nb::steal(call_back(callback.ptr(), nb::make_tuple(done, total).ptr()));
        if (!result) throw nb::python_error();
        return !result.is(nb::bool_(false));
    };
}

ta::Sink to_sink(std::vector<uint8_t>& to) {
    return [&to](uint64_t offset, std::span<const uint8_t> bytes) {
        {
            const Locked gil;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
        if (to.size() < offset + bytes.size()) to.resize(offset + bytes.size());
        std::copy(bytes.begin(), bytes.end(), to.begin() + static_cast<std::ptrdiff_t>(offset));
        return true;
    };
}
