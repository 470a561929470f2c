// How errors travel inside the library. Only src/api turns them into ta_status + ta_error.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "include/turboattention.h"

namespace ta {

// A code without text and place.
ta_error plain_error(ta_status code);

// OK, or a status with its text and place. Moving an OK status is cheap. Details are allocated with operator new. If that
// fails, one of kSpareDetails static ones is used, so that a failure for lack of memory still says what was asked for.
class [[nodiscard]] Status {
  public:
    static constexpr int kSpareDetails = 64;

    Status() = default;

    ta_status code() const { return code_; }
    bool ok() const { return code_ == TA_OK; }
    // The details. nullptr: the status is OK, or there was no memory and all spare details are in use.
    const ta_error* detail() const { return detail_.get(); }
    // A copy, for a failure that is reported more than once.
    Status clone() const;

    // Appends a cause to the text.
    Status&& because(const char* cause) &&;
    Status&& layer(int64_t v) && { return set(&ta_error::layer, int32_t(v)); }
    Status&& head(int64_t v) && { return set(&ta_error::head, int32_t(v)); }
    Status&& argument(int v) && { return set(&ta_error::argument, v); }
    Status&& sequence(int64_t v) && { return set(&ta_error::sequence, v); }
    Status&& block(int64_t v) && { return set(&ta_error::block, v); }
    Status&& token(int64_t v) && { return set(&ta_error::token, v); }
    Status&& tier(int32_t v) && { return set(&ta_error::tier, v); }
    Status&& rank(int32_t v) && { return set(&ta_error::rank, v); }
    Status&& bytes(uint64_t v) && { return set(&ta_error::bytes, int64_t(v < INT64_MAX ? v : INT64_MAX)); }

  private:
    friend Status fail(ta_status code, const char* format, ...) __attribute__((format(printf, 2, 3)));

    template <class T>
    Status&& set(T ta_error::*field, T value) {
        if (detail_) (*detail_).*field = value;
        return std::move(*this);
    }

    struct GiveBack {
        void operator()(ta_error* detail) const noexcept;
    };
    using Detail = std::unique_ptr<ta_error, GiveBack>;
    static Detail make_detail() noexcept;

    ta_status code_ = TA_OK;
    Detail detail_;
};

// Makes a failure with a printf-style text: one sentence that says what is wrong and what would be right.
Status fail(ta_status code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// A value or a failure.
template <class T>
class [[nodiscard]] Result {
  public:
    Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor): reads as a return value
    Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

    bool ok() const { return status_.ok(); }
    Status&& status() && { return std::move(status_); }
    T& value() { return *value_; }
    T&& take() { return std::move(*value_); }

  private:
    Status status_;
    std::optional<T> value_;
};

}  // namespace ta

// Returns from the enclosing function when the expression fails.
#define TA_RETURN_IF_ERROR(expression)                                                   \
    do {                                                                                 \
        if (::ta::Status ta_status_ = (expression); !ta_status_.ok()) return ta_status_; \
    } while (false)
