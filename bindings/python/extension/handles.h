// Handles of the library in objects of Python.
//
// Calls of the library run without the GIL, on copies of the handles that are taken while it is held: what another thread closes
// meanwhile lives until the call returns. Handles are let go of without the GIL, since the library may wait for a thread of its own
// there that delivers to a Python callback.
#pragma once

#include <optional>
#include <string>

#include "common.h"

// A handle, let go of without the GIL.
template <class T>
class Handle {
  public:
    Handle(T value) : value_(std::move(value)) {}
    Handle(Handle&&) noexcept = default;
    Handle& operator=(Handle&& other) noexcept {
        std::swap(value_, other.value_);
        return *this;
    }
    ~Handle() {
        unlocked([&] { const T gone = std::move(value_); });
    }
    const T& get() const { return value_; }

  private:
    T value_;
};

template <class T>
long users(const T& handle) {
    if constexpr (requires { handle.shared(); })
        return handle.shared().use_count();
    else
        return handle.use_count();
}
// What a call works on: if the object was closed meanwhile this is the last one that has the handle.
template <class T>
struct Borrowed : T {
    explicit Borrowed(const T& handle) : T(handle) {}
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() {
        if (users<T>(*this) == 1) unlocked([&] { const T gone = std::move(static_cast<T&>(*this)); });
    }
};

// A handle that can be closed.
template <class T>
class Closable {
  public:
    Closable(T value, const char* name) : value_(std::move(value)), name_(name) {}
    Closable(Closable&&) noexcept = default;
    ~Closable() { close(); }

    Borrowed<T> get() const {
        if (!value_) throw ta::Error(TA_E_CLOSED, std::string(name_) + " was closed");
        return Borrowed<T>(*value_);
    }
    void close() {
        if (!value_) return;
        auto value = std::exchange(value_, std::nullopt);
        unlocked([&] { value.reset(); });
    }

  private:
    std::optional<T> value_;
    const char* name_;
};
