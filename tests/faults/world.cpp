#include "faults/world.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "kernels/format/hash.h"
#include "src/api/api.h"
#include "tiering/disk/disk.h"

namespace ta::testing {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// Of calls that are made again when the fault is over: a tier may be read-only for a moment, or a stalled thread on its way
// back.
constexpr auto kPatience = 10s;
// A short deadline for I/O that never comes back, a long one where a busy machine may be slow.
constexpr std::chrono::milliseconds kShortDeadline{20}, kLongDeadline{8000}, kRetryAfter{2};

ta_kv_pool_options options_for(const PoolShape& shape, bool tiered, const std::string& folder, const std::string& file,
                               ta_context* peer, ta_tier_options& tiers) {
    ta_kv_pool_options options = pool_options(kLayers, kHeads, kDim);
    static thread_local ta_layer_group windowed;
    windowed = sized<ta_layer_group>();
    windowed.layers = 1;
    windowed.window = shape.window;
    static const double angle = 0.1;
    static const ta_rotary rotary{sizeof(ta_rotary), TA_ROTARY_HALVES, 2, 1, &angle};
    options.rotary = &rotary;
    if (shape.window > 0) options.layer_groups = &windowed, options.n_layer_groups = 1;
    if (!tiered) return options;
    static const ta_kv_pool_stats sizes = stats(make_pool(make_context(), pool_options(kLayers, kHeads, kDim)));
    const auto on_pages = [](uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
    options.budget_bytes = 6 * sizes.token_block_bytes + shape.device_blocks * sizes.channel_block_bytes;
    tiers = sized<ta_tier_options>();
    tiers.host_bytes = shape.host_blocks * (on_pages(sizes.channel_block_bytes) + 64);
    tiers.peer_bytes = shape.peer_blocks * on_pages(sizes.channel_block_bytes);
    if (shape.peer_blocks > 0) tiers.peer = peer;
    tiers.disk_bytes = shape.disk_blocks ? 8192 + shape.disk_blocks * (on_pages(sizes.channel_block_bytes) + 4096) : 0;
    (shape.persistent ? tiers.disk_path : tiers.disk_folder) = shape.persistent ? file.c_str() : folder.c_str();
    tiers.high_percent = shape.high;
    tiers.low_percent = shape.low;
    options.tiers = &tiers;
    return options;
}

Fault file_fault(FaultKind k) {
    return Fault(int(k) - int(FaultKind::kEio) + int(Fault::kEio));
}
DeviceFault device_fault(FaultKind k) {
    return DeviceFault(int(k) - int(FaultKind::kCopyFails) + int(DeviceFault::kFails));
}

// The file of the disk tier has no name.
int open_disk_file(const std::string& folder) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code ignored;
        const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
        if (target.starts_with(folder)) return ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
    }
    return -1;
}

}  // namespace

const char* name_of(FaultKind k) {
    if (is_file(k)) return name_of(file_fault(k));
    if (is_copy(k)) return name_of(device_fault(k));
    return k == FaultKind::kHooks ? "hooks" : k == FaultKind::kNew ? "new" : "none";
}

Inputs::Layer& Inputs::of(size_t step, uint32_t layer, int64_t n, int64_t queries) {
    const auto found = made_.find({step, layer});
    if (found != made_.end()) return found->second;
    Random random(step * kLayers + layer + 1);
    const auto tensor = [&](int64_t tokens, uint32_t heads) {
        return Tensor(random.normals(tokens * heads * kDim), tokens, heads, kDim);
    };
    Layer made{tensor(n, kHeads), tensor(n, kHeads), tensor(queries, kQHeads)};
    return made_.emplace(std::pair(step, layer), std::move(made)).first->second;
}

World::World(const PoolShape& shape, Inputs& inputs, const Reference* reference, const FaultPlan& fault, bool on_device,
             bool uring)
    : shape_(shape), inputs_(inputs), reference_(reference), fault_(fault), on_device_(on_device), left_(int64_t(fault.at)) {
    allocator_.fails = hook_fails;
    // If memory is to run out, the files must not need any.
    if (tiered() && !is_memory(fault.kind) && !is_memory(fault.counts)) {
        files_ = std::make_shared<FaultyFiles>();
        files_->has_queues = uring;
    }
    seqs.reserve(64);  // what follows a call without memory must not need any
}

World::~World() {
    try {
        finish();
    } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
    }
    plan.reset();
    pool.reset();
    context.reset();
}

// Faults ----------------------------------------------------------------------------------------------------------------------

uint64_t World::source_count() const {
    const FaultKind k = fault_.kind == FaultKind::kNone ? fault_.counts : fault_.kind;
    if (is_memory(k)) return allocations();
    if (is_file(k)) return files_->operations();
    return is_copy(k) && device_ ? device_->operations() : 0;
}

void World::arm() {
    if (!faults_on_ || !tiered() || armed_) return;
    armed_ = true;
    armed_from_ = source_count();
    const FaultKind k = fault_.kind;
    if (k == FaultKind::kNone) {
        if (is_memory(fault_.counts))
            break_memory(fault_.counts == FaultKind::kHooks ? MemorySource::kHooks : MemorySource::kNew, false, INT64_MAX / 2);
        return;
    }
    if (left_ < 0 && !fault_.forever) return;
    const int64_t skip = std::max<int64_t>(left_, 0);
    if (is_memory(k)) {
        break_memory(k == FaultKind::kHooks ? MemorySource::kHooks : MemorySource::kNew, fault_.forever, skip);
    } else if (is_file(k)) {
        files_->break_now(file_fault(k), fault_.forever, uint64_t(skip));
    } else if (device_) {
        device_->break_now(device_fault(k), fault_.forever, uint64_t(skip));
    }
}

void World::disarm() {
    heal_memory();
    if (!armed_) return;
    armed_ = false;
    if (files_) files_->heal();
    if (device_) device_->heal();
    const uint64_t n = source_count() - armed_from_;
    counted_ += n;
    left_ = std::max<int64_t>(left_ - int64_t(n), -1);
}

// Work between calls may fail too, but the test needs its memory.
void World::relax() {
    if (is_memory(fault_.kind) || is_memory(fault_.counts)) disarm();
}

uint64_t World::operations() {
    return counted_;
}

bool World::is_expected(ta_status s) const {
    const FaultKind k = fault_.kind;
    // A group that lacks memory for messages ends.
    if (is_memory(k)) return s == TA_E_MEMORY || s == TA_E_PEER_LOST || s == TA_E_TIMEOUT;
    // A stalled operation still has the file that another pool is to open.
    if (s == TA_E_BUSY) return shape_.persistent && k == FaultKind::kStall;
    // Blocks that cannot be written cannot make room either.
    if (s == TA_E_CORRUPT && k == FaultKind::kShort && fault_.forever) return true;  // half of one byte is the end of a file
    if (is_file(k)) return s == TA_E_IO || s == TA_E_TIER_FULL;
    if (k == FaultKind::kCopyFails) return s == TA_E_DEVICE || s == TA_E_MEMORY || s == TA_E_TIER_FULL;
    return k == FaultKind::kCopyWrong && (s == TA_E_CORRUPT || s == TA_E_TIER_FULL);
}

void World::call(const char* what, Kind kind, const Call& make) {
    if (kind == Kind::kCommon) {
        if (!reference_) record_.before.push_back(state());
        ++calls_;
    }
    ta_error err{};
    arm();
    ta_status status = make(&err);
    if (status == TA_OK) return relax();
    disarm();
    ++failures_;
    EXPECT_TRUE(is_expected(status)) << what << ": " << ta_status_name(status) << ": " << err.message;
    EXPECT_EQ(err.code, status) << what;
    if (kind == Kind::kCommon) --calls_;
    if (kind != Kind::kCreates) expect_state(what);
    if (kind == Kind::kCommon) ++calls_;
    const auto end = Clock::now() + kPatience;
    while ((status = make(&err)) != TA_OK && is_expected(status) && Clock::now() < end) std::this_thread::sleep_for(1ms);
    if (status != TA_OK)
        throw std::runtime_error(std::string(what) + ", again without the fault: " + ta_status_name(status) + ": " +
                                 err.message);
}

// State -----------------------------------------------------------------------------------------------------------------------

Reference::State World::state() {
    Reference::State s;
    s.stats = stats(pool);
    s.stats.bytes_budget = s.stats.bytes_used = s.stats.bytes_cached = s.stats.bytes_peak = 0;
    s.stats.bytes_free = s.stats.bytes_reclaimable = 0;
    s.stats.token_blocks = s.stats.channel_blocks = s.stats.passed_blocks = 0;
    s.stats.appended_tokens -= before_.appended_tokens;
    s.stats.closed_pages -= before_.closed_pages;
    s.stats.reopened_blocks -= before_.reopened_blocks;
    s.stats.copied_blocks -= before_.copied_blocks;
    if (suspends_) s.stats.copied_blocks = 0;
    s.stats.bytes_promised = 0;
    add_spaces(s);
    for (ta_seq seq : seqs) {
        s.lengths.push_back(seq ? length(pool, seq) : -1);
        const int64_t n = std::max<int64_t>(s.lengths.back(), 0);
        Stored values{std::vector<float>(size_t(n * kRow)), std::vector<float>(size_t(n * kRow))};
        uint64_t hash = 0;
        // Of a layer with a window some pages are gone.
        for (uint32_t layer = shape_.window > 0 ? 1 : 0; n > 0 && layer < kLayers; ++layer) {
            if (ta_x_seq_dequantize(pool.get(), seq, layer, 0, n, values.k.data(), values.v.data(), nullptr) != TA_OK) break;
            hash = hash * 31 + hash_bytes(values.k.data(), values.k.size() * 4);  // else it is in the open plan
            hash = hash * 31 + hash_bytes(values.v.data(), values.v.size() * 4);
        }
        s.stored.push_back(hash);
    }
    return s;
}

void World::expect_state(const char* what) {
    if (closed_ || lost_) return;
    const Reference::State& expected = reference_->before.at(calls_);
    Reference::State now;
    // Blocks that are about to move have an owner more; and with a short deadline a read may fail because the machine is busy.
    for (const auto end = Clock::now() + kPatience;; std::this_thread::sleep_for(200us)) {
        now = state();
        const bool counts = std::memcmp(&now.stats, &expected.stats, sizeof now.stats) == 0;
        const bool same = counts && now.lengths == expected.lengths && now.stored == expected.stored;
        if ((same && spaces_match(now, expected)) || Clock::now() > end) break;
    }
    EXPECT_TRUE(spaces_match(now, expected))
        << "after " << what << ": " << name_spaces(now) << ", expected " << name_spaces(expected);
    EXPECT_EQ(now.lengths, expected.lengths) << "after " << what;
    EXPECT_TRUE(now.stored == expected.stored) << "after " << what << ": stored tokens have changed";
    EXPECT_EQ(now.stats.shared_blocks, expected.stats.shared_blocks) << "after " << what;
    EXPECT_EQ(now.stats.appended_tokens, expected.stats.appended_tokens) << "after " << what;
    EXPECT_TRUE(std::memcmp(&now.stats, &expected.stats, sizeof now.stats) == 0) << "after " << what << ": statistics";
}

// Slots in use are those of the sequences' blocks, in each tier.
bool World::slots_match(std::string& why) {
    Pool& p = *pool->impl;
    std::set<const Block*> blocks;
    for (ta_seq seq : seqs) {
        if (seq == 0) continue;
        const Status s = p.sequences().inspect(seq, [&](const Sequence& sequence) {
            for (const BlockPtr& b : sequence.blocks) blocks.insert(b.get());
            return Status();
        });
        if (!s.ok()) return true;  // in the open plan
    }
    uint64_t expected[kTiers] = {}, found[kTiers] = {};
    const std::vector<PrefixStore::Record> published = p.prefixes().records();
    for (const PrefixStore::Record& r : published) blocks.insert(r.block.get());
    for (const Block* b : blocks) {
        if (b->dropped()) continue;
        ++expected[size_t(b->tier())];
        // A block that came back from a persistent disk keeps its record there; a flush writes one beside it.
        if (p.blocks().has_record(*b)) ++expected[size_t(TierKind::kDisk)];
    }
    const BlockStore::Usage usage = p.blocks().usage();
    found[0] = usage.token_blocks + usage.channel_blocks + usage.passed_blocks;
    if (usage.used > p.blocks().budget()) why += "the device tier is beyond its budget; ";
    for (TierKind kind : {TierKind::kPeer, TierKind::kHost, TierKind::kDisk}) {
        if (!p.residency().tier(kind)) continue;
        const TierStats s = p.residency().tier(kind)->stats();
        for (const uint64_t used : s.slots_used) found[size_t(kind)] += used;
        if (s.used > s.budget) why += "a tier is beyond its budget; ";
    }
    for (size_t t = 0; t < kTiers; ++t) {
        if (found[t] != expected[t])
            why += std::string("the ") + ta::name_of(TierKind(t)) + " tier has " + std::to_string(found[t]) +
                   " slots in use for " + std::to_string(expected[t]) + " blocks; ";
    }
    return why.empty();
}

void World::expect_slots(const char* what) {
    std::string why;
    for (const auto end = Clock::now() + kPatience; why.clear(), !slots_match(why);) {
        if (Clock::now() > end) break;
        std::this_thread::sleep_for(200us);
    }
    EXPECT_EQ(why, "") << what;
}

void World::keep(const std::vector<float>& values) {
    if (!reference_) {
        record_.results.insert(record_.results.end(), values.begin(), values.end());
        return;
    }
    for (size_t i = 0; i < values.size(); ++i) {
        const float expected = reference_->results.at(results_ + i);
        if (std::memcmp(&values[i], &expected, sizeof expected) == 0) continue;
        ADD_FAILURE() << "step " << steps_ << ", value " << i << " is " << values[i] << ", without tiers " << expected;
        break;
    }
    results_ += values.size();
}

void World::settle() {
    if (!tiered() || closed_) return;
    const Pool& p = *pool->impl;
    const auto end = Clock::now() + kPatience;
    arm();
    while (p.mover()->busy() && Clock::now() < end) std::this_thread::sleep_for(100us);
    relax();
    EXPECT_FALSE(p.mover()->busy()) << "something moves for ever";
    // The tier gave up stalled operations; they come back when the fault is over.
    if (fault_.kind == FaultKind::kStall) disarm();
    const Tier* disk = p.residency().tier(TierKind::kDisk);
    uint64_t left = 0;
    const auto some_left = [&] {
        if (!disk) return false;
        const TierStats s = disk->stats();
        left = s.in_flight + s.erasing;  // an erase waits for nobody, and may be about to start
        return left > 0;
    };
    while (some_left() && Clock::now() < end) std::this_thread::sleep_for(100us);
    EXPECT_EQ(left, 0u) << "I/O that never ends";
}

ta_residency World::residency(size_t s) {
    return testing::residency(pool, seqs[s]);
}

const BlockPtr& World::block(size_t s, size_t b) {
    const BlockPtr* found = nullptr;
    const Status status = pool->impl->sequences().inspect(seqs[s], [&](const Sequence& sequence) {
        found = &sequence.blocks.at(b);
        return Status();
    });
    if (!status.ok()) throw std::runtime_error("the sequence is in a plan");
    return *found;
}

// Calls -----------------------------------------------------------------------------------------------------------------------

Status World::create_context() {
    ta::Context::Options options;
    options.threads = 1;
    options.allocator = CallbackSet<ta_allocator>(allocator_.hooks());
    Seams seams;
    if (files_) seams.files = files_;
    seams.io_deadline = fault_.kind == FaultKind::kStall ? kShortDeadline : kLongDeadline;
    seams.io_retry_after = kRetryAfter;
    SimulatedDevice* device = nullptr;
    if (on_device_) {
        auto simulated = std::make_unique<SimulatedDevice>(fault_.at + 1);
        device = simulated.get();
        seams.device = std::move(simulated);
    }
    Result<std::shared_ptr<ta::Context>> made = ta::Context::create(std::move(options), std::move(seams));
    if (!made.ok()) return std::move(made).status();
    context.reset(new ta_context{made.take()});
    device_ = device;
    if (shape_.peer_blocks > 0 && !peer_context_) {
        Seams peer_seams;
        if (on_device_) peer_seams.device = std::make_unique<SimulatedDevice>(fault_.at + 2, 1);
        peer_context_.reset(new ta_context{ta::Context::create({.threads = 1}, std::move(peer_seams)).take()});
    }
    if (armed_ && (is_copy(fault_.kind) || is_copy(fault_.counts))) {  // before there was a device to set the fault on
        armed_ = false;
        arm();
    }
    return {};
}

void World::make_pool() {
    call("ta_context_create", Kind::kCreates, [&](ta_error* err) { return api::guard(err, [&] { return create_context(); }); });
    create_pool();
}

void World::create_pool() {
    ta_tier_options tiers;
    const std::string file = folder_.file("tier");
    const ta_kv_pool_options options = options_for(shape_, tiered(), folder_.path(), file, peer_context_.get(), tiers);
    call("ta_kv_pool_create", Kind::kCreates, [&](ta_error* err) {
        ta_kv_pool* p = nullptr;
        const ta_status status = ta_kv_pool_create(context.get(), &options, &p, err);
        pool.reset(p);
        return status;
    });
    call("ta_plan_create", Kind::kCreates, [&](ta_error* err) {
        ta_plan* p = nullptr;
        const ta_status status = ta_plan_create(pool.get(), nullptr, &p, err);
        plan.reset(p);
        return status;
    });
}

size_t World::add() {
    call("ta_seq_create", Kind::kCommon, [&](ta_error* err) {
        ta_seq seq = 0;
        const ta_status status = ta_seq_create(pool.get(), &seq, err);
        if (status == TA_OK) seqs.push_back(seq);
        return status;
    });
    return seqs.size() - 1;
}

size_t World::fork(size_t from) {
    call("ta_seq_fork", Kind::kCommon, [&](ta_error* err) {
        ta_seq seq = 0;
        const ta_status status = ta_seq_fork(pool.get(), seqs[from], &seq, err);
        if (status == TA_OK) seqs.push_back(seq);
        return status;
    });
    return seqs.size() - 1;
}

void World::truncate(size_t s, int64_t length) {
    call("ta_seq_truncate", Kind::kCommon, [&](ta_error* err) { return ta_seq_truncate(pool.get(), seqs[s], length, err); });
}

void World::forget(size_t s, int64_t first, int64_t n) {
    call("ta_seq_forget", Kind::kCommon,
         [&](ta_error* err) { return ta_seq_forget(pool.get(), seqs[s], first, n, nullptr, err); });
}

void World::shift(size_t s, int64_t first, int64_t n) {
    call("ta_seq_shift", Kind::kCommon, [&](ta_error* err) { return ta_seq_shift(pool.get(), seqs[s], first, n, err); });
}

void World::release(size_t s) {
    call("ta_seq_release", Kind::kCommon, [&](ta_error* err) {
        const ta_status status = ta_seq_release(pool.get(), seqs[s], err);
        if (status == TA_OK) seqs[s] = 0;
        return status;
    });
}

void World::step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new, int64_t place) {
    std::vector<ta_seq> ids;
    std::vector<int32_t> n_query;
    std::vector<int64_t> places;
    int64_t n = 0, queries = 0;
    for (size_t i = 0; i < members.size(); ++i) {
        ids.push_back(seqs[members[i]]);
        n_query.push_back(place < 0 ? std::min(n_new[i], 2) : 2);
        places.push_back(place);
        places.push_back(length(pool, ids.back()) + n_new[i] - 1 - place);
        n += n_new[i];
        queries += n_query[i];
    }
    auto how = sized<ta_step_options>();
    if (place >= 0) how.query_positions = places.data();
    call("ta_plan_begin", Kind::kCommon, [&](ta_error* err) {
        return ta_plan_begin(plan.get(), uint32_t(ids.size()), ids.data(), n_new.data(), n_query.data(), &how, err);
    });
    std::vector<float> lse(size_t(queries * kQHeads));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        Inputs::Layer& in = inputs_.of(steps_, layer, n, queries);
        Tensor out(queries, kQHeads, kDim);
        call("ta_append", Kind::kCommon,
             [&](ta_error* err) { return ta_append(plan.get(), layer, in.k.view(), in.v.view(), err); });
        call("ta_attend", Kind::kCommon,
             [&](ta_error* err) { return ta_attend(plan.get(), layer, in.q.view(), out.view(), lse.data(), nullptr, err); });
        keep(out.values());
        keep(lse);
    }
    call("ta_plan_end", Kind::kCommon, [&](ta_error* err) { return ta_plan_end(plan.get(), nullptr, err); });
    ++steps_;
}

ta_ticket World::ask(size_t s, uint64_t first, uint64_t n, ta_tier tier, bool prefetch) {
    ta_ticket ticket = 0;
    call(prefetch ? "ta_seq_prefetch" : "ta_seq_move", Kind::kTierOnly, [&](ta_error* err) {
        return prefetch ? ta_seq_prefetch(pool.get(), seqs[s], first, n, &ticket, err)
                        : ta_seq_move(pool.get(), seqs[s], first, n, tier, &ticket, err);
    });
    return ticket;
}

ta_move_info World::wait_for(ta_ticket ticket, bool cancelled) {
    auto info = sized<ta_move_info>();
    constexpr int64_t kForEver = 30'000'000'000;
    call("ta_move_wait", Kind::kTierOnly,
         [&](ta_error* err) { return ta_move_wait(pool.get(), ticket, kForEver, &info, err); });
    EXPECT_NE(info.state, TA_MOVE_QUEUED) << "a move hangs";
    EXPECT_NE(info.state, TA_MOVE_RUNNING) << "a move hangs";
    if (info.state == TA_MOVE_FAILED) {
        ++failures_;
        EXPECT_TRUE(is_expected(info.status)) << "move: " << ta_status_name(info.status);
    }
    EXPECT_EQ(info.failed > 0, info.state == TA_MOVE_FAILED);
    const uint64_t sum = info.moved + info.present + info.skipped + info.failed;
    EXPECT_TRUE(sum == info.blocks || (cancelled && sum < info.blocks));
    EXPECT_EQ(info.state == TA_MOVE_CANCELLED, sum < info.blocks && info.failed == 0);
    return info;
}

void World::move(size_t s, uint64_t first, uint64_t n, ta_tier tier) {
    if (!tiered()) return;
    ta_move_info info = wait_for(ask(s, first, n, tier, false));
    const auto there = [&] { return info.moved + info.present == n; };
    if (there()) return;
    disarm();
    const bool faults = std::exchange(faults_on_, false);
    for (const auto end = Clock::now() + kPatience; !there() && Clock::now() < end; std::this_thread::sleep_for(1ms)) {
        info = move_now(pool, seqs[s], first, n, tier);
    }
    EXPECT_TRUE(there()) << "a move fails for ever: " << ta_status_name(info.status);
    expect_state("a move that failed");
    faults_on_ = faults;
}

void World::prefetch(size_t s, uint64_t first, uint64_t n, bool wait) {
    if (!tiered()) return;
    const ta_ticket ticket = ask(s, first, n, TA_TIER_DEVICE, true);
    if (wait) wait_for(ticket);
}

void World::move_and_cancel(size_t s, uint64_t first, uint64_t n, ta_tier tier) {
    if (!tiered()) return;
    const ta_ticket ticket = ask(s, first, n, tier, false);
    call("ta_move_cancel", Kind::kTierOnly, [&](ta_error* err) { return ta_move_cancel(pool.get(), ticket, err); });
    wait_for(ticket, true);
    disarm();
    expect_state("a cancelled move");
}

void World::move_in_background(size_t s, uint64_t first, uint64_t n, ta_tier tier) {
    if (tiered()) ask(s, first, n, tier, false);
}

void World::pin(size_t s, uint64_t first, uint64_t n, bool pinned) {
    if (!tiered()) return;
    call(pinned ? "ta_seq_pin" : "ta_seq_unpin", Kind::kTierOnly, [&](ta_error* err) {
        return pinned ? ta_seq_pin(pool.get(), seqs[s], first, n, err) : ta_seq_unpin(pool.get(), seqs[s], first, n, err);
    });
}

void World::retain(size_t s, uint64_t first, uint64_t n, uint32_t priority) {
    if (!tiered()) return;
    auto r = sized<ta_retention>();
    r.priority = priority;
    call("ta_seq_retain", Kind::kTierOnly,
         [&](ta_error* err) { return ta_seq_retain(pool.get(), seqs[s], first, n, &r, err); });
}

void World::suspend(size_t s, ta_tier tier) {
    suspends_ = true;
    if (!tiered()) return;
    ta_ticket ticket = 0;
    call("ta_seq_suspend", Kind::kTierOnly,
         [&](ta_error* err) { return ta_seq_suspend(pool.get(), seqs[s], tier, &ticket, err); });
    wait_for(ticket, true);
    disarm();
    expect_state("a suspended sequence");
}

void World::reserve(size_t s, int64_t tokens) {
    if (!tiered()) return;
    call("ta_seq_reserve", Kind::kTierOnly, [&](ta_error* err) { return ta_seq_reserve(pool.get(), seqs[s], tokens, 0, err); });
}

void World::verify(size_t s) {
    call("ta_seq_verify", Kind::kCommon, [&](ta_error* err) { return ta_seq_verify(pool.get(), seqs[s], err); });
}

ta_status World::saved(ta_status status, const ta_error& err, const std::string& path) const {
    if (status == TA_OK || !std::strstr(err.message, "is there and complete")) return status;
    EXPECT_TRUE(fault_.forever && is_file(fault_.kind)) << err.message;
    EXPECT_TRUE(std::filesystem::remove(path)) << err.message;
    return status;
}

size_t World::save_and_load(size_t s) {
    const std::string path = folder_.file("sequence");
    // A save waits for its file as long as the system does.
    const bool faults = faults_on_;
    if (fault_.kind == FaultKind::kStall) {
        disarm();
        faults_on_ = false;
    }
    call("ta_seq_save", Kind::kCommon,
         [&](ta_error* err) { return saved(ta_seq_save(pool.get(), seqs[s], path.c_str(), nullptr, err), *err, path); });
    EXPECT_EQ(folder_.entries(), 1u) << "a save that failed has left something behind";
    call("ta_seq_load", Kind::kCommon, [&](ta_error* err) {
        ta_seq seq = 0;
        const ta_status status = ta_seq_load(pool.get(), path.c_str(), nullptr, &seq, err);
        if (status == TA_OK) seqs.push_back(seq);
        return status;
    });
    faults_on_ = faults;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) std::filesystem::remove(entry.path());
    return seqs.size() - 1;
}

size_t World::send_and_receive(size_t s) {
    call("ta_seq_receive", Kind::kCommon, [&](ta_error* err) {
        GroupHandle ranks[2];
        ta_group_id id;
        ta_status status = ta_group_make_id(TA_GROUP_LOCAL, &id, err);
        for (uint32_t r = 0; r < 2 && status == TA_OK; ++r) {
            auto options = group_options(id, r, 2);
            options.silence_ms = 2000;
            options.operation_ms = options.connect_ms = 4000;
            options.staging_bytes = 3 * stats(pool).channel_block_bytes;
            ta_group* made = nullptr;
            status = ta_group_create(context.get(), &options, &made, err);
            ranks[r].reset(made);
        }
        ta_group_state group_state = 0;
        if (status == TA_OK) status = ta_group_poll(ranks[0].get(), -1, &group_state, err);
        if (status == TA_OK) status = ta_group_poll(ranks[1].get(), -1, &group_state, err);
        ta_ticket sent = 0, got = 0;
        if (status == TA_OK) status = ta_seq_send(ranks[0].get(), pool.get(), seqs[s], 1, 1, TA_SEND_COPY, &sent, err);
        if (status == TA_OK) status = ta_seq_receive(ranks[1].get(), pool.get(), 0, 1, &got, err);
        auto info = sized<ta_transfer_info>();
        if (status == TA_OK) status = ta_transfer_wait(ranks[1].get(), got, -1, &info, err);
        if (status != TA_OK) return status;
        if (info.state == TA_MOVE_DONE) seqs.push_back(info.seq);
        std::snprintf(err->message, sizeof err->message, "%s", info.reason);
        return err->code = info.status;
    });
    return seqs.size() - 1;
}

void World::partition(size_t s) {
    call("ta_seq_partition", Kind::kCommon, [&](ta_error* err) {
        if (on_device_) return ta_status(TA_OK);  // only CPU contexts have it
        ta_group_id id;
        ta_status status = ta_group_make_id(TA_GROUP_LOCAL, &id, err);
        if (status != TA_OK) return status;
        auto options = group_options(id, 0, 1);
        ta_group* made = nullptr;
        status = ta_group_create(context.get(), &options, &made, err);
        if (status != TA_OK) return status;
        group.reset(made);
        const auto how = sized<ta_partition_options>();
        return ta_seq_partition(made, pool.get(), seqs[s], &how, err);
    });
}

void World::damage(size_t s, size_t b) {
    settle();
    BlockBytes(*this, s, b).flip(payload_bytes(s, b) / 3, 4);
}

size_t World::payload_bytes(size_t s, size_t b) {
    return pool->impl->geometry().payload_bytes(block(s, b)->kind());
}

BlockBytes::BlockBytes(World& world, size_t s, size_t b) {
    world.damaged = true;
    const Block& hit = *world.block(s, b);
    Pool& p = *world.pool->impl;
    if (hit.tier() != TierKind::kDisk) {
        memory_ = hit.slot();
        return;
    }
    std::vector<uint8_t> bytes(p.geometry().slot_bytes(hit.kind())), file;
    if (!p.reader().read(hit, b, bytes.data()).ok()) throw std::runtime_error("the block is damaged already");
    fd_ = open_disk_file(world.folder());
    struct stat info;
    if (fd_ >= 0 && fstat(fd_, &info) == 0) file.resize(size_t(info.st_size));
    if (file.empty() || pread(fd_, file.data(), file.size(), 0) != ssize_t(file.size()))
        throw std::runtime_error("the disk tier's file cannot be read");
    // A write that was given up may have left the same bytes in another slot.
    for (auto at = file.begin(); (at = std::search(at, file.end(), bytes.begin(), bytes.end())) != file.end(); ++at)
        offsets_.push_back(at - file.begin());
    if (offsets_.empty()) throw std::runtime_error("the block is not in the disk tier's file");
}

BlockBytes::~BlockBytes() {
    if (fd_ >= 0) ::close(fd_);
}

void BlockBytes::flip(size_t at, int bit) {
    if (memory_) {
        memory_[at] ^= uint8_t(1 << bit);
        return;
    }
    for (const off_t offset : offsets_) {
        uint8_t byte = 0;
        const off_t where = offset + off_t(at);
        bool done = pread(fd_, &byte, 1, where) == 1;
        byte ^= uint8_t(1 << bit);
        done = done && pwrite(fd_, &byte, 1, where) == 1;
        if (!done) throw std::runtime_error("the disk tier's file cannot be written");
    }
}

void World::refuse_step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new) {
    std::vector<ta_seq> ids;
    for (size_t m : members) ids.push_back(seqs[m]);
    ta_error err;
    const ta_status status = ta_plan_begin(plan.get(), uint32_t(ids.size()), ids.data(), n_new.data(), nullptr, nullptr, &err);
    EXPECT_TRUE(status == TA_E_CORRUPT || status == TA_E_TIER_FULL || status == TA_E_IO) << ta_status_name(status);
    if (status == TA_OK) require(ta_plan_abort(plan.get(), &err), err);
}

void World::refuse_move(size_t s, uint64_t b, ta_tier tier) {
    const ta_move_info info = move_now(pool, seqs[s], b, 1, tier);
    EXPECT_EQ(info.status, TA_E_CORRUPT) << "a damaged block has moved";
    EXPECT_EQ(info.block, int64_t(b));
    ta_error err;
    EXPECT_EQ(ta_seq_verify(pool.get(), seqs[s], &err), TA_E_CORRUPT);
    EXPECT_EQ(err.block, int64_t(b));
}

void World::close_pool() {
    if (!reference_) record_.before.push_back(state());
    call("ta_kv_pool_close", Kind::kTierOnly, [&](ta_error* err) { return ta_kv_pool_close(pool.get(), err); });
    closed_ = true;
}

// The end ---------------------------------------------------------------------------------------------------------------------

void World::finish() {
    if (finished_) return;
    finished_ = true;
    disarm();
    const bool faults = faults_on_;
    faults_on_ = false;
    if (pool && !closed_) {
        if (!reference_) record_.before.push_back(state());
        if (tiered()) {
            settle();
            expect_state("the end");
            // Headers that could not be erased are tried again. With a short deadline an fsync may be late on a busy machine.
            if (shape_.persistent) {
                auto& disk = static_cast<DiskTier&>(*pool->impl->residency().tier(TierKind::kDisk));
                Status flushed = disk.flush();
                for (const auto end = Clock::now() + kPatience; !flushed.ok() && Clock::now() < end; flushed = disk.flush()) {
                }
                EXPECT_TRUE(flushed.ok()) << "a flush fails at the end";
            }
            expect_slots("at the end");
            for (size_t i = 0; !damaged && i < seqs.size(); ++i) {
                const auto blocks = seqs[i] ? size_t(length(pool, seqs[i]) + 63) / 64 : 0;
                for (size_t b = 0; b < blocks; ++b)
                    EXPECT_FALSE(block(i, b)->stuck()) << "a good block is taken for a damaged one";
            }
            for (ta_seq seq : seqs) {
                ta_status status = TA_OK;
                for (int i = 0; i < 100 && seq && (status = ta_seq_verify(pool.get(), seq, nullptr)) == TA_E_IO; ++i) {
                }
                EXPECT_EQ(status, TA_OK) << "at the end";
            }
        }
        // Giving back needs neither memory nor files.
        faults_on_ = faults && !is_copy(fault_.kind);
        arm();
        for (ta_seq& seq : seqs) {
            if (seq && ta_seq_release(pool.get(), seq, nullptr) != TA_OK) ++failures_;
            seq = 0;
        }
        disarm();
        if (tiered()) expect_slots("when all is released");
    }
    if (!is_copy(fault_.kind) && !is_copy(fault_.counts)) arm();
    plan.reset();
    group.reset();
    pool.reset();
    device_ = nullptr;
    context.reset();
    disarm();
    EXPECT_EQ(allocator_.bytes_alive(), 0u) << "leaked";
    EXPECT_EQ(allocator_.faults(), 0u) << "the hooks were called with wrong sizes or alignments";
    if (!files_) return;
    for (const auto end = Clock::now() + kPatience; files_.use_count() > 1 && Clock::now() < end;)
        std::this_thread::sleep_for(200us);
    EXPECT_TRUE(files_->wait_until_closed()) << "a file stays open";
    if (shape_.persistent) {
        for (const char* name : {"tier", "tier.new"}) std::filesystem::remove(folder_.file(name));
    }
    EXPECT_EQ(folder_.entries(), 0u) << "a file is left behind";
}

}  // namespace ta::testing
