#include "src/core/status.h"

#include <cstdarg>
#include <cstdio>
#include <new>

namespace ta {

Status fail(ta_status code, const char* format, ...) {
    Status status;
    status.code_ = code;
    status.detail_.reset(new (std::nothrow) ta_error{});
    if (!status.detail_) return status;
    ta_error& e = *status.detail_;
    e.code = code;
    e.layer = e.head = e.argument = -1;
    e.sequence = e.block = e.token = -1;
    va_list args;
    va_start(args, format);
    std::vsnprintf(e.message, sizeof e.message, format, args);
    va_end(args);
    return status;
}

}  // namespace ta
