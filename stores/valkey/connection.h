// A connection to a server whose every wait has a deadline. hiredis makes and reads messages; this moves the bytes.
#pragma once

#include <hiredis/hiredis.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ta::valkey {

using Clock = std::chrono::steady_clock;

struct Settings {
    std::string host = "127.0.0.1", socket_path, user, password, key_prefix = "ta:";
    bool has_password = false;
    int port = 6379;
    uint32_t database = 0, expiry_seconds = 0;
    std::chrono::milliseconds connect{1000}, command{0};
};

struct FreeReply {
    void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;
using Arguments = std::vector<std::string_view>;

// One thread at a time. Functions return 0 or -errno; after a failure the connection is closed and the next start() makes another.
class Connection {
  public:
    explicit Connection(const Settings& settings) : settings_(settings) {}

    // For commands until `deadline`, whose answers have up to `most` bytes in all.
    int start(Clock::time_point deadline, uint64_t most);
    // Sends a command behind those before it.
    int send(const Arguments& command);
    // The next answer.
    int receive(Reply& reply);
    void close() { context_.reset(); }

  private:
    struct FreeContext {
        void operator()(redisContext* context) const { redisFree(context); }
    };
    int connect();
    int log_in();
    int ask(const Arguments& command);
    int wait(short events);
    int failed(int error) { return close(), error; }

    const Settings& settings_;
    std::unique_ptr<redisContext, FreeContext> context_;
    Clock::time_point deadline_{};
    uint64_t left_ = 0;  // bytes that may still come
};

}  // namespace ta::valkey
