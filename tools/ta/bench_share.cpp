#include "tools/ta/bench_share.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <exception>
#include <iterator>
#include <mutex>
#include <thread>

namespace ta::tools {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;
using Machines = std::vector<std::unique_ptr<Machine>>;
using Row = std::function<void(const json&)>;

constexpr uint32_t kKvHeads = 8, kGroup = 4, kHeadDim = 128, kBits = 4;
constexpr int64_t kQHeads = kKvHeads * kGroup, kChunk = 4096;

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

ta_context* make_context(const Machine& machine) {
    auto o = sized<ta_context_options>();
    o.device = machine.kind();
    o.device_ordinal = machine.ordinal();
    ta_context* context = nullptr;
    TA_CHECK(ta_context_create(&o, &context, &error));
    return context;
}

// A pool on one machine with a plan, and rows to fill sequences with. `peer`: the machine of its peer tier, if it has one.
class Site {
  public:
    Site(Machine& machine, uint32_t layers, uint64_t pool_bytes, const Machine* peer = nullptr, uint64_t peer_bytes = 0)
        : machine_(machine), layers_(layers), k_(machine, kChunk, kKvHeads, kHeadDim), v_(machine, kChunk, kKvHeads, kHeadDim) {
        context_ = make_context(machine);
        auto tiers = sized<ta_tier_options>();
        // Without sink blocks equal tokens have equal codes everywhere (bench_beyond).
        auto numerics = sized<ta_numerics>();
        numerics.sink_blocks = -1;
        auto po = sized<ta_kv_pool_options>();
        po.numerics = &numerics;
        po.layers = layers;
        po.kv_heads = kKvHeads;
        po.head_dim = kHeadDim;
        po.bits = kBits;
        po.budget_bytes = pool_bytes;
        if (peer) {
            tiers.peer = make_context(*peer);
            tiers.peer_bytes = peer_bytes;
            po.tiers = &tiers;
        }
        const ta_status status = ta_kv_pool_create(context_, &po, &pool_, &error);
        ta_context_destroy(tiers.peer);
        check(status, "ta_kv_pool_create");
        TA_CHECK(ta_plan_create(pool_, nullptr, &plan_, &error));
        if (machine.kind() == TA_DEVICE_CUDA) TA_CHECK(ta_plan_set_stream(plan_, machine.stream(), &error));
    }
    ~Site() {
        ta_group_destroy(group_);
        ta_plan_destroy(plan_);
        ta_kv_pool_destroy(pool_);
        ta_context_destroy(context_);
    }
    Site(const Site&) = delete;
    Site& operator=(const Site&) = delete;

    void join(const BenchShareOptions& options, const ta_group_id& id, uint32_t rank, uint32_t ranks) {
        auto o = sized<ta_group_options>();
        o.kind = options.kind;
        o.hosts_apart = options.hosts_apart;
        o.id = &id;
        o.rank = rank;
        o.ranks = ranks;
        TA_CHECK(ta_group_create(context_, &o, &group_, &error));
    }
    void wait_connected() {
        ta_group_state state = 0;
        TA_CHECK(ta_group_poll(group_, -1, &state, &error));
        TA_CHECK(ta_group_health(group_, &error));
    }

    ta_seq create() {
        ta_seq seq = 0;
        TA_CHECK(ta_seq_create(pool_, &seq, &error));
        return seq;
    }
    ta_seq create_partitioned(uint64_t tag) {
        const ta_seq seq = create();
        auto o = sized<ta_partition_options>();
        o.tag = tag;
        TA_CHECK(ta_seq_partition(group_, pool_, seq, &o, &error));
        return seq;
    }
    // With the first `period` rows again and again.
    void fill(ta_seq seq, int64_t tokens, int64_t period = kChunk) {
        for (int64_t left = tokens; left > 0; left -= period) {
            const auto n = int32_t(std::min(left, period)), none = 0;
            const ta_tensor k = k_.first(n), v = v_.first(n);
            TA_CHECK(ta_plan_begin(plan_, 1, &seq, &n, &none, nullptr, &error));
            for (uint32_t layer = 0; layer < layers_; ++layer) TA_CHECK(ta_append(plan_, layer, &k, &v, &error));
            TA_CHECK(ta_plan_end(plan_, nullptr, &error));
        }
        machine_.wait();
    }
    // True if the pool has room for so many more tokens.
    bool takes(ta_seq seq, int64_t tokens) {
        const auto n = int32_t(tokens), none = 0;
        const ta_status status = ta_plan_begin(plan_, 1, &seq, &n, &none, nullptr, &error);
        if (status == TA_OK) TA_CHECK(ta_plan_abort(plan_, &error));
        if (status != TA_OK && status != TA_E_TIER_FULL) check(status, "ta_plan_begin");
        return status == TA_OK;
    }
    // Fills a sequence with the chunks of a prompt, which also attend. Returns the seconds of attention.
    double compute(ta_seq seq, int64_t tokens) {
        const Rows q(machine_, kChunk, kQHeads, kHeadDim), out(machine_, kChunk, kQHeads, kHeadDim);
        double seconds = 0;
        for (int64_t left = tokens; left > 0; left -= kChunk) {
            const auto n = int32_t(std::min(left, kChunk));
            const ta_tensor k = k_.first(n), v = v_.first(n), qt = q.first(n), ot = out.first(n);
            TA_CHECK(ta_plan_begin(plan_, 1, &seq, &n, &n, nullptr, &error));
            for (uint32_t layer = 0; layer < layers_; ++layer) {
                TA_CHECK(ta_append(plan_, layer, &k, &v, &error));
                machine_.wait();
                const auto start = Clock::now();
                TA_CHECK(ta_attend(plan_, layer, &qt, &ot, nullptr, nullptr, &error));
                machine_.wait();
                seconds += std::chrono::duration<double>(Clock::now() - start).count();
            }
            TA_CHECK(ta_plan_end(plan_, nullptr, &error));
        }
        return seconds;
    }
    void move(ta_seq seq, uint64_t first, uint64_t n, ta_tier tier) {
        ta_ticket ticket = 0;
        auto info = sized<ta_move_info>();
        TA_CHECK(ta_seq_move(pool_, seq, first, n, tier, &ticket, &error));
        TA_CHECK(ta_move_wait(pool_, ticket, -1, &info, &error));
        if (info.moved + info.present != n) throw Failure("blocks have not moved");
    }
    void release(ta_seq seq) { TA_CHECK(ta_seq_release(pool_, seq, &error)); }

    // Seconds of a step in which the last `queries` tokens of each sequence attend in all layers. `calls` makes the step's
    // calls.
    double step(const std::vector<ta_seq>& seqs, int32_t queries, const std::function<void()>& calls,
                const std::function<void()>& together) {
        const std::vector<int32_t> none(seqs.size()), last(seqs.size(), queries);
        TA_CHECK(ta_plan_begin(plan_, uint32_t(seqs.size()), seqs.data(), none.data(), last.data(), nullptr, &error));
        machine_.wait();
        together();
        const auto start = Clock::now();
        calls();
        machine_.wait();
        const double s = std::chrono::duration<double>(Clock::now() - start).count();
        TA_CHECK(ta_plan_end(plan_, nullptr, &error));
        return s;
    }
    void attend_all(const ta_tensor& q, const ta_tensor& out, ta_p p) {
        auto o = sized<ta_attend_options>();
        o.p = p;
        for (uint32_t layer = 0; layer < layers_; ++layer) TA_CHECK(ta_attend(plan_, layer, &q, &out, nullptr, &o, &error));
    }

    Machine& machine() const { return machine_; }
    uint32_t layers() const { return layers_; }
    ta_kv_pool* pool() const { return pool_; }
    ta_group* group() const { return group_; }
    uint64_t block_bytes() const {
        auto s = sized<ta_kv_pool_stats>();
        TA_CHECK(ta_kv_pool_get_stats(pool_, &s, &error));
        return s.channel_block_bytes;
    }

  private:
    Machine& machine_;
    const uint32_t layers_;
    Rows k_, v_;
    ta_context* context_ = nullptr;
    ta_kv_pool* pool_ = nullptr;
    ta_plan* plan_ = nullptr;
    ta_group* group_ = nullptr;
};

// A site for each rank, all joined to one group.
class Ranks {
  public:
    Ranks(const Machines& machines, const BenchShareOptions& options, uint32_t layers, uint64_t pool_bytes)
        : together_(ptrdiff_t(machines.size())) {
        for (const auto& m : machines) sites_.push_back(std::make_unique<Site>(*m, layers, pool_bytes));
        ta_group_id id;
        TA_CHECK(ta_group_make_id(options.kind, &id, &error));
        for (uint32_t r = 0; r < sites_.size(); ++r) sites_[r]->join(options, id, r, uint32_t(sites_.size()));
        for (const auto& s : sites_) s->wait_connected();
    }
    Site& operator[](size_t rank) const { return *sites_[rank]; }
    size_t size() const { return sites_.size(); }

    // Runs fn(rank) at all ranks at once. If one fails, the group ends, so that the others fail, too.
    void each(const std::function<void(size_t rank)>& fn) {
        std::exception_ptr first;
        std::mutex mutex;
        std::vector<std::jthread> threads;
        for (size_t r = 0; r < size(); ++r) {
            threads.emplace_back([&, r] {
                try {
                    fn(r);
                } catch (...) {
                    const std::lock_guard lock(mutex);
                    if (!first) first = std::current_exception();
                    ta_group_abort(sites_[r]->group(), nullptr);
                    together_.arrive_and_drop();
                }
            });
        }
        threads.clear();
        if (first) std::rethrow_exception(first);
    }
    // Within each(): a barrier of all ranks.
    void together() { together_.arrive_and_wait(); }

  private:
    std::vector<std::unique_ptr<Site>> sites_;
    std::barrier<> together_;
};

// --------------------------------------------------------------------------------------------------------- partitioned

// One layer of decode, or of a chunk of a prompt.
struct Case {
    const char* what;
    size_t batch;
    int32_t queries;
    int64_t tokens;
    ta_p p;
};
struct Attended {
    std::vector<double> seconds, device_seconds;  // per layer: from launch to end, and the device's part of that
    std::vector<float> out;
};

// Measures steps, replayed from a capture if possible. `together`: a barrier of all ranks. `on_device`: also measures the
// device's time; that runs each step twice, so it does not work over a group.
Attended measure_attend(Site& site, const std::vector<ta_seq>& seqs, const Case& c, int repeats,
                        const std::function<void()>& together, bool on_device = false) {
    const auto rows = int64_t(seqs.size()) * c.queries;
    const Rows q(site.machine(), rows, kQHeads, kHeadDim), out(site.machine(), rows, kQHeads, kHeadDim);
    const ta_tensor qt = q.first(rows), ot = out.first(rows);
    const auto calls = [&] { site.attend_all(qt, ot, c.p); };
    std::function<void()> replay;
    site.step(seqs, c.queries, calls, together);
    site.step(
        seqs, c.queries,
        [&] {
            replay = site.machine().capture(calls);
            replay();
        },
        together);
    Attended a;
    for (int i = 0; i < repeats; ++i) a.seconds.push_back(site.step(seqs, c.queries, replay, together) / site.layers());
    for (int i = 0; i < repeats && on_device; ++i) {
        site.step(
            seqs, c.queries, [&] { a.device_seconds.push_back(site.machine().time(replay) / site.layers()); }, together);
    }
    a.out.resize(size_t(rows * kQHeads * kHeadDim));
    site.machine().read(a.out.data(), ot.data, a.out.size() * sizeof(float));
    return a;
}

// Seconds of a layer at the slowest rank. All ranks must have the same result.
double seconds_of(const std::vector<Attended>& ranks) {
    double seconds = 0;
    for (const Attended& a : ranks) {
        if (a.out != ranks[0].out) throw Failure("ranks have other results");
        seconds = std::max(seconds, median(a.seconds));
    }
    return seconds;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, double(std::fabs(a[i] - b[i])));
    return most;
}

// Compares sequences on one rank with the same sequences spread over all ranks.
void compare_attend(const Machines& machines, const BenchShareOptions& options, const Case& c, uint32_t layers,
                    const Row& row) {
    const size_t batch = c.batch;
    const int64_t tokens = c.tokens;
    const uint64_t block = Site(*machines[0], layers, uint64_t{64} << 20).block_bytes();
    const uint64_t blocks = uint64_t(tokens / 64) * batch, chunk_bytes = (kChunk / 64 + 4 * batch) * 3 * block;
    const auto nobody = [] {};
    Attended one, fine;
    {
        Site whole(*machines[0], layers, blocks * block + chunk_bytes);
        std::vector<ta_seq> seqs;
        for (size_t i = 0; i < batch; ++i) whole.fill(seqs.emplace_back(whole.create()), tokens);
        one = measure_attend(whole, seqs, c, options.repeats, nobody);
        Case with_16_bits = c;
        with_16_bits.p = TA_P_U16;
        fine = measure_attend(whole, seqs, with_16_bits, 1, nobody);
    }
    Ranks ranks(machines, options, layers, blocks * block / machines.size() + chunk_bytes);
    std::vector<Attended> spread(ranks.size());
    ranks.each([&](size_t r) {
        std::vector<ta_seq> seqs;
        for (size_t i = 0; i < batch; ++i) ranks[r].fill(seqs.emplace_back(ranks[r].create_partitioned(i)), tokens);
        spread[r] = measure_attend(ranks[r], seqs, c, options.repeats, [&] { ranks.together(); });
    });
    // From the result of one rank with P at 16 bits.
    const double difference = largest_difference(spread[0].out, fine.out), of_one = largest_difference(one.out, fine.out);
    const double seconds = seconds_of(spread);
    if (!(difference < std::max(1e-4, 2 * of_one)))
        throw Failure("the ranks' result is wrong by " + std::to_string(difference) + ", one rank's by " +
                      std::to_string(of_one));
    const double alone = median(one.seconds);
    row({{"part", "partitioned"},
         {"what", c.what},
         {"ranks", ranks.size()},
         {"batch", batch},
         {"queries", c.queries},
         {"tokens", uint64_t(tokens)},
         {"layers", layers},
         {"one_rank_us", 1e6 * alone},
         {"ranks_us", 1e6 * seconds},
         {"times_faster", alone / seconds},
         {"exchanged_bytes", uint64_t(batch) * uint64_t(c.queries) * kQHeads * (kHeadDim + 1) * sizeof(float)},
         {"difference", difference},
         {"difference_of_one", of_one}});
}

// Decodes a sequence that no rank has room for alone. It repeats the same tokens, so what attention gives is what it gives for a
// small part of them, which one rank computes.
void bench_beyond(const Machines& machines, const BenchShareOptions& options, const Row& row) {
    const uint64_t block_of_layer = Site(*machines[0], 1, uint64_t{64} << 20).block_bytes();
    const auto layers = uint32_t(std::clamp<uint64_t>(options.memory_bytes / block_of_layer / 1024, 1, 32));
    const uint64_t block = Site(*machines[0], layers, uint64_t{256} << 20).block_bytes();
    const auto of_rank = int64_t(options.memory_bytes / block * 64);  // tokens
    int64_t period = kChunk;
    while (period > 64 && 8 * period > of_rank) period /= 2;
    const int64_t of_each = of_rank * 3 / 4 / period * period, tokens = of_each * int64_t(machines.size());
    if (of_each < 2 * period) throw WrongInput("beyond needs more --memory");
    Case c{"more than a rank has room for", 1, 1, 2 * period, TA_P_U16};
    Attended part;
    {
        Site alone(*machines[0], layers, options.memory_bytes);
        const ta_seq seq = alone.create();
        alone.fill(seq, c.tokens, period);
        part = measure_attend(alone, {seq}, c, 1, [] {});
        if (alone.takes(seq, tokens)) throw Failure("one rank has room for all");
    }
    c.tokens = tokens;
    Ranks ranks(machines, options, layers, options.memory_bytes);
    std::vector<Attended> spread(ranks.size());
    ranks.each([&](size_t r) {
        const ta_seq seq = ranks[r].create_partitioned(0);
        ranks[r].fill(seq, tokens, period);
        spread[r] = measure_attend(ranks[r], {seq}, c, options.repeats, [&] { ranks.together(); });
    });
    const double seconds = seconds_of(spread), difference = largest_difference(spread[0].out, part.out);
    if (!(difference < 1e-4)) throw Failure("the ranks' result is wrong by " + std::to_string(difference));
    const uint64_t bytes = uint64_t(tokens / 64) * block;
    row({{"part", "beyond"},
         {"what", c.what},
         {"ranks", ranks.size()},
         {"tokens", uint64_t(tokens)},
         {"layers", layers},
         {"bytes", bytes},
         {"rank_bytes", options.memory_bytes},
         {"ranks_us", 1e6 * seconds},
         {"gb_s", 1e-9 * double(bytes) / layers / seconds},
         {"difference", difference}});
}

void bench_partitioned(const Machines& machines, const BenchShareOptions& options, const Row& row) {
    const uint64_t block = Site(*machines[0], 1, uint64_t{64} << 20).block_bytes();
    const auto tokens_for = [&](size_t batch, int64_t wanted) {
        return std::clamp<int64_t>(int64_t(options.memory_bytes / block / batch) * 64, 64, wanted);
    };
    const auto layers_for = [&](size_t batch, int64_t tokens) {
        return uint32_t(std::clamp<uint64_t>(options.memory_bytes / (block * batch * uint64_t(tokens / 64)), 1, 32));
    };
    for (Case c : {Case{"short: the exchange", 16, 1, 128, TA_P_U16}, Case{"batch", 16, 1, 32768, TA_P_U16},
                   Case{"one long sequence", 1, 1, int64_t{1} << 20, TA_P_U16},
                   Case{"chunk of a prompt", 1, 2048, 131072, TA_P_DEFAULT}}) {
        c.tokens = tokens_for(c.batch, c.tokens);
        c.queries = int32_t(std::min(int64_t(c.queries), c.tokens / 64));  // little memory gives short sequences, so take fewer
                                                                           // queries, too
        compare_attend(machines, options, c, layers_for(c.batch, c.tokens), row);
    }
}

// ----------------------------------------------------------------------------------------------------------- transfers

// Seconds from the calls to the end of the last ticket. The received sequences are verified, unless `verify` is off, and
// released.
double transfer(const Ranks& ranks, const std::vector<std::pair<size_t, ta_seq>>& sent, uint64_t& tags, bool verify = true) {
    struct Way {
        size_t from, to;
        ta_ticket out, in;
    };
    std::vector<Way> ways;
    const auto start = Clock::now();
    for (const auto& [from, seq] : sent) {
        Way w{from, 1 - from, 0, 0};
        const uint64_t tag = ++tags;
        TA_CHECK(
            ta_seq_send(ranks[w.from].group(), ranks[w.from].pool(), seq, uint32_t(w.to), tag, TA_SEND_COPY, &w.out, &error));
        TA_CHECK(ta_seq_receive(ranks[w.to].group(), ranks[w.to].pool(), uint32_t(w.from), tag, &w.in, &error));
        ways.push_back(w);
    }
    std::vector<ta_seq> arrived;
    for (const Way& w : ways) {
        for (const auto& [rank, ticket] : {std::pair(w.to, w.in), std::pair(w.from, w.out)}) {
            auto info = sized<ta_transfer_info>();
            TA_CHECK(ta_transfer_wait(ranks[rank].group(), ticket, -1, &info, &error));
            if (info.state != TA_MOVE_DONE) throw Failure(std::string("a transfer ended: ") + info.reason);
            if (rank == w.to) arrived.push_back(info.seq);
        }
    }
    const double s = std::chrono::duration<double>(Clock::now() - start).count();
    for (size_t i = 0; i < ways.size(); ++i) {
        if (verify) TA_CHECK(ta_seq_verify(ranks[ways[i].to].pool(), arrived[i], &error));
        ranks[ways[i].to].release(arrived[i]);
    }
    return s;
}

void bench_transfers(const Machines& machines, const BenchShareOptions& options, const Row& row) {
    const double link = machines[0]->peer_bytes_per_s(*machines[1], false),
                 link_both = machines[0]->peer_bytes_per_s(*machines[1], true);
    const double nccl = machines[0]->nccl_bytes_per_s(*machines[1]);
    uint64_t tags = 0;
    for (const uint32_t layers : {1u, 32u, 113u}) {  // 70 KB, 2.26 MB, 8 MB
        const uint64_t block = Site(*machines[0], layers, uint64_t{256} << 20).block_bytes();
        const auto most = std::clamp<uint64_t>(options.memory_bytes / 4 / block, 1, 16384);
        for (uint64_t blocks = std::min<uint64_t>(16, most);; blocks = std::min(4 * blocks, most)) {
            Ranks ranks(machines, options, layers, (2 * blocks + 3 * kChunk / 64 + 16) * block * 9 / 8);
            std::vector<ta_seq> seqs(2);
            ranks.each([&](size_t r) { ranks[r].fill(seqs[r] = ranks[r].create(), int64_t(blocks) * 64); });
            for (const bool both : {false, true}) {
                std::vector<double> seconds;
                std::vector<std::pair<size_t, ta_seq>> sent = {{0, seqs[0]}};
                if (both) sent.emplace_back(1, seqs[1]);
                for (int i = 0; i < options.repeats + 1; ++i) {
                    const double s = transfer(ranks, sent, tags);
                    if (i > 0) seconds.push_back(s);
                }
                const uint64_t bytes = blocks * block * sent.size();
                const double rate = double(bytes) / median(seconds), ceiling = both ? link_both : link;
                row({{"part", "transfers"},
                     {"what", both ? "both ways" : "one way"},
                     {"block_bytes", block},
                     {"blocks", blocks * sent.size()},
                     {"p50_us", 1e6 * median(seconds)},
                     {"gb_s", 1e-9 * rate},
                     {"link_gb_s", 1e-9 * ceiling},
                     {"percent", 100 * rate / ceiling},
                     {"nccl_gb_s", nccl > 0 ? json(1e-9 * nccl) : json()}});
            }
            if (blocks == most) break;
        }
    }
}

// Decode at both ranks: alone, and while sequences are sent from the first to the second without a pause.
void bench_beside(const Machines& machines, const BenchShareOptions& options, const Row& row) {
    constexpr uint32_t kLayers = 32;
    const uint64_t block = Site(*machines[0], kLayers, uint64_t{256} << 20).block_bytes();
    const uint64_t blocks = std::clamp<uint64_t>(options.memory_bytes / 8 / block, 1, 512);
    Ranks ranks(machines, options, kLayers, (3 * blocks + 3 * kChunk / 64 + 16) * block * 9 / 8);
    std::vector<ta_seq> seqs(2);
    ta_seq sent = 0;
    ranks.each([&](size_t r) {
        ranks[r].fill(seqs[r] = ranks[r].create(), int64_t(blocks) * 64);
        if (r == 0) ranks[r].fill(sent = ranks[r].create(), int64_t(blocks) * 64);
    });
    const Case decode{"decode", 1, 1, int64_t(blocks) * 64, TA_P_DEFAULT};
    const auto measure = [&](size_t r, int repeats) {
        return measure_attend(
            ranks[r], {seqs[r]}, decode, repeats, [] {}, true);
    };
    Attended alone[2], beside[2];
    for (size_t r = 0; r < 2; ++r) alone[r] = measure(r, 20 * options.repeats);
    uint64_t tags = 0, bytes = 0;
    double seconds = 0;
    for (size_t r = 0; r < 2; ++r) {
        std::atomic<bool> over{false};
        std::exception_ptr failure;
        std::jthread transfers([&] {
            try {
                while (!over) {
                    seconds += transfer(ranks, {{0, sent}}, tags, false);  // verification would be extra work for the
                                                                           // receiver's GPU
                    bytes += blocks * block;
                }
                transfer(ranks, {{0, sent}}, tags);
            } catch (...) {
                failure = std::current_exception();
            }
        });
        beside[r] = measure(r, 20 * options.repeats);
        over = true;
        transfers.join();
        if (failure) std::rethrow_exception(failure);
    }
    for (size_t r = 0; r < 2; ++r) {
        row({{"part", "beside"},
             {"what", r == 0 ? "decode at the source" : "decode at the destination"},
             {"tokens", uint64_t(decode.tokens)},
             {"alone_us", 1e6 * median(alone[r].device_seconds)},
             {"beside_us", 1e6 * median(beside[r].device_seconds)},
             {"loses_percent", 100 * (median(beside[r].device_seconds) / median(alone[r].device_seconds) - 1)},
             {"with_launch_alone_us", 1e6 * median(alone[r].seconds)},
             {"with_launch_beside_us", 1e6 * median(beside[r].seconds)},
             {"block_bytes", block},
             {"transfers_gb_s", 1e-9 * double(bytes) / seconds}});
    }
}

// The second rank fetches a published prefix that the first one has; compared with the attention that computing it would take.
void bench_prefix(const Machines& machines, const BenchShareOptions& options, const Row& row) {
    constexpr uint32_t kLayers = 32;
    const uint64_t block = Site(*machines[0], kLayers, uint64_t{256} << 20).block_bytes();
    const uint64_t blocks = std::clamp<uint64_t>(options.memory_bytes / 2 / block, 1, 32768 / 64);
    const auto tokens = int64_t(blocks) * 64;
    Ranks ranks(machines, options, kLayers, (2 * blocks + 3 * kChunk / 64 + 16) * block * 9 / 8);
    auto o = sized<ta_namespace_options>();
    o.salt[0] = 1;
    ta_namespace spaces[2];
    for (size_t r = 0; r < 2; ++r) {
        TA_CHECK(ta_namespace_create(ranks[r].pool(), &o, &spaces[r], &error));
        TA_CHECK(ta_namespace_join(ranks[r].group(), ranks[r].pool(), spaces[r], &error));
    }
    // The first rank computes the prompt, chunk by chunk: the time of its attention is the price of the prefix.
    const ta_seq seq = ranks[0].create();
    const double computed = ranks[0].compute(seq, tokens);
    std::vector<uint8_t> keys(size_t(blocks) * 32);
    std::vector<double> seconds;
    std::vector<ta_prefix_place> places(blocks);
    for (int i = 0; i < options.repeats + 1; ++i) {
        for (size_t k = 0; k < keys.size(); ++k) keys[k] = uint8_t(k / 32 * 131 + k + size_t(i) * 7);  // other keys each time
        TA_CHECK(ta_seq_publish(ranks[0].pool(), seq, spaces[0], keys.data(), blocks, &error));
        do {
            TA_CHECK(ta_namespace_lookup(ranks[1].group(), ranks[1].pool(), spaces[1], keys.data(), blocks, -1, places.data(),
                                         &error));
        } while (places.back().answer != TA_PREFIX_YES);
        const auto start = Clock::now();
        ta_ticket ticket = 0;
        TA_CHECK(ta_namespace_fetch(ranks[1].group(), ranks[1].pool(), spaces[1], keys.data(), blocks, &ticket, &error));
        auto info = sized<ta_transfer_info>();
        TA_CHECK(ta_transfer_wait(ranks[1].group(), ticket, -1, &info, &error));
        const double s = std::chrono::duration<double>(Clock::now() - start).count();
        if (info.state != TA_MOVE_DONE) throw Failure(std::string("a fetch ended: ") + info.reason);
        ta_seq got = 0;
        int64_t length = 0;
        TA_CHECK(ta_seq_match_prefix(ranks[1].pool(), spaces[1], keys.data(), blocks, &got, &length, &error));
        if (length != tokens) throw Failure("a fetch brought " + std::to_string(length) + " tokens");
        TA_CHECK(ta_seq_verify(ranks[1].pool(), got, &error));
        ranks[1].release(got);
        if (i > 0) seconds.push_back(s);
        // A new namespace, so that the next ones must be fetched again.
        TA_CHECK(ta_namespace_leave(ranks[1].group(), ranks[1].pool(), spaces[1], &error));
        TA_CHECK(ta_namespace_destroy(ranks[1].pool(), spaces[1], &error));
        TA_CHECK(ta_namespace_create(ranks[1].pool(), &o, &spaces[1], &error));
        TA_CHECK(ta_namespace_join(ranks[1].group(), ranks[1].pool(), spaces[1], &error));
    }
    const double fetched = median(seconds);
    row({{"part", "prefix"},
         {"tokens", uint64_t(tokens)},
         {"layers", kLayers},
         {"bytes", blocks * block},
         {"fetch_ms", 1e3 * fetched},
         {"attention_ms", 1e3 * computed},
         {"times_faster", computed / fetched}});
}

// Decode and a chunk of a prompt with part of the blocks in a peer tier, evenly spread, compared with all blocks on the device;
// the resulting bits are the same. Also measures moves between the two tiers.
void bench_peer(const Machines& machines, const BenchShareOptions& options, const Row& row) {
    const double link = machines[0]->peer_bytes_per_s(*machines[1], false);
    const auto nobody = [] {};
    for (Case c : {Case{"batch", 16, 1, 32768, TA_P_DEFAULT}, Case{"one long sequence", 1, 1, 262144, TA_P_DEFAULT},
                   Case{"chunk of a prompt", 1, 2048, 131072, TA_P_DEFAULT}}) {
        constexpr uint32_t kLayers = 8;
        const uint64_t block = Site(*machines[0], kLayers, uint64_t{64} << 20).block_bytes();
        c.tokens = std::clamp<int64_t>(int64_t(options.memory_bytes / 2 / block / c.batch) * 64, 640, c.tokens);
        c.queries = int32_t(std::min(int64_t(c.queries), c.tokens / 64));
        const auto blocks = uint64_t(c.tokens / 64);
        const uint64_t bytes = blocks * c.batch * block;
        Site site(*machines[0], kLayers, bytes * 9 / 8 + (kChunk / 64 + 4 * c.batch) * 3 * block, machines[1].get(),
                  bytes * 9 / 8);
        std::vector<ta_seq> seqs;
        for (size_t i = 0; i < c.batch; ++i) site.fill(seqs.emplace_back(site.create()), c.tokens);
        Attended alone;
        for (const uint64_t percent : {0, 10, 25, 50, 75}) {
            uint64_t there = 0;
            for (const ta_seq seq : seqs) {
                for (uint64_t b = 1; b + 1 < blocks; ++b) {
                    if (b * percent / 100 == (b - 1) * percent / 100) continue;
                    site.move(seq, b, 1, TA_TIER_PEER);
                    ++there;
                }
            }
            const Attended a = measure_attend(site, seqs, c, options.repeats, nobody, c.queries == 1);
            const double seconds = median(c.queries == 1 ? a.device_seconds : a.seconds);
            if (percent == 0) alone = a;
            if (a.out != alone.out) throw Failure("where blocks are changes what comes out");
            const double memory = median(c.queries == 1 ? alone.device_seconds : alone.seconds);
            const double over_link = double(there * block) / kLayers / link;
            row({{"part", "peer"},
                 {"what", c.what},
                 {"batch", c.batch},
                 {"queries", c.queries},
                 {"tokens", uint64_t(c.tokens)},
                 {"percent_on_peer", percent},
                 {"p50_us", 1e6 * seconds},
                 {"device_alone_us", 1e6 * memory},
                 {"link_us", 1e6 * over_link},
                 {"percent_of_bound", 100 * std::max(memory, over_link) / seconds},
                 {"link_gb_s", 1e-9 * link}});
            for (const ta_seq seq : seqs) site.move(seq, 0, blocks - 1, TA_TIER_DEVICE);
        }
    }
    for (const uint32_t layers : {1u, 32u, 113u}) {
        const uint64_t block = Site(*machines[0], layers, uint64_t{256} << 20).block_bytes();
        const auto blocks = std::clamp<uint64_t>(options.memory_bytes / 4 / block, 1, 4096);
        Site site(*machines[0], layers, (blocks + 3 * kChunk / 64 + 16) * block * 9 / 8, machines[1].get(),
                  (blocks + 1) * block * 9 / 8);
        const ta_seq seq = site.create();
        site.fill(seq, int64_t(blocks + 1) * 64);
        for (const ta_tier tier : {TA_TIER_PEER, TA_TIER_DEVICE}) {
            std::vector<double> seconds;
            for (int i = 0; i < options.repeats + 1; ++i) {
                site.move(seq, 1, blocks, tier == TA_TIER_PEER ? TA_TIER_DEVICE : TA_TIER_PEER);
                const auto start = Clock::now();
                site.move(seq, 1, blocks, tier);
                if (i > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
            }
            TA_CHECK(ta_seq_verify(site.pool(), seq, &error));
            const double rate = double(blocks * block) / median(seconds);
            row({{"part", "peer"},
                 {"what", tier == TA_TIER_PEER ? "demote" : "promote"},
                 {"block_bytes", block},
                 {"blocks", blocks},
                 {"p50_us", 1e6 * median(seconds)},
                 {"gb_s", 1e-9 * rate},
                 {"link_gb_s", 1e-9 * link},
                 {"percent", 100 * rate / link}});
        }
    }
}

struct Part {
    const char* name;
    void (*run)(const Machines& machines, const BenchShareOptions& options, const Row& row);
    size_t least_devices = 2, most_devices = 2;
};
constexpr Part kParts[] = {{"partitioned", bench_partitioned, 1, SIZE_MAX},
                           {"beyond", bench_beyond, 2, SIZE_MAX},
                           {"transfers", bench_transfers},
                           {"beside", bench_beside},
                           {"prefix", bench_prefix},
                           {"peer", bench_peer}};

}  // namespace

std::vector<std::string> bench_share_parts() {
    std::vector<std::string> names;
    for (const Part& part : kParts) names.push_back(part.name);
    return names;
}

void bench_share(const Machines& machines, const BenchShareOptions& options, const Row& row) {
    const auto is_asked_for = [&](const Part& part) {
        return std::count(options.parts.begin(), options.parts.end(), part.name) > 0;
    };
    const auto can_run = [&](const Part& part) {
        return machines.size() >= part.least_devices && machines.size() <= part.most_devices;
    };
    for (const Part& part : kParts) {
        if (is_asked_for(part) && !can_run(part))
            throw WrongInput(std::string(part.name) + " is measured with " + (part.most_devices == 2 ? "two" : "several") +
                             " --devices, not " + std::to_string(machines.size()));
    }
    for (const Part& part : kParts) {
        if (is_asked_for(part) || (options.parts.empty() && can_run(part))) part.run(machines, options, row);
    }
}

}  // namespace ta::tools
