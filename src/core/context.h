// A device with its kernels, memory and threads. Shared by the pools, plans and calibrators made from it.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "kernels/cpu/kernels.h"
#include "src/core/device.h"
#include "src/core/memory.h"
#include "src/core/status.h"
#include "src/core/thread_pool.h"

namespace ta {

class Context {
  public:
    struct Options {
        int threads = 0;  // 0: as many as this process may run on
        ta_cpu_isa isa = TA_CPU_ISA_AUTO;
        ta_allocator allocator{};
        ta_log_fn log = nullptr;
        void* log_user = nullptr;
        ta_log_level log_level = TA_LOG_WARNING;
        int gpu = -1;  // CUDA ordinal; -1: a CPU context
    };
    static Result<std::shared_ptr<Context>> create(const Options& options);

    const cpu::Kernels& kernels() const { return *kernels_; }
    Allocator& allocator() { return allocator_; }
    const Allocator& allocator() const { return allocator_; }
    ThreadPool& threads() { return threads_; }
    // Where pages and tensors lie; nullptr: in host memory.
    Device* device() const { return device_.get(); }
    int thread_count() const { return threads_.threads(); }

    // False in a child process of the one that made the context: threads and locks do not survive fork().
    bool owned_by_this_process() const;
    void log(ta_log_level level, const char* format, ...) const __attribute__((format(printf, 3, 4)));

  private:
    explicit Context(const Options& options);

    pid_t pid_;
    const cpu::Kernels* kernels_ = nullptr;
    Allocator allocator_;
    ta_log_fn log_;
    void* log_user_;
    ta_log_level log_level_;
    std::unique_ptr<Device> device_;
    ThreadPool threads_;
};

}  // namespace ta
