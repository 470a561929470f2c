// The store in a server: prefixes that two processes share, and a server that dies, stalls, forgets and refuses. Each test has a
// server of its own on a Unix socket in a folder of its own.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "abi/prefix_steps.h"
#include "support/files.h"
#include "support/memory_store.h"
#include "turboattention_valkey.h"

namespace ta::testing {
namespace {

using namespace std::chrono_literals;

// What is on PATH; empty: nothing.
std::string find_server() {
    for (const char* name : {"valkey-server", "redis-server"}) {
        for (const char* folder : {"/usr/bin/", "/usr/local/bin/", "/usr/sbin/"}) {
            if (access((std::string(folder) + name).c_str(), X_OK) == 0) return std::string(folder) + name;
        }
    }
    return "";
}

class Valkey : public PrefixSteps {
  protected:
    static constexpr uint64_t kText = 7;
    static constexpr size_t kBlocks = 5;

    void SetUp() override {
        if (find_server().empty()) GTEST_SKIP() << "neither valkey-server nor redis-server is installed";
        start();
    }
    void TearDown() override { stop(SIGKILL); }

    void start(const std::vector<std::string>& more = {}) {
        std::vector<std::string> words = {
            find_server(),     "--port", "0",     "--unixsocket", socket,        "--save", "",
            "--appendonly",    "no",     "--dir", folder.path(),  "--daemonize", "no",     "--logfile",
            folder.file("log")};
        words.insert(words.end(), more.begin(), more.end());
        std::vector<char*> arguments;
        for (std::string& w : words) arguments.push_back(w.data());
        arguments.push_back(nullptr);
        server = fork();
        if (server == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            execv(arguments[0], arguments.data());
            _exit(127);
        }
        ASSERT_TRUE(soon([&] { return access(socket.c_str(), W_OK) == 0; })) << "the server does not start";
    }
    void stop(int signal) {
        if (server <= 0) return;
        kill(server, SIGCONT);
        kill(server, signal);
        waitpid(server, nullptr, 0);
        server = -1;
        unlink(socket.c_str());
    }
    ta_block_store store(const char* password = nullptr) const {
        auto o = sized<ta_valkey_options>();
        o.socket_path = socket.c_str();
        o.password = password;
        auto s = sized<ta_block_store>();
        ta_error err;
        require(ta_valkey_store_open(&o, &s, &err), err);
        return s;
    }
    // Calls the store's functions with one item.
    static int32_t ask(const ta_store_fn function, const ta_block_store& s, ta_store_item& item,
                       std::chrono::nanoseconds left = 5s) {
        return function(s.user, &item, 1, left.count());
    }

    struct Publisher {
        KvPool pool;
        ta_namespace space;
    };
    Publisher make_publisher(int32_t timeout_ms = 5000) {
        Publisher p{make_pool(context, options()), 0};
        p.space = make_namespace(p.pool, 1);
        const ta_seq seq = write(p.pool, kBlocks * 64, kText);
        publish(p.pool, seq, p.space, kText, kBlocks);
        release(p.pool, seq);
        attach_store(p.pool, p.space, store(), timeout_ms);
        return p;
    }
    // How many blocks come into a fresh pool; each is the right one.
    uint64_t come(int32_t timeout_ms = 5000) {
        const Context elsewhere = make_context(1);
        const KvPool pool = make_pool(elsewhere, options());
        const ta_namespace space = make_namespace(pool, 1);
        attach_store(pool, space, store(), timeout_ms, TA_DEFAULT, TA_OFF);
        const ta_move_info info = load_from_store(pool, space, keys(kText, kBlocks));
        EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
        const auto [seq, n] = match(pool, space, kText, kBlocks);
        EXPECT_EQ(n, int64_t(info.moved) * 64);
        verify(pool, seq);
        const KvPool reference = make_pool(elsewhere, options());
        const ta_seq text = write(reference, kBlocks * 64, kText);
        EXPECT_TRUE(same_values(pool, seq, reference, text, n));
        if (n == int64_t(kBlocks) * 64) {
            EXPECT_EQ(grow(pool, seq, 20, kText), grow(reference, text, 20, kText));
        }
        return info.moved;
    }

    const Folder folder;
    const std::string socket = folder.file("s");
    pid_t server = -1;
};

TEST_F(Valkey, ItsFunctions) {
    const ta_block_store s = store();
    const uint8_t key[32] = {1, 0, 13, 10, 255};
    std::vector<uint8_t> value(3 << 20), room(value.size() + 5);
    Random random(1);
    for (auto& b : value) b = uint8_t(random.bits());
    ta_store_item item{key, nullptr, 0, TA_STORE_ABSENT, 0};
    EXPECT_EQ(ask(s.exists, s, item), 0);
    EXPECT_EQ(item.result, TA_STORE_ABSENT);
    item = {key, room.data(), room.size(), TA_STORE_ABSENT, 0};
    EXPECT_EQ(ask(s.get, s, item), 0);
    EXPECT_EQ(item.result, TA_STORE_ABSENT);
    item = {key, value.data(), value.size(), TA_STORE_ABSENT, 0};
    EXPECT_EQ(ask(s.put, s, item), 0);
    EXPECT_EQ(item.result, TA_STORE_DONE);
    item = {key, nullptr, 0, TA_STORE_ABSENT, 0};
    EXPECT_EQ(ask(s.exists, s, item), 0);
    EXPECT_EQ(item.result, TA_STORE_DONE);
    for (const size_t bytes : {value.size(), room.size(), value.size() - 1, size_t{1}, size_t{0}}) {
        std::fill(room.begin(), room.end(), uint8_t(0));
        item = {key, room.data(), bytes, TA_STORE_ABSENT, 0};
        ASSERT_EQ(ask(s.get, s, item), 0);
        EXPECT_EQ(item.result, TA_STORE_DONE);
        if (bytes >= value.size()) {
            EXPECT_EQ(item.bytes, value.size());
            EXPECT_TRUE(std::equal(value.begin(), value.end(), room.begin()));
        } else {
            EXPECT_GT(item.bytes, bytes) << "it does not say that there is more";
            EXPECT_EQ(room[0], 0) << "a part of a value was written";
        }
    }
    item = {key, value.data(), (uint64_t{512} << 20) + 1, TA_STORE_ABSENT, 0};  // which is not read
    EXPECT_NE(ask(s.put, s, item), 0);
    EXPECT_EQ(item.result, TA_STORE_FAILED);
    for (const ta_store_result then : {TA_STORE_DONE, TA_STORE_ABSENT}) {
        item = {key, nullptr, 0, TA_STORE_FAILED, 0};
        EXPECT_EQ(ask(s.remove, s, item), 0);
        EXPECT_EQ(item.result, then);
    }
    s.release(s.user);
}

TEST_F(Valkey, TwoProcessesShareAPrefix) {
    const pid_t child = fork();
    if (child == 0) {  // publishes, and is no more
        const Context own = make_context(1);
        const KvPool pool = make_pool(own, options());
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, kBlocks * 64, kText);
        publish(pool, seq, space, kText, kBlocks);
        attach_store(pool, space, store());
        const bool good = flush_store(pool, space) == 0 && !HasFailure();
        _exit(good ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    ASSERT_EQ(status, 0);
    EXPECT_EQ(come(), kBlocks);
}

TEST_F(Valkey, AServerThatDiesIsBackAndIsFilledAgain) {
    const Publisher p = make_publisher();
    EXPECT_EQ(flush_store(p.pool, p.space), 0u);
    stop(SIGKILL);
    EXPECT_EQ(flush_store(p.pool, p.space), kBlocks);
    EXPECT_EQ(come(), 0u);
    start();
    EXPECT_TRUE(soon([&] { return store_stats(p.pool, p.space).puts == 2 * kBlocks; })) << store_stats(p.pool, p.space).failure;
    EXPECT_EQ(come(), kBlocks);
}

TEST_F(Valkey, AServerThatIsEmptiedIsFilledByAFlush) {
    const Publisher p = make_publisher();
    EXPECT_EQ(flush_store(p.pool, p.space), 0u);
    stop(SIGTERM);
    start();  // it keeps nothing
    EXPECT_EQ(come(), 0u);
    EXPECT_TRUE(soon([&] { return flush_store(p.pool, p.space) == 0; }));
    EXPECT_EQ(come(), kBlocks);
}

TEST_F(Valkey, AServerThatStallsHoldsUpNobody) {
    const Publisher p = make_publisher(100);
    EXPECT_EQ(flush_store(p.pool, p.space), 0u);
    kill(server, SIGSTOP);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(come(100), 0u);
    EXPECT_EQ(flush_store(p.pool, p.space), kBlocks);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    kill(server, SIGCONT);
    EXPECT_TRUE(soon([&] { return flush_store(p.pool, p.space) == 0; })) << store_stats(p.pool, p.space).failure;
    EXPECT_EQ(come(), kBlocks);
    // By itself it gives up in time, too.
    kill(server, SIGSTOP);
    const ta_block_store s = store();
    const uint8_t key[32] = {};
    ta_store_item item{key, nullptr, 0, TA_STORE_ABSENT, 0};
    const auto before = std::chrono::steady_clock::now();
    EXPECT_EQ(ask(s.exists, s, item, 50ms), -ETIMEDOUT);
    EXPECT_LT(std::chrono::steady_clock::now() - before, 1s);
    kill(server, SIGCONT);
    EXPECT_EQ(ask(s.exists, s, item), 0);
    s.release(s.user);
}

TEST_F(Valkey, AServerThatRefuses) {
    stop(SIGKILL);
    start({"--requirepass", "secret", "--maxmemory", "1mb"});
    const uint8_t key[32] = {};
    std::vector<uint8_t> value(2 << 20);
    ta_store_item item{key, nullptr, 0, TA_STORE_ABSENT, 0};
    const ta_block_store none = store(), wrong = store("wrong"), right = store("secret");
    EXPECT_EQ(ask(none.exists, none, item), -EPROTO);
    EXPECT_EQ(ask(wrong.exists, wrong, item), -EACCES);
    EXPECT_EQ(ask(right.exists, right, item), 0);
    for (int i = 0; i < 2; ++i) {  // it is full then, if it was not before
        item = {key, value.data(), value.size(), TA_STORE_ABSENT, 0};
        if (ask(right.put, right, item) != 0) break;
    }
    EXPECT_EQ(item.result, TA_STORE_FAILED);
    item = {key, nullptr, 0, TA_STORE_ABSENT, 0};
    EXPECT_EQ(ask(right.exists, right, item), 0) << "a refused value leaves the connection unusable";
    for (const ta_block_store& s : {none, wrong, right}) s.release(s.user);
}

TEST(ValkeyArguments, Refused) {
    auto s = sized<ta_block_store>();
    const auto open = [&](auto field, auto value) {
        auto o = sized<ta_valkey_options>();
        o.*field = value;
        ta_error err;
        const ta_status status = ta_valkey_store_open(&o, &s, &err);
        EXPECT_EQ(err.code, status);
        EXPECT_EQ(err.argument, 0);
        return status;
    };
    EXPECT_EQ(open(&ta_valkey_options::port, 65536u), TA_E_INVALID);
    EXPECT_EQ(open(&ta_valkey_options::connect_ms, -1), TA_E_INVALID);
    EXPECT_EQ(open(&ta_valkey_options::command_ms, 86400001), TA_E_INVALID);
    EXPECT_EQ(open(&ta_valkey_options::user, "somebody"), TA_E_INVALID);
    EXPECT_EQ(open(&ta_valkey_options::struct_size, 5u), TA_E_STRUCT);
    auto o = sized<ta_valkey_options>();
    EXPECT_EQ(ta_valkey_store_open(nullptr, &s, nullptr), TA_E_INVALID);
    EXPECT_EQ(ta_valkey_store_open(&o, nullptr, nullptr), TA_E_INVALID);
    EXPECT_EQ(s.get, nullptr);
    o.socket_path = "/nowhere/at/all";
    ta_error err;
    require(ta_valkey_store_open(&o, &s, &err), err);
    const uint8_t key[32] = {};
    ta_store_item item{key, nullptr, 0, TA_STORE_ABSENT, 0};
    EXPECT_EQ(s.exists(s.user, &item, 1, 1000000000), -ENOENT);
    s.release(s.user);
}

}  // namespace
}  // namespace ta::testing
