#include "src/core/context.h"

#include <sched.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <thread>

#include "src/core/text.h"

namespace ta {
namespace {

int available_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
    return int(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

Context::Context(Options&& options, Seams&& seams)
    : allocator_(std::move(options.allocator)), log_(std::move(options.log)), seams_(std::move(seams)) {}

Result<std::shared_ptr<Context>> Context::create(Options options, Seams seams) {
    std::shared_ptr<Context> context(new Context(std::move(options), std::move(seams)));
    context->kernels_ = context->seams_.kernels ? context->seams_.kernels : cpu::find_kernels(options.isa);
    if (!context->kernels_) {
        return fail(TA_E_UNSUPPORTED, "this CPU lacks the instruction set asked for; its best is %s",
                    cpu::find_kernels(TA_CPU_ISA_AUTO)->name);
    }
    if (options.gpu >= 0 && !context->device()) {
        Result<std::unique_ptr<Device>> device = open_cuda_device(options.gpu);
        if (!device.ok()) return std::move(device).status();
        context->seams_.device = device.take();
        context->log(TA_LOG_INFO, "context: GPU %d, %s", options.gpu, context->device()->name());
    }
    const int threads = options.threads > 0 ? options.threads : std::min(available_cpus(), 1024);
    TA_RETURN_IF_ERROR(context->threads_.start(threads));
    context->log(TA_LOG_INFO, "context: cpu %s, %d threads", context->kernels_->name, threads);
    return context;
}

void Context::log(ta_log_level level, const char* format, ...) const {
    const ta_log_level most = log_->level ? log_->level : TA_LOG_WARNING;
    if (!log_->log || level > most) return;
    char text[512];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    make_plain(text);
    log_->log(level, text, log_->user);
}

}  // namespace ta
