#include "connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace ta::valkey {
namespace {

constexpr uint64_t kAnswersOfLogIn = 4096;

}  // namespace

// Until the socket is ready. A server that says nothing for the time of a command fails, too.
int Connection::wait(short events) {
    Clock::time_point until = deadline_;
    if (settings_.command.count() > 0) until = std::min(until, Clock::now() + settings_.command);
    for (;;) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        if (left <= 0) return -ETIMEDOUT;
        pollfd fd{context_->fd, events, 0};
        const int n = poll(&fd, 1, int(std::min<int64_t>(left, 1 << 30)));
        if (n > 0) return 0;
        if (n < 0 && errno != EINTR) return -errno;
    }
}

int Connection::connect() {
    const bool local = !settings_.socket_path.empty();
    context_.reset(local ? redisConnectUnixNonBlock(settings_.socket_path.c_str())
                         : redisConnectNonBlock(settings_.host.c_str(), settings_.port));
    if (!context_) return -ENOMEM;
    if (context_->err != 0) return failed(context_->err == REDIS_ERR_IO && errno != 0 ? -errno : -EHOSTUNREACH);
    const Clock::time_point deadline = deadline_;
    deadline_ = std::min(deadline_, Clock::now() + settings_.connect);
    const int waited = wait(POLLOUT);
    deadline_ = deadline;
    if (waited != 0) return failed(waited);
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(context_->fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) return failed(-error);
    const int on = 1;
    if (!local) (void)setsockopt(context_->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    context_->flags |= REDIS_CONNECTED;
    return 0;
}

int Connection::ask(const Arguments& command) {
    Reply reply;
    if (const int e = send(command); e != 0) return e;
    if (const int e = receive(reply); e != 0) return e;
    return reply->type == REDIS_REPLY_ERROR ? failed(-EACCES) : 0;
}

int Connection::log_in() {
    left_ = kAnswersOfLogIn;
    if (settings_.has_password) {
        const int e =
            settings_.user.empty() ? ask({"AUTH", settings_.password}) : ask({"AUTH", settings_.user, settings_.password});
        if (e != 0) return e;
    }
    return settings_.database == 0 ? 0 : ask({"SELECT", std::to_string(settings_.database)});
}

int Connection::start(Clock::time_point deadline, uint64_t most) {
    deadline_ = deadline;
    if (context_) {
        // Nothing was asked for: what can be read is the end of the connection, or an answer to nobody.
        pollfd fd{context_->fd, POLLIN, 0};
        if (poll(&fd, 1, 0) != 0) close();
    }
    if (!context_) {
        if (const int e = connect(); e != 0) return e;
        if (const int e = log_in(); e != 0) return e;
    }
    left_ = most;
    return 0;
}

int Connection::send(const Arguments& command) {
    if (!context_) return -ENOTCONN;
    std::vector<const char*> arguments;
    std::vector<size_t> sizes;
    for (const std::string_view a : command) {
        arguments.push_back(a.data());
        sizes.push_back(a.size());
    }
    if (redisAppendCommandArgv(context_.get(), int(arguments.size()), arguments.data(), sizes.data()) != REDIS_OK)
        return failed(-ENOMEM);
    for (int done = 0;;) {
        if (redisBufferWrite(context_.get(), &done) != REDIS_OK) return failed(-EPIPE);
        if (done) return 0;
        if (const int e = wait(POLLOUT); e != 0) return failed(e);
    }
}

int Connection::receive(Reply& reply) {
    if (!context_) return -ENOTCONN;
    for (;;) {
        void* answer = nullptr;
        if (redisGetReplyFromReader(context_.get(), &answer) != REDIS_OK) return failed(-EPROTO);
        if (answer) {
            reply.reset(static_cast<redisReply*>(answer));
            return 0;
        }
        if (const int e = wait(POLLIN); e != 0) return failed(e);
        int readable = 0;
        if (ioctl(context_->fd, FIONREAD, &readable) != 0) return failed(-errno);
        constexpr int kAtOnce = 16 * 1024;  // that hiredis reads
        const auto more = uint64_t(std::clamp(readable, 0, kAtOnce));
        if (more > left_) return failed(-EMSGSIZE);
        left_ -= more;
        if (redisBufferRead(context_.get()) != REDIS_OK) return failed(-ECONNRESET);
    }
}

}  // namespace ta::valkey
