// A set of callbacks that a caller passed to the library.
#pragma once

#include <utility>

namespace ta {

// Owns a caller's Set: a struct with user and release. Calls release(user) once, at the end.
template <class Set>
class CallbackSet {
  public:
    CallbackSet() = default;
    explicit CallbackSet(const Set& set) : set_(set) {}
    CallbackSet(CallbackSet&& other) noexcept : set_(std::exchange(other.set_, Set{})) {}
    CallbackSet& operator=(CallbackSet&& other) noexcept {
        std::swap(set_, other.set_);
        return *this;
    }
    ~CallbackSet() {
        if (set_.release) set_.release(set_.user);
    }

    const Set* operator->() const { return &set_; }
    const Set& operator*() const { return set_; }

  private:
    Set set_{};
};

}  // namespace ta
