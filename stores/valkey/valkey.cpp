// The functions of the store, over one connection.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "connection.h"
#include "turboattention_valkey.h"

namespace ta::valkey {
namespace {

constexpr uint64_t kMostValue = uint64_t{512} << 20;  // that servers take
constexpr uint64_t kSmallAnswer = 1024;               // the most that one without a value has, text of an error included

// A write to a connection that the server has closed raises SIGPIPE, which this thread does not want.
class NoPipeSignal {
  public:
    NoPipeSignal() {
        sigemptyset(&pipe_);
        sigaddset(&pipe_, SIGPIPE);
        sigset_t pending;
        sigpending(&pending);
        was_pending_ = sigismember(&pending, SIGPIPE) == 1;
        pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
    }
    ~NoPipeSignal() {
        const timespec now{0, 0};
        while (!was_pending_ && sigtimedwait(&pipe_, nullptr, &now) == -1 && errno == EINTR) {
        }
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }
    NoPipeSignal(const NoPipeSignal&) = delete;
    NoPipeSignal& operator=(const NoPipeSignal&) = delete;

  private:
    sigset_t pipe_, before_;
    bool was_pending_;
};

#define TRY(expression)                                      \
    do {                                                     \
        if (const int e_ = (expression); e_ != 0) return e_; \
    } while (false)

class Store {
  public:
    explicit Store(Settings&& settings) : settings_(std::move(settings)), connection_(settings_) {}

    using Items = std::span<ta_store_item>;
    int exists(Items items) {
        for (const ta_store_item& item : items) TRY(connection_.send({"EXISTS", key(item)}));
        return each(items, [](ta_store_item& item, const redisReply& r) { return is(r, item, r.integer > 0); });
    }
    // No more of a value than there is room for, and one byte that says that there is more. Empty is also what is absent.
    int get(Items items) {
        for (const ta_store_item& item : items) {
            TRY(connection_.send({"EXISTS", key(item)}));
            TRY(connection_.send({"GETRANGE", key(item), "0", std::to_string(item.bytes)}));
        }
        for (ta_store_item& item : items) {
            Reply there, value;
            TRY(connection_.receive(there));
            TRY(connection_.receive(value));
            if (there->type != REDIS_REPLY_INTEGER || value->type != REDIS_REPLY_STRING) return -EPROTO;
            if (there->integer == 0) continue;
            if (value->len <= item.bytes) std::memcpy(item.data, value->str, value->len);
            item.bytes = value->len;
            item.result = TA_STORE_DONE;
        }
        return 0;
    }
    int put(Items items) {
        const std::string expiry = std::to_string(settings_.expiry_seconds);
        for (const ta_store_item& item : items) {
            if (item.bytes > kMostValue) continue;
            const std::string_view value(static_cast<const char*>(item.data), item.bytes);
            if (settings_.expiry_seconds > 0) {
                TRY(connection_.send({"SET", key(item), value, "EX", expiry}));
            } else {
                TRY(connection_.send({"SET", key(item), value}));
            }
        }
        uint64_t failures = 0;
        for (ta_store_item& item : items) {
            Reply reply;
            if (item.bytes <= kMostValue) TRY(connection_.receive(reply));
            item.result = reply && reply->type == REDIS_REPLY_STATUS ? TA_STORE_DONE : TA_STORE_FAILED;
            failures += item.result == TA_STORE_FAILED;
        }
        return failures == items.size() ? -EPROTO : 0;  // out of memory, a replica that takes no writes
    }
    int remove(Items items) {
        for (const ta_store_item& item : items) TRY(connection_.send({"UNLINK", key(item)}));
        return each(items, [](ta_store_item& item, const redisReply& r) { return is(r, item, r.integer > 0); });
    }

    int call(int (Store::*function)(Items), ta_store_item* items, uint64_t n, int64_t nanoseconds) noexcept {
        const NoPipeSignal no_signal;
        int result = -ENOMEM;
        try {
            const Items all(items, n);
            uint64_t most = 0;
            for (const ta_store_item& item : all) most += 2 * kSmallAnswer + (function == &Store::get ? item.bytes : 0);
            result = connection_.start(Clock::now() + std::chrono::nanoseconds(nanoseconds), most);
            if (result == 0) result = (this->*function)(all);
        } catch (const std::bad_alloc&) {
        }
        // Answers that were not taken would be those of the next call.
        if (result != 0) connection_.close();
        return result;
    }

  private:
    // Of the last key that was asked for.
    std::string_view key(const ta_store_item& item) {
        key_.assign(settings_.key_prefix).append(reinterpret_cast<const char*>(item.key), 32);
        return key_;
    }
    static int is(const redisReply& r, ta_store_item& item, bool done) {
        if (r.type != REDIS_REPLY_INTEGER) return -EPROTO;
        item.result = done ? TA_STORE_DONE : TA_STORE_ABSENT;
        return 0;
    }
    template <class Take>
    int each(Items items, Take&& take) {
        for (ta_store_item& item : items) {
            Reply reply;
            TRY(connection_.receive(reply));
            TRY(take(item, *reply));
        }
        return 0;
    }

    const Settings settings_;
    Connection connection_;
    std::string key_;
};

#undef TRY

template <int (Store::*kFunction)(Store::Items)>
int32_t call(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) {
    return static_cast<Store*>(user)->call(kFunction, items, n, nanoseconds);
}

__attribute__((format(printf, 4, 5))) ta_status report(ta_error* err, ta_status code, int argument, const char* format, ...) {
    if (!err) return code;
    *err = ta_error{};
    err->code = code;
    err->layer = err->head = err->tier = err->rank = -1;
    err->sequence = err->block = err->token = err->bytes = -1;
    err->argument = argument;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(err->message, sizeof err->message, format, arguments);
    va_end(arguments);
    return code;
}

bool is_aligned(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % alignof(void*) == 0;
}

// What is wrong with the options; nullptr: nothing.
const char* read_options(const ta_valkey_options& o, Settings& s) {
    constexpr int32_t kDay = 86400000;
    if (o.port > 65535) return "options.port is above 65535";
    if (o.connect_ms < 0 || o.connect_ms > kDay) return "options.connect_ms is not 0 to 86,400,000";
    if (o.command_ms < 0 || o.command_ms > kDay) return "options.command_ms is not 0 to 86,400,000";
    if (o.socket_path && (o.host || o.port != 0)) return "options.socket_path goes without host and port";
    if (o.user && !o.password) return "options.user goes with a password";
    if (o.host) s.host = o.host;
    if (o.socket_path) s.socket_path = o.socket_path;
    if (o.user) s.user = o.user;
    if (o.password) s.password = o.password;
    if (o.key_prefix) s.key_prefix = o.key_prefix;
    s.has_password = o.password != nullptr;
    if (o.port > 0) s.port = int(o.port);
    s.database = o.database;
    s.expiry_seconds = o.expiry_seconds;
    if (o.connect_ms > 0) s.connect = std::chrono::milliseconds(o.connect_ms);
    s.command = std::chrono::milliseconds(o.command_ms);
    return nullptr;
}

// The struct as this library knows it; false: its size is that of no header's, or it has fields that this one does not know.
bool read_struct(const ta_valkey_options* given, ta_valkey_options& known) {
    const uint32_t size = given->struct_size;
    if (size < 8 || size > 1 << 16 || (size < sizeof known && size % alignof(ta_valkey_options) != 0)) return false;
    std::memcpy(&known, given, std::min<size_t>(size, sizeof known));
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    return size <= sizeof known || std::all_of(bytes + sizeof known, bytes + size, [](unsigned char b) { return b == 0; });
}

}  // namespace
}  // namespace ta::valkey

extern "C" ta_status ta_valkey_store_open(const ta_valkey_options* options, ta_block_store* out, ta_error* err) {
    using namespace ta::valkey;
    if (reinterpret_cast<uintptr_t>(err) % alignof(ta_error) != 0) return TA_E_ALIGNMENT;
    if (!options) return report(err, TA_E_INVALID, 0, "options is null");
    if (!out) return report(err, TA_E_INVALID, 1, "out is null");
    if (!is_aligned(options)) return report(err, TA_E_ALIGNMENT, 0, "options is not aligned");
    if (!is_aligned(out)) return report(err, TA_E_ALIGNMENT, 1, "out is not aligned");
    if (out->struct_size != sizeof *out)
        return report(err, TA_E_STRUCT, 1, "out.struct_size is %u; set it to sizeof, which is %zu here", out->struct_size,
                      sizeof *out);
    ta_valkey_options known{};
    if (!read_struct(options, known))
        return report(err, TA_E_STRUCT, 0, "options.struct_size is %u, or it has a field that is not known",
                      options->struct_size);
    try {
        Settings settings;
        if (const char* wrong = read_options(known, settings)) return report(err, TA_E_INVALID, 0, "%s", wrong);
        auto store = std::make_unique<Store>(std::move(settings));
        ta_block_store set{};
        set.struct_size = sizeof set;
        set.exists = call<&Store::exists>;
        set.get = call<&Store::get>;
        set.put = call<&Store::put>;
        set.remove = call<&Store::remove>;
        set.user = store.release();
        set.release = [](void* user) { delete static_cast<Store*>(user); };
        *out = set;
    } catch (const std::bad_alloc&) {
        return report(err, TA_E_MEMORY, -1, "no memory for a store");
    }
    return report(err, TA_OK, -1, "%s", "");
}
