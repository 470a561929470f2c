// A device with its kernels, memory and threads. The pools, plans and calibrators made from a context share it.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "kernels/cpu/kernels.h"
#include "src/core/callback_set.h"
#include "src/core/device.h"
#include "src/core/memory.h"
#include "src/core/process_mark.h"
#include "src/core/status.h"
#include "src/core/thread_pool.h"
#include "src/io/file_system.h"

namespace ta {

// The parts of the machine that a context uses. Tests pass their own to inject failures.
struct Seams {
    std::shared_ptr<FileSystem> files = system_files();
    std::unique_ptr<Device> device;                  // replaces the GPU that the options name
    const cpu::Kernels* kernels = nullptr;           // replaces the kernels that the options name
    std::chrono::milliseconds io_deadline{10000};    // of one operation of a disk tier
    std::chrono::milliseconds io_retry_after{1000};  // until a failed write is tried again
};

class Context {
  public:
    struct Options {
        int threads = 0;  // 0: as many as this process may run on
        ta_cpu_isa isa = TA_CPU_ISA_AUTO;
        CallbackSet<ta_allocator> allocator{};
        CallbackSet<ta_log_sink> log{};
        int gpu = -1;  // CUDA ordinal; -1: a CPU context
    };
    static Result<std::shared_ptr<Context>> create(Options options, Seams seams = {});

    const cpu::Kernels& kernels() const { return *kernels_; }
    Allocator& allocator() { return allocator_; }
    const Allocator& allocator() const { return allocator_; }
    ThreadPool& threads() { return threads_; }
    // The device whose memory holds pages and tensors; nullptr: host memory does.
    Device* device() const { return seams_.device.get(); }
    FileSystem& files() const { return *seams_.files; }
    const Seams& seams() const { return seams_; }
    int thread_count() const { return threads_.threads(); }

    // False in a forked child of the process that made the context: threads and locks do not survive fork().
    bool owned_by_this_process() const { return process_.is_here(); }
    void log(ta_log_level level, const char* format, ...) const __attribute__((format(printf, 3, 4)));

  private:
    Context(Options&& options, Seams&& seams);

    const ProcessMark process_ = ProcessMark::here();
    const cpu::Kernels* kernels_ = nullptr;
    Allocator allocator_;
    const CallbackSet<ta_log_sink> log_;
    Seams seams_;
    ThreadPool threads_;
};

}  // namespace ta
