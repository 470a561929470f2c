#include "src/core/status.h"

#include <atomic>
#include <bit>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>

#include "src/core/text.h"

namespace ta {
namespace {

// Spare details belong to the process and not to a context: a failure may have no context, or outlive it. Bit i of g_used is
// set while a Status uses g_spare[i].
static_assert(Status::kSpareDetails == 64, "a bit of g_used for each");
constinit ta_error g_spare[Status::kSpareDetails]{};
constinit std::atomic<uint64_t> g_used{0};

ta_error* take_spare() noexcept {
    uint64_t used = g_used.load(std::memory_order_relaxed);
    int i = 0;
    do {
        i = std::countr_one(used);
        if (i == Status::kSpareDetails) return nullptr;
    } while (
        !g_used.compare_exchange_weak(used, used | uint64_t{1} << i, std::memory_order_acquire, std::memory_order_relaxed));
    return &g_spare[i];
}

bool is_spare(const ta_error* detail) {
    return !std::less<>()(detail, g_spare) && std::less<>()(detail, g_spare + Status::kSpareDetails);
}

}  // namespace

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
    status.detail_ = Status::make_detail();
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

Status::Detail Status::make_detail() noexcept {
    if (auto* detail = new (std::nothrow) ta_error) return Detail(detail);
    return Detail(take_spare());
}

void Status::GiveBack::operator()(ta_error* detail) const noexcept {
    if (is_spare(detail)) {
        g_used.fetch_and(~(uint64_t{1} << (detail - g_spare)), std::memory_order_release);
    } else {
        delete detail;
    }
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
    if (detail_ && (copy.detail_ = make_detail())) *copy.detail_ = *detail_;
    return copy;
}

}  // namespace ta
