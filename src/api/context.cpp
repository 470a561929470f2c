#include <cstdio>
#include <cstring>

#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

// Fills in `r`, which already has the callback sets.
Status resolve_options(const ta_context_options& o, Context::Options& r) {
    if (o.device != TA_DEVICE_CPU && o.device != TA_DEVICE_CUDA) {
        return fail(TA_E_INVALID, "options.device is %d; it takes a ta_device_kind", o.device);
    }
    if (o.device_ordinal < 0 || (o.device == TA_DEVICE_CPU && o.device_ordinal != 0)) {
        return fail(TA_E_INVALID, "options.device_ordinal is %d; a GPU takes 0 and up, a CPU 0", o.device_ordinal);
    }
    if (o.threads < 0 || o.threads > 1024)
        return fail(TA_E_INVALID, "options.threads is %d; it takes 1..1024, or 0", o.threads);
    if (o.cpu_isa < TA_CPU_ISA_AUTO || o.cpu_isa > TA_CPU_ISA_AMX) {
        return fail(TA_E_INVALID, "options.cpu_isa is %d; it takes a ta_cpu_isa", o.cpu_isa);
    }
    if (o.allocator && (!r.allocator->allocate || !r.allocator->deallocate))
        return fail(TA_E_INVALID, "options.allocator lacks allocate or deallocate");
    if (r.log->level < 0 || r.log->level > TA_LOG_DEBUG)
        return fail(TA_E_INVALID, "options.log.level is %d; it takes a ta_log_level", r.log->level);
    if (o.device == TA_DEVICE_CUDA) r.gpu = o.device_ordinal;
    r.threads = o.threads;
    r.isa = o.cpu_isa;
    return {};
}

}  // namespace

extern "C" {

ta_status ta_context_create(const ta_context_options* options, ta_context** out, ta_error* err) {
    return guard(err, [&]() -> Status {
        // Take the callback sets first: they must be released whatever else is wrong with the call.
        ta_context_options known{};
        Status read;
        if (options) read = read_known(options, "options", 0, known);
        Context::Options resolved;
        Status allocator = take_set(known.allocator, "options.allocator", 0, resolved.allocator);
        Status log = take_set(known.log, "options.log", 0, resolved.log);
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 1));
        TA_RETURN_IF_ERROR(std::move(read));
        TA_RETURN_IF_ERROR(std::move(allocator));
        TA_RETURN_IF_ERROR(std::move(log));
        if (Status s = resolve_options(known, resolved); !s.ok()) return std::move(s).argument(0);
        Result<std::shared_ptr<Context>> context = Context::create(std::move(resolved));
        if (!context.ok()) return std::move(context).status().argument(0);
        *out = new ta_context{context.take()};
        return {};
    });
}

void ta_context_destroy(ta_context* context) {
    destroy(context, [](const ta_context& c) -> const Context& { return *c.impl; });
}

ta_status ta_context_get_info(const ta_context* context, ta_context_info* info, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(context, "context", 0));
        TA_RETURN_IF_ERROR(check_pointer(info, "info", 1));
        const Context& c = *context->impl;
        TA_RETURN_IF_ERROR(check_process(c));
        const cpu::Kernels& best = *cpu::find_kernels(TA_CPU_ISA_AUTO);
        ta_context_info r{};
        const Device* device = c.device();
        r.device = device ? TA_DEVICE_CUDA : TA_DEVICE_CPU;
        r.threads = c.thread_count();
        r.cpu_isa = c.kernels().isa;
        r.cpu_isa_best = best.isa;
        r.bytes_in_use = c.allocator().bytes_in_use();
        r.bytes_peak = c.allocator().bytes_peak();
        if (device) {
            std::snprintf(r.device_name, sizeof r.device_name, "%s", device->name());
            r.device_ordinal = device->ordinal();
            r.compute_capability = device->compute_capability();
            r.device_bytes_in_use = device->bytes_in_use();
            r.device_bytes_peak = device->bytes_peak();
        } else {
            std::snprintf(r.device_name, sizeof r.device_name, "cpu (%s)", c.kernels().name);
        }
        if (!device && best.isa == TA_CPU_ISA_SCALAR) {
            std::snprintf(r.degraded, sizeof r.degraded,
                          "this CPU has neither AVX2 nor AVX-512 VNNI; scalar kernels are very slow");
        }
        return write_struct(r, info, "info", 1);
    });
}

ta_status ta_context_health(const ta_context* context, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(context, "context", 0));
        TA_RETURN_IF_ERROR(check_process(*context->impl));
        return context->impl->device() ? context->impl->device()->health() : Status();
    });
}

}  // extern "C"
