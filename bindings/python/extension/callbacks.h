// What the library calls back.
#pragma once

#include <memory_resource>

#include "arguments.h"

// From the interpreter's end on nothing calls back; waits for what does now.
void shut_door();

ta::Log to_log(nb::object callback);
// `callback` outlives what is made. It also stops the call when a signal handler raises (Ctrl-C).
ta::Progress to_progress(const nb::object& callback);
// Bytes of an export go to `to`. Likewise.
ta::Sink to_sink(std::vector<uint8_t>& to);

// A mapping of Python: its methods of a dict. One that is only read needs no `__setitem__` and no `pop`.
std::shared_ptr<ta::BlockStore> to_store(nb::object mapping, bool is_written);

// Memory by functions of C.
class Memory final : public std::pmr::memory_resource {
  public:
    explicit Memory(nb::handle options)
        : allocate_(to_integer<uintptr_t>(options.attr("allocate"), "allocate")),
          deallocate_(to_integer<uintptr_t>(options.attr("deallocate"), "deallocate")),
          user_(reinterpret_cast<void*>(to_integer<uintptr_t>(options.attr("user"), "user"))) {
        if (!allocate_ || !deallocate_) throw ta::Error(TA_E_INVALID, "an address of allocator is 0");
    }

  private:
    void* do_allocate(size_t bytes, size_t alignment) override {
        return reinterpret_cast<void* (*)(size_t, size_t, void*)>(allocate_)(bytes, alignment, user_);
    }
    void do_deallocate(void* memory, size_t bytes, size_t alignment) override {
        reinterpret_cast<void (*)(void*, size_t, size_t, void*)>(deallocate_)(memory, bytes, alignment, user_);
    }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

    uintptr_t allocate_, deallocate_;
    void* user_;
};
