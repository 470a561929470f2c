#include "src/core/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>

namespace ta {
namespace {

// Bytes of the UTF-8 character at `text`; 0: there is none, or not all of it.
size_t character_at(const unsigned char* text) {
    const unsigned char lead = text[0];
    const size_t n = lead < 0x80 ? 1 : lead >> 5 == 0x6 && lead > 0xc1 ? 2 : lead >> 4 == 0xe ? 3 : lead >> 3 == 0x1e ? 4 : 0;
    char32_t code = n == 1 ? lead : lead & (0x7f >> n);
    for (size_t i = 1; i < n; ++i) {
        if (text[i] >> 6 != 0x2) return 0;
        code = code << 6 | (text[i] & 0x3f);
    }
    const bool is_good =
        n < 3 || (n == 3 ? code >= 0x800 && (code < 0xd800 || code > 0xdfff) : code >= 0x10000 && code < 0x110000);
    return is_good ? n : 0;
}

// File names need not be UTF-8, and a text that is too long may end inside a character.
void make_utf8(char* text) {
    auto* p = reinterpret_cast<unsigned char*>(text);
    while (*p) {
        const size_t n = character_at(p);
        if (n == 0) *p = '?';
        p += n == 0 ? 1 : n;
    }
}

}  // namespace

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
    make_utf8(e.message);
    return status;
}

Status&& Status::because(const char* cause) && {
    if (detail_) {
        ta_error& e = *detail_;
        const size_t length = std::strlen(e.message);
        std::snprintf(e.message + length, sizeof e.message - length, "; %s", cause);
        make_utf8(e.message);
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
