#include "src/api/api.h"

namespace ta::api {

ta_status report(const Status& status, ta_error* err) noexcept {
    if (!err) return status.code();
    *err = status.detail() ? *status.detail() : plain_error(status.code());
    if (!status.ok() && !status.detail()) std::strcpy(err->message, "no memory for a text that says more than the status");
    return status.code();
}

Result<TensorView> read_tensor(const ta_tensor* tensor, const char* name, int argument) {
    TA_RETURN_IF_ERROR(check_pointer(tensor, name, argument));
    Result<ta_tensor> known = read_struct(tensor, name, argument);
    if (!known.ok()) return std::move(known).status();
    Result<TensorView> view = view_tensor(known.value(), name);
    if (!view.ok()) return std::move(view).status().argument(argument);
    return view;
}

Result<const ta_attend_options*> read_attend_options(const ta_attend_options* given, const char* name, int argument,
                                                     ta_attend_options* storage) {
    if (!given) return static_cast<const ta_attend_options*>(nullptr);
    Result<ta_attend_options> known = read_struct(given, name, argument);
    if (!known.ok()) return std::move(known).status();
    TA_RETURN_IF_ERROR(check_aligned(known.value().alibi_slopes, "alibi_slopes", argument, name));
    TA_RETURN_IF_ERROR(check_aligned(known.value().sinks, "sinks", argument, name));
    *storage = known.value();
    return static_cast<const ta_attend_options*>(storage);
}

}  // namespace ta::api
