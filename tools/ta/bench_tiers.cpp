#include "tools/ta/bench_tiers.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <random>
#include <span>
#include <stop_token>
#include <thread>

namespace ta::tools {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double quantile(std::vector<double> x, double q) {
    std::sort(x.begin(), x.end());
    return x[std::min(x.size() - 1, size_t(q * double(x.size())))];
}

struct Geometry {
    uint32_t layers, kv_heads, head_dim = 128, bits = 4;
    uint32_t group = 4;
};

struct Route {
    const char* name;
    ta_x_move_route value;
};
constexpr Route kRoutes[] = {
    {"auto", TA_X_MOVE_ROUTE_AUTO}, {"copy engine", TA_X_MOVE_ROUTE_COPY_ENGINE}, {"kernel", TA_X_MOVE_ROUTE_KERNEL}};

// A CPU has one way to copy only.
std::span<const Route> routes_of(const Machine& machine) {
    return machine.kind() == TA_DEVICE_CUDA ? std::span(kRoutes) : std::span(kRoutes).first(1);
}

struct TierBytes {
    uint64_t device, host, disk;
};

// A pool with tiers, and sequences in it.
class Cache {
  public:
    Cache(Machine& machine, const BenchTiersOptions& options, const Geometry& g, const TierBytes& bytes,
          ta_x_move_route route = TA_X_MOVE_ROUTE_AUTO, ta_staging staging = TA_STAGING_AUTO, bool falling = false)
        : machine_(machine), g_(g), k_(machine, kChunk, g.kv_heads, g.head_dim), v_(machine, kChunk, g.kv_heads, g.head_dim) {
        auto co = sized<ta_context_options>();
        co.device = machine.kind();
        TA_CHECK(ta_context_create(&co, &context_, &error));
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = bytes.host;
        tiers.disk_bytes = bytes.disk;
        tiers.host_node = options.host_node;
        tiers.disk_folder = options.disk_folder.empty() ? nullptr : options.disk_folder.c_str();
        tiers.high_percent = tiers.low_percent = 100;  // nothing moves on its own
        auto tuning = sized<ta_x_tier_tuning>();
        tuning.route = route;
        tiers.tuning = &tuning;
        tiers.staging = staging;
        if (falling) tiers.falling_precision = TA_ON;
        auto po = sized<ta_kv_pool_options>();
        po.layers = g.layers;
        po.kv_heads = g.kv_heads;
        po.head_dim = g.head_dim;
        po.bits = g.bits;
        po.budget_bytes = bytes.device;
        po.tiers = &tiers;
        TA_CHECK(ta_kv_pool_create(context_, &po, &pool_, &error));
        TA_CHECK(ta_plan_create(pool_, nullptr, &plan_, &error));
        if (machine.kind() == TA_DEVICE_CUDA) TA_CHECK(ta_plan_set_stream(plan_, machine.stream(), &error));
    }
    ~Cache() {
        ta_plan_destroy(plan_);
        ta_kv_pool_destroy(pool_);
        ta_context_destroy(context_);
    }
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    // A sequence of `blocks` full blocks behind its first one, which is a sink and is never moved.
    ta_seq add(uint64_t blocks) {
        ta_seq seq = 0;
        TA_CHECK(ta_seq_create(pool_, &seq, &error));
        for (uint64_t left = (blocks + 1) * 64; left > 0;) {
            const auto n = int32_t(std::min<uint64_t>(left, kChunk)), none = 0;
            const ta_tensor k = k_.first(n), v = v_.first(n);
            TA_CHECK(ta_plan_begin(plan_, 1, &seq, &n, &none, nullptr, &error));
            for (uint32_t layer = 0; layer < g_.layers; ++layer) TA_CHECK(ta_append(plan_, layer, &k, &v, &error));
            TA_CHECK(ta_plan_end(plan_, nullptr, &error));
            left -= uint64_t(n);
        }
        machine_.wait();
        return seq;
    }
    ta_ticket start_move(ta_seq seq, uint64_t first, uint64_t n, ta_tier tier) {
        ta_ticket ticket = 0;
        TA_CHECK(ta_seq_move(pool_, seq, first, n, tier, &ticket, &error));
        return ticket;
    }
    void finish_move(ta_ticket ticket, uint64_t n) {
        auto info = sized<ta_move_info>();
        TA_CHECK(ta_move_wait(pool_, ticket, -1, &info, &error));
        if (info.moved + info.present != n) throw Failure("a move ended with " + std::string(ta_status_name(info.status)));
    }
    void move(ta_seq seq, uint64_t first, uint64_t n, ta_tier tier) { finish_move(start_move(seq, first, n, tier), n); }
    // Moves blocks one by one in random order, so that neighbours in the sequence are not neighbours in any tier.
    void scatter(ta_seq seq, uint64_t first, uint64_t n, ta_tier tier) {
        std::vector<uint64_t> order(n);
        std::iota(order.begin(), order.end(), first);
        std::shuffle(order.begin(), order.end(), random_);
        constexpr uint64_t kAtOnce = 1024;  // tickets that finished long ago are forgotten
        for (uint64_t i = 0; i < n; i += kAtOnce) {
            std::vector<ta_ticket> tickets;
            for (uint64_t j = i; j < std::min(n, i + kAtOnce); ++j) tickets.push_back(start_move(seq, order[j], 1, tier));
            for (const ta_ticket ticket : tickets) finish_move(ticket, 1);
        }
    }
    // Adds the measured crossovers to the row.
    void describe(json& row) {
        auto s = sized<ta_move_stats>();
        TA_CHECK(ta_kv_pool_get_move_stats(pool_, &s, &error));
        row["copy_engine_from_down"] = s.copy_engine_from_down;
        row["copy_engine_from_up"] = s.copy_engine_from_up;
    }
    void release(ta_seq seq) { TA_CHECK(ta_seq_release(pool_, seq, &error)); }
    // Bytes of all blocks that have come into a tier.
    uint64_t bytes_in(ta_tier tier) const {
        auto s = sized<ta_tier_stats>();
        TA_CHECK(ta_kv_pool_get_tier_stats(pool_, tier, &s, &error));
        return s.bytes_in;
    }
    void verify(ta_seq seq) { TA_CHECK(ta_seq_verify(pool_, seq, &error)); }
    uint64_t block_bytes() const {
        auto s = sized<ta_kv_pool_stats>();
        TA_CHECK(ta_kv_pool_get_stats(pool_, &s, &error));
        return g_.bits == 8 ? s.token_block_bytes : s.channel_block_bytes;
    }
    // Seconds of one decode attend in layer 0, including its queries.
    double attend_once(ta_seq seq, const Rows& q, Rows& out) {
        const int32_t none = 0, one = 1;
        const ta_tensor qt = q.first(1), ot = out.first(1);
        TA_CHECK(ta_plan_begin(plan_, 1, &seq, &none, &one, nullptr, &error));
        machine_.wait();
        const auto start = Clock::now();
        TA_CHECK(ta_attend(plan_, 0, &qt, &ot, nullptr, nullptr, &error));
        machine_.wait();
        const double s = seconds_since(start);
        TA_CHECK(ta_plan_abort(plan_, &error));
        return s;
    }

    // Seconds per layer of a step in which the last `tokens` tokens attend, including its begin. All layers are enqueued at
    // once.
    double attend_layers(ta_seq seq, int32_t tokens, const Rows& q, Rows& out) {
        const int32_t none = 0;
        const ta_tensor qt = q.first(tokens), ot = out.first(tokens);
        machine_.wait();
        const auto start = Clock::now();
        TA_CHECK(ta_plan_begin(plan_, 1, &seq, &none, &tokens, nullptr, &error));
        for (uint32_t layer = 0; layer < g_.layers; ++layer)
            TA_CHECK(ta_attend(plan_, layer, &qt, &ot, nullptr, nullptr, &error));
        machine_.wait();
        const double s = seconds_since(start);
        TA_CHECK(ta_plan_end(plan_, nullptr, &error));
        return s / g_.layers;
    }
    uint64_t staged_bytes() const {
        auto s = sized<ta_move_stats>();
        TA_CHECK(ta_kv_pool_get_move_stats(pool_, &s, &error));
        return s.staged_bytes;
    }
    // Moves blocks until `percent` of the n blocks behind the sink are on the host, evenly spread, and returns how many these
    // are. Before the call, `away` of them were there. Block b is on the host if b * away / n and (b - 1) * away / n have
    // different whole parts.
    uint64_t spread(ta_seq seq, uint64_t n, uint64_t away, uint64_t percent) {
        const uint64_t wanted = n * percent / 100;
        for (uint64_t b = 1; b <= n; ++b) {
            const bool is = b * away / n != (b - 1) * away / n, will = b * wanted / n != (b - 1) * wanted / n;
            if (is != will) move(seq, b, 1, will ? TA_TIER_HOST : TA_TIER_DEVICE);
        }
        return wanted;
    }

  private:
    static constexpr int64_t kChunk = 4096;
    Machine& machine_;
    Geometry g_;
    Rows k_, v_;
    ta_context* context_ = nullptr;
    ta_kv_pool* pool_ = nullptr;
    ta_plan* plan_ = nullptr;
    std::mt19937_64 random_{1};
};

// Device memory for sequences of this many blocks, including their sinks and what an append needs at a time.
uint64_t device_bytes_for(const Geometry& g, uint64_t blocks, uint64_t block_bytes) {
    const uint64_t token_block = uint64_t{64} * g.layers * g.kv_heads * (2 * g.head_dim + 8) + 4096 + 8 * g.layers;
    return blocks * block_bytes + 24 * token_block + (uint64_t{1} << 20);
}

// A host or disk tier for this many blocks, including padding, headers and a region of slots that is not full.
uint64_t tier_bytes_for(uint64_t blocks, uint64_t block_bytes) {
    return (blocks + 64) * (block_bytes + 8192) * 9 / 8 + (uint64_t{4} << 20);
}

uint64_t block_bytes_of(Machine& machine, const BenchTiersOptions& options, const Geometry& g) {
    return Cache(machine, options, g, {uint64_t{64} << 20, 0, 0}).block_bytes();
}

// `ceiling`: 0 if none is known.
json times_row(const char* part, const char* what, uint64_t bytes, const std::vector<double>& seconds, double ceiling) {
    const double p50 = quantile(seconds, 0.5), rate = double(bytes) / p50;
    return {{"part", part},
            {"what", what},
            {"bytes", bytes},
            {"p50_us", 1e6 * p50},
            {"p99_us", 1e6 * quantile(seconds, 0.99)},
            {"gb_s", rate * 1e-9},
            {"ceiling_gb_s", ceiling > 0 ? json(ceiling * 1e-9) : json()},
            {"percent", ceiling > 0 ? json(100 * rate / ceiling) : json()}};
}

// A NUMA node for the host tier in bench_moves: near the device and, if the machine has one, far from it.
struct HostNode {
    std::string name;
    uint32_t option;  // as ta_tier_options.host_node
};
std::vector<HostNode> host_nodes(const Machine& machine, const BenchTiersOptions& options) {
    if (options.host_node > 0) return {{std::to_string(options.host_node - 1), options.host_node}};
    const int near = machine.numa_node(), far = farthest_node(near);
    if (far < 0) return {{"only", 0}};
    return {{"near", uint32_t(near + 1)}, {"far", uint32_t(far + 1)}};
}

const Geometry kBlockSizes[] = {{1, 1}, {1, 8}, {8, 8}, {32, 8}, {64, 8}};

// Moves batches of n blocks, other ones each time: those that were moved last would be in the processor's caches.
void bench_moves_at(const HostNode& node, Machine& machine, BenchTiersOptions options,
                    const std::function<void(const json&)>& row) {
    options.host_node = node.option;
    const double to_host = machine.copy_bytes_per_s(true, false), from_host = machine.copy_bytes_per_s(false, false),
                 both = machine.copy_bytes_per_s(true, true);
    constexpr uint64_t kMostBytesOfCase = uint64_t{4} << 30;
    for (const Geometry& g : kBlockSizes) {
        const uint64_t size = block_bytes_of(machine, options, g);
        const uint64_t most = std::max<uint64_t>(std::min<uint64_t>(16384, options.memory_bytes / size), 1);
        for (const Route& route : routes_of(machine)) {
            Cache cache(machine, options, g, {device_bytes_for(g, 2 * most, size), tier_bytes_for(2 * most, size), 0},
                        route.value);
            const ta_seq a = cache.add(most), b = cache.add(most);
            cache.scatter(a, 1, most, TA_TIER_HOST);
            cache.scatter(b, 1, most, TA_TIER_HOST);
            cache.scatter(a, 1, most, TA_TIER_DEVICE);
            for (uint64_t n = 1;; n = std::min(n * (n < 16 ? 8 : 4), most)) {
                std::vector<double> down, up, together;
                const int repeats = int(std::clamp<uint64_t>(kMostBytesOfCase / (n * size), 3, uint64_t(options.repeats)));
                uint64_t first = 1;
                const auto next = [&] {
                    first += n;
                    if (first + n > most + 1) first = 1;
                };
                for (int i = 0; i < repeats; ++i) {
                    auto start = Clock::now();
                    cache.move(a, first, n, TA_TIER_HOST);
                    down.push_back(seconds_since(start));
                    start = Clock::now();
                    cache.move(b, first, n, TA_TIER_DEVICE);
                    up.push_back(seconds_since(start));
                    cache.scatter(a, first, n, TA_TIER_DEVICE);
                    cache.scatter(b, first, n, TA_TIER_HOST);
                    next();
                    start = Clock::now();
                    const ta_ticket out = cache.start_move(a, first, n, TA_TIER_HOST),
                                    in = cache.start_move(b, first, n, TA_TIER_DEVICE);
                    cache.finish_move(out, n);
                    cache.finish_move(in, n);
                    together.push_back(seconds_since(start));
                    cache.scatter(a, first, n, TA_TIER_DEVICE);
                    cache.scatter(b, first, n, TA_TIER_HOST);
                    next();
                }
                const auto report = [&](const char* what, const std::vector<double>& s, double ceiling, uint64_t times) {
                    json r = times_row("moves", what, n * size * times, s, ceiling);
                    r["block_bytes"] = size;
                    r["blocks"] = n * times;
                    r["route"] = route.name;
                    r["node"] = node.name;
                    cache.describe(r);
                    row(r);
                };
                report("demote", down, to_host, 1);
                report("promote", up, from_host, 1);
                report("both", together, both, 2);
                if (n == most) break;
            }
            cache.verify(a);
            cache.verify(b);
        }
    }
}

void bench_moves(Machine& machine, const BenchTiersOptions& options, const std::function<void(const json&)>& row) {
    for (const HostNode& node : host_nodes(machine, options)) bench_moves_at(node, machine, options, row);
}

// Bytes/s of sequential O_DIRECT writes and reads of 1 MiB in the folder, four at a time.
std::pair<double, double> disk_ceiling(const std::string& folder, uint64_t bytes) {
    constexpr size_t kPiece = 1 << 20;
    constexpr int kThreads = 4;
    const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    if (file < 0) return {0, 0};
    const uint64_t pieces = std::max<uint64_t>(bytes / kPiece, 64);
    if (posix_fallocate(file, 0, off_t(pieces * kPiece)) != 0) {
        close(file);
        return {0, 0};
    }
    double rates[2];
    for (const bool write : {true, false}) {
        std::atomic<uint64_t> next{0}, done{0};
        const auto work = [&] {
            void* memory = std::aligned_alloc(4096, kPiece);
            std::fill_n(static_cast<uint8_t*>(memory), kPiece, uint8_t(7));
            for (uint64_t i; (i = next.fetch_add(1)) < pieces;) {
                const auto at = off_t(i * kPiece);
                if ((write ? pwrite(file, memory, kPiece, at) : pread(file, memory, kPiece, at)) != ssize_t(kPiece)) break;
                done.fetch_add(1);
            }
            std::free(memory);
        };
        const auto start = Clock::now();
        std::vector<std::thread> threads;
        for (int i = 0; i < kThreads; ++i) threads.emplace_back(work);
        for (std::thread& t : threads) t.join();
        rates[write ? 0 : 1] = done == pieces ? double(pieces * kPiece) / seconds_since(start) : 0;
    }
    close(file);
    return {rates[0], rates[1]};
}

std::string disk_folder(const BenchTiersOptions& options) {
    const char* temporary = std::getenv("TMPDIR");
    return !options.disk_folder.empty() ? options.disk_folder : temporary && *temporary ? temporary : "/tmp";
}

void bench_disk(Machine& machine, const BenchTiersOptions& options, const std::function<void(const json&)>& row) {
    const auto [write, read] = disk_ceiling(disk_folder(options), options.disk_bytes / 4);
    for (const Geometry& g : {kBlockSizes[1], kBlockSizes[3]}) {
        const uint64_t size = block_bytes_of(machine, options, g);
        const uint64_t n = std::clamp<uint64_t>(std::min(options.memory_bytes, options.disk_bytes / 2) / size, 1, 4096);
        Cache cache(machine, options, g, {device_bytes_for(g, n, size), tier_bytes_for(n, size), tier_bytes_for(n, size)});
        const ta_seq a = cache.add(n);
        cache.move(a, 1, n, TA_TIER_HOST);
        std::vector<double> out, in;
        for (int i = 0; i < std::max(3, options.repeats / 3); ++i) {
            auto start = Clock::now();
            cache.move(a, 1, n, TA_TIER_DISK);
            out.push_back(seconds_since(start));
            start = Clock::now();
            cache.move(a, 1, n, TA_TIER_HOST);
            in.push_back(seconds_since(start));
        }
        for (const auto& [what, s, ceiling] : {std::tuple("host to disk", out, write), std::tuple("disk to host", in, read)}) {
            json r = times_row("disk", what, n * size, s, ceiling);
            r["block_bytes"] = size;
            r["blocks"] = n;
            row(r);
        }
        cache.verify(a);
    }
}

void bench_decode(Machine& machine, const BenchTiersOptions& options, const std::function<void(const json&)>& row) {
    struct Pages {
        const char* name;
        Geometry geometry;
    };
    // The last entry has as many bytes as 8 heads in F16.
    for (const auto& [name, g] : {Pages{"INT4", {1, 8}}, Pages{"INT2", {1, 8, 128, 2}}, Pages{"INT8", {1, 8, 128, 8}},
                                  Pages{"F16-sized", {1, 16, 128, 8, 2}}}) {
        const uint64_t size = block_bytes_of(machine, options, g);
        const uint64_t n = std::clamp<uint64_t>(options.memory_bytes / 4 / size, 1, 2048);
        Cache cache(machine, options, g, {device_bytes_for(g, n, size), tier_bytes_for(n, size), 0});
        const ta_seq a = cache.add(n);
        const Rows q(machine, 1, g.kv_heads * g.group, g.head_dim);
        Rows out(machine, 1, g.kv_heads * g.group, g.head_dim);
        const double link = machine.copy_bytes_per_s(false, false);
        double resident = 0;
        uint64_t away = 0;
        for (int percent : {0, 1, 10, 50, 90, 99}) {
            away = cache.spread(a, n, away, uint64_t(percent));
            std::vector<double> times;
            for (int i = 0; i < options.repeats + 2; ++i) {
                const double s = cache.attend_once(a, q, out);
                if (i >= 2) times.push_back(s);
            }
            json r = times_row("decode", "attend", away * size, times, percent >= 50 ? link : 0);
            r["pages"] = name;
            r["tokens"] = n * 64;
            r["percent_on_host"] = percent;
            if (percent == 0) resident = quantile(times, 0.5);
            r["times_resident"] = quantile(times, 0.5) / resident;
            row(r);
        }
        cache.verify(a);
    }
}

// Seconds per layer of prompt chunks over blocks of which some are in host memory: read in place, and staged.
void bench_chunk(Machine& machine, const BenchTiersOptions& options, const std::function<void(const json&)>& row) {
    const bool gpu = machine.kind() == TA_DEVICE_CUDA;
    struct Way {
        const char* name;
        ta_staging staging;
        ta_x_move_route route;
    };
    constexpr Way kWays[] = {{"in place", TA_STAGING_NEVER, TA_X_MOVE_ROUTE_AUTO},
                             {"staged, copy engine", TA_STAGING_ALWAYS, TA_X_MOVE_ROUTE_COPY_ENGINE},
                             {"staged, kernel", TA_STAGING_ALWAYS, TA_X_MOVE_ROUTE_KERNEL},
                             {"auto", TA_STAGING_AUTO, TA_X_MOVE_ROUTE_AUTO}};
    constexpr Geometry g{8, 8};
    const uint64_t size = block_bytes_of(machine, options, g);
    const uint64_t n = std::clamp<uint64_t>(options.memory_bytes / size, 16, 511);
    const double link = machine.copy_bytes_per_s(false, false);
    for (const Way& way : std::span(kWays).first(gpu ? std::size(kWays) : 1)) {
        Cache cache(machine, options, g, {2 * device_bytes_for(g, n, size), tier_bytes_for(n, size), 0}, way.route,
                    way.staging);
        const ta_seq a = cache.add(n);
        const int64_t most = gpu ? 2048 : 16;
        const Rows q(machine, most, g.kv_heads * g.group, g.head_dim);
        Rows out(machine, most, g.kv_heads * g.group, g.head_dim);
        uint64_t away = 0;
        for (const uint64_t percent : {0, 10, 50, 90}) {
            away = cache.spread(a, n, away, percent);
            for (int32_t tokens = 1; tokens <= most; tokens *= tokens == 256 ? 8 : 4) {
                std::vector<double> times;
                const uint64_t before = cache.staged_bytes();
                const int repeats = std::max(3, options.repeats / 3);
                for (int i = 0; i < repeats + 1; ++i) {
                    const double s = cache.attend_layers(a, tokens, q, out);
                    if (i >= 1) times.push_back(s);
                }
                json r = times_row("chunk", way.name, away * (size / g.layers), times, away > 0 ? link : 0);
                r["tokens"] = tokens;
                r["over"] = (n + 1) * 64 - uint64_t(tokens);
                r["percent_on_host"] = percent;
                r["staged_bytes"] = (cache.staged_bytes() - before) / uint64_t(repeats + 1) / g.layers;
                row(r);
            }
        }
        cache.verify(a);
    }
}

// Moves on which precision falls. A block can fall only once, so each batch is of new blocks. GB/s count the bytes that arrive.
void bench_falling(Machine& machine, const BenchTiersOptions& options, const std::function<void(const json&)>& row) {
    const double to_host = machine.copy_bytes_per_s(true, false);
    const auto [write, read] = disk_ceiling(disk_folder(options), options.disk_bytes / 4);
    for (Geometry g : {kBlockSizes[1], kBlockSizes[3]}) {
        g.bits = 8;
        const uint64_t size = block_bytes_of(machine, options, g);
        const uint64_t n = std::clamp<uint64_t>(std::min(options.memory_bytes, options.disk_bytes) / 2 / size, 1, 4096);
        for (const bool falling : {false, true}) {
            Cache cache(machine, options, g, {device_bytes_for(g, n, size), tier_bytes_for(n, size), tier_bytes_for(n, size)},
                        TA_X_MOVE_ROUTE_AUTO, TA_STAGING_AUTO, falling);
            std::vector<double> to_memory, to_disk;
            uint64_t host_bytes = 0, disk_bytes = 0;
            for (int i = 0; i < std::max(3, options.repeats / 3); ++i) {
                const uint64_t host_before = cache.bytes_in(TA_TIER_HOST), disk_before = cache.bytes_in(TA_TIER_DISK);
                const ta_seq seq = cache.add(n);
                auto start = Clock::now();
                cache.move(seq, 1, n, TA_TIER_HOST);
                to_memory.push_back(seconds_since(start));
                host_bytes = cache.bytes_in(TA_TIER_HOST) - host_before;
                start = Clock::now();
                cache.move(seq, 1, n, TA_TIER_DISK);
                to_disk.push_back(seconds_since(start));
                disk_bytes = cache.bytes_in(TA_TIER_DISK) - disk_before;
                if (i == 0) cache.verify(seq);
                cache.release(seq);
            }
            for (const auto& [what, s, from, bytes, ceiling] :
                 {std::tuple(falling ? "device to host, 8 to 4 bits" : "device to host, 8 bits", to_memory, n * size,
                             host_bytes, to_host),
                  std::tuple(falling ? "host to disk, 4 to 2 bits" : "host to disk, 8 bits", to_disk, host_bytes, disk_bytes,
                             write)}) {
                json r = times_row("falling", what, bytes, s, ceiling);
                r["blocks"] = n;
                r["block_bytes"] = bytes / n;
                r["from_gb_s"] = r["gb_s"].get<double>() * double(from) / double(bytes);
                row(r);
            }
        }
    }
}

// Measures how much slower decode is while blocks move without a pause, down and up in turn, and the rate of these moves. A
// decode counts for a direction only if one such move lasted from its begin to its end. Background demotion always goes by copy
// engine. `decode` returns its seconds.
void bench_busy_while(const char* what, Cache& cache, ta_seq moving, uint64_t moved, int repeats, json r,
                      const std::function<double()>& decode, const std::function<void(const json&)>& row) {
    std::vector<double> idle, busy[2];
    const auto measure_idle = [&] {
        for (int i = 0; i < repeats; ++i) idle.push_back(decode());
    };
    measure_idle();
    std::atomic<uint64_t> moves{0};  // how often a move began or ended; moves down are the even ones
    double seconds[2] = {0, 0};
    uint64_t times[2] = {0, 0};
    std::string failure;
    std::atomic<bool> failed{false};
    std::jthread mover([&](const std::stop_token& stop) {
        try {
            while (!stop.stop_requested()) {
                for (const size_t up : {0, 1}) {
                    const auto start = Clock::now();
                    ++moves;
                    cache.move(moving, 1, moved, up ? TA_TIER_DEVICE : TA_TIER_HOST);
                    ++moves;
                    seconds[up] += seconds_since(start);
                    ++times[up];
                }
            }
        } catch (const Failure& e) {
            failure = e.what();
            failed = true;
        }
    });
    const auto last = Clock::now() + std::chrono::seconds(10);
    const auto enough = [&] { return std::min(busy[0].size(), busy[1].size()) >= size_t(repeats); };
    while (!enough() && !failed && Clock::now() < last) {
        const uint64_t before = moves;
        const double s = decode();
        if (before % 2 == 1 && moves == before) busy[before / 2 % 2].push_back(s);
    }
    mover.request_stop();
    mover.join();
    if (!failure.empty()) throw Failure(failure);
    measure_idle();
    for (const size_t up : {0, 1}) {
        if (busy[up].empty()) continue;  // no decode fits into one move
        const std::string beside = std::string(what) + (up ? ", blocks come up" : ", blocks go down");
        json result = times_row("busy", beside.c_str(), r["bytes"], busy[up], 0);
        result.update(r);
        result["idle_p50_us"] = 1e6 * quantile(idle, 0.5);
        result["slower_percent"] = 100 * (quantile(busy[up], 0.5) / quantile(idle, 0.5) - 1);
        result["moved_gb_s"] = double(times[up] * moved * r["block_bytes"].get<uint64_t>()) / seconds[up] * 1e-9;
        row(result);
    }
}

// Measures one attend that the caller waits for, so that the bus's latency counts twice. And a step of all layers, enqueued at
// once, as an engine decodes.
void bench_busy(Machine& machine, const BenchTiersOptions& options, const std::function<void(const json&)>& row) {
    for (const Geometry& g : {kBlockSizes[1], kBlockSizes[3]}) {
        const uint64_t size = block_bytes_of(machine, options, g);
        const uint64_t moved = std::max<uint64_t>(std::min<uint64_t>(4096, options.memory_bytes / 4 / size), 1);
        const uint64_t n = std::max<uint64_t>(std::min<uint64_t>(2048, options.memory_bytes / size), 1);
        for (const Route& route : routes_of(machine)) {
            Cache cache(machine, options, g, {device_bytes_for(g, n + moved, size), tier_bytes_for(moved, size), 0},
                        route.value);
            const ta_seq decoding = cache.add(n), moving = cache.add(moved);
            const Rows q(machine, 1, g.kv_heads * g.group, g.head_dim);
            Rows out(machine, 1, g.kv_heads * g.group, g.head_dim);
            json r = {{"block_bytes", size}, {"route", route.name}, {"tokens", n * 64}, {"bytes", n * size / g.layers}};
            bench_busy_while(
                "attend", cache, moving, moved, 20 * options.repeats, r, [&] { return cache.attend_once(decoding, q, out); },
                row);
            if (g.layers > 1) {
                r["bytes"] = n * size;
                bench_busy_while(
                    "decode step", cache, moving, moved, 5 * options.repeats, r,
                    [&] { return g.layers * cache.attend_layers(decoding, 1, q, out); }, row);
            }
            cache.verify(moving);
        }
    }
}

struct Part {
    const char* name;
    void (*run)(Machine& machine, const BenchTiersOptions& options, const std::function<void(const json&)>& row);
};
constexpr Part kParts[] = {{"moves", bench_moves},   {"disk", bench_disk},   {"falling", bench_falling},
                           {"decode", bench_decode}, {"chunk", bench_chunk}, {"busy", bench_busy}};

}  // namespace

std::vector<std::string> bench_tiers_parts() {
    std::vector<std::string> names;
    for (const Part& part : kParts) names.push_back(part.name);
    return names;
}

void bench_tiers(Machine& machine, const BenchTiersOptions& options, const std::function<void(const json& row)>& row) {
    for (const Part& part : kParts) {
        if (options.parts.empty() || std::count(options.parts.begin(), options.parts.end(), part.name))
            part.run(machine, options, row);
    }
}

}  // namespace ta::tools
