#include "src/core/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>

#include "src/core/text.h"

namespace ta {

ta_error plain_error(ta_status code) {
    ta_error e{};
    e.code = code;
    e.layer = e.head = e.argument = e.tier = e.rank = -1;
    e.sequence = e.block = e.token = e.bytes = -1;
    return e;
}

Status fail(ta_status code, const char* format, ...) {
    Status status;
    status.code_ = code;
    status.detail_.reset(new (std::nothrow) ta_error{});
    if (!status.detail_) return status;
    ta_error& e = *status.detail_;
    e = plain_error(code);
    va_list args;
    va_start(args, format);
    std::vsnprintf(e.message, sizeof e.message, format, args);
    va_end(args);
    make_plain(e.message);
    return status;
}

Status&& Status::because(const char* cause) && {
    if (detail_) {
        ta_error& e = *detail_;
        const size_t length = std::strlen(e.message);
        std::snprintf(e.message + length, sizeof e.message - length, "; %s", cause);
        make_plain(e.message);
    }
    return std::move(*this);
}

Status Status::clone() const {
    Status copy;
    copy.code_ = code_;
    if (detail_) copy.detail_.reset(new (std::nothrow) ta_error(*detail_));
    return copy;
}

}  // namespace ta
