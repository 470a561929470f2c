// One life of a pool that drops blocks, in which at most one fault is set: calls through the ABI, and what is missing after
// each. A call that fails has changed nothing, but that a begin may have dropped what it may drop; made again without the fault
// it succeeds.
#pragma once

#include <algorithm>
#include <set>

#include "faults/world.h"
#include "src/api/api.h"

namespace ta::testing {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;
inline constexpr auto kPatience = 10s;

struct DropShape {
    const char* name;
    uint64_t host_blocks, disk_blocks;
    ta_eviction eviction;
    bool simulated;  // the device
};

// Each block's share of a query's softmax, in float64, as the pool that has all blocks stores it; and the stored blocks at the
// end.
struct DropReference {
    struct Part {
        double sum = 0;
        std::vector<double> o = std::vector<double>(kDim, 0.0);
    };
    std::vector<std::vector<Part>> queries;      // of each: [layer, head, block]
    std::vector<std::vector<Stored>> sequences;  // [layer] of each that is left
    std::set<uint64_t> missing;                  // of a pool without tiers below, and without faults
};

class Life {
  public:
    // `shape`: nullptr for the pool that makes the reference.
    Life(const DropShape* shape, Inputs& inputs, DropReference& reference, const FaultPlan& fault, bool uring)
        : shape_(shape), inputs_(inputs), reference_(reference), fault_(fault), left_(int64_t(fault.at)) {
        const FaultKind counted = fault.kind == FaultKind::kNone ? fault.counts : fault.kind;
        allocator_.fails = hook_fails;
        ta::Context::Options options;
        options.threads = 1;
        options.allocator = CallbackSet<ta_allocator>(allocator_.hooks());
        Seams seams;
        if (shape && !is_memory(counted)) {  // FaultyFiles takes memory where no library would
            files_ = std::make_shared<FaultyFiles>();
            files_->has_queues = uring;
            seams.files = files_;
        }
        seams.io_retry_after = 1ms;
        if (shape && shape->simulated) {
            auto simulated = std::make_unique<SimulatedDevice>(fault.at + 1);
            device_ = simulated.get();
            seams.device = std::move(simulated);
        }
        Result<std::shared_ptr<ta::Context>> made = ta::Context::create(std::move(options), std::move(seams));
        if (!made.ok()) throw std::runtime_error("no context");
        context_.reset(new ta_context{made.take()});
        auto o = pool_options(kLayers, kHeads, kDim);
        static const ta_kv_pool_stats sizes = stats(make_pool(make_context(), o));
        auto tiers = sized<ta_tier_options>();
        if (shape) {
            o.budget_bytes = 6 * sizes.token_block_bytes + 8 * sizes.channel_block_bytes;
            block_bytes_ = sizes.channel_block_bytes;
            most_blocks_ = o.budget_bytes / block_bytes_;
            const uint64_t on_pages = (sizes.channel_block_bytes + 4095) / 4096 * 4096;
            tiers.host_bytes = shape->host_blocks * (on_pages + 64);
            tiers.disk_bytes = shape->disk_blocks ? 8192 + shape->disk_blocks * (on_pages + 4096) : 0;
            tiers.disk_folder = folder_.path().c_str();
            tiers.eviction = shape->eviction;
            tiers.high_percent = tiers.low_percent = 100;
            tiers.drop_coldest = TA_ON;
            tiers.begin_wait_ms = 20;
            o.tiers = &tiers;
        }
        pool_ = make_pool(context_, o);
        plan_ = make_plan(pool_);
        other_ = make_plan(pool_);
    }
    ~Life() { disarm(); }

    size_t add() {
        ta_seq id = 0;
        call("ta_seq_create", [&](auto* err) { return ta_seq_create(pool_.get(), &id, err); });
        seqs_.emplace_back().id = id;
        return seqs_.size() - 1;
    }
    size_t fork(size_t from) {
        ta_seq id = 0;
        call("ta_seq_fork", [&](auto* err) { return ta_seq_fork(pool_.get(), seqs_[from].id, &id, err); });
        seqs_.push_back(seqs_[from]);
        seqs_.back().id = id;
        look(false);
        return seqs_.size() - 1;
    }
    void release(size_t s) {
        call("ta_seq_release", [&](auto* err) { return ta_seq_release(pool_.get(), seqs_[s].id, err); });
        seqs_[s] = {};
        look(false);
    }
    void truncate(size_t s, uint64_t blocks) {
        call("ta_seq_truncate",
             [&](auto* err) { return ta_seq_truncate(pool_.get(), seqs_[s].id, int64_t(blocks) * 64, err); });
        seqs_[s].blocks.resize(blocks);
        seqs_[s].length = int64_t(blocks) * 64;
        seqs_[s].full = blocks;
        look(false);
    }
    void pin(size_t s, uint64_t first, uint64_t n, bool pinned) {
        if (!shape_) return;
        call("ta_seq_pin",
             [&](auto* err) { return (pinned ? ta_seq_pin : ta_seq_unpin)(pool_.get(), seqs_[s].id, first, n, err); });
        for (uint64_t b = first; b < first + n; ++b)
            pinned ? (void)pinned_.insert(seqs_[s].blocks[b]) : (void)pinned_.erase(seqs_[s].blocks[b]);
    }
    // Passes over what is missing; where there is no room some blocks fail.
    void move(size_t s, ta_tier tier) {
        if (!shape_ || tier_missing(tier)) return;
        ta_ticket ticket = 0;
        call("ta_seq_move",
             [&](auto* err) { return ta_seq_move(pool_.get(), seqs_[s].id, 0, seqs_[s].blocks.size(), tier, &ticket, err); });
        auto info = sized<ta_move_info>();
        call("ta_move_wait", [&](auto* err) { return ta_move_wait(pool_.get(), ticket, 30'000'000'000, &info, err); });
        EXPECT_TRUE(info.state == TA_MOVE_DONE || info.state == TA_MOVE_FAILED) << "a move hangs";
        EXPECT_TRUE(info.failed == 0 || info.status == TA_E_TIER_FULL || is_expected(info.status));
        look(false);
    }
    void verify(size_t s) {
        call("ta_seq_verify", [&](auto* err) { return ta_seq_verify(pool_.get(), seqs_[s].id, err); });
    }
    // Appends, then attends in a step of its own, so that all tokens are read as they are stored.
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new) {
        begin(plan_, members, n_new, 0);
        int64_t n = 0;
        for (const int32_t x : n_new) n += x;
        const int64_t queries = int64_t(members.size());
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Inputs::Layer& in = inputs_.of(steps_, layer, n, queries);
            call("ta_append", [&](auto* err) { return ta_append(plan_.get(), layer, in.k.view(), in.v.view(), err); });
        }
        call("ta_plan_end", [&](auto* err) { return ta_plan_end(plan_.get(), nullptr, err); });
        ended(members, n_new);
        const std::vector<int32_t> none(members.size(), 0);
        begin(plan_, members, none, 1);
        std::vector<float> out[kLayers], lse[kLayers];
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor o(queries, kQHeads, kDim), &q = inputs_.of(steps_, layer, n, queries).q;
            lse[layer].resize(size_t(queries * kQHeads));
            call("ta_attend",
                 [&](auto* err) { return ta_attend(plan_.get(), layer, q.view(), o.view(), lse[layer].data(), nullptr, err); });
            out[layer] = o.values();
        }
        call("ta_plan_end", [&](auto* err) { return ta_plan_end(plan_.get(), nullptr, err); });
        ended(members, none);
        for (size_t m = 0; m < members.size(); ++m) {
            if (!shape_) reference_.queries.push_back(parts_of(members[m], m, n, queries));
            expect_attention(seqs_[members[m]], m, out, lse);
        }
        ++steps_;
    }
    // Another plan holds the sequence, of which nothing may go meanwhile. Not where all room that blocks on disk come through
    // may have to wait for that plan.
    bool holds() const { return shape_ && !(shape_->simulated && shape_->disk_blocks > 0); }
    void hold(size_t s) {
        if (holds()) begin(other_, {s}, {0}, 0);
    }
    void let_go(size_t s) {
        if (!holds()) return;
        call("ta_plan_abort", [&](auto* err) { return ta_plan_abort(other_.get(), err); });
        seqs_[s].held = false;
        look(false);
    }
    // A step that cannot have room: nothing is lost for it, with a fault or without.
    void refuse(size_t s) {
        if (!shape_) return;
        const int32_t n = int32_t(most_blocks_ - 1) * 64;
        ta_error err{};
        arm();
        const ta_status status = ta_plan_begin(plan_.get(), 1, &seqs_[s].id, &n, nullptr, nullptr, &err);
        disarm();
        EXPECT_TRUE(status == TA_E_TIER_FULL || is_expected(status)) << ta_status_name(status) << ": " << err.message;
        look(false);
    }
    void finish();

    uint64_t operations() const { return counted_; }
    uint64_t failures() const { return failures_; }
    // Blocks that begins dropped which then failed.
    uint64_t lost_by_failures() const { return lost_by_failures_; }
    const std::set<uint64_t>& missing() const { return missing_; }

  private:
    struct Seq {
        ta_seq id = 0;  // 0: released
        int64_t length = 0;
        uint64_t full = 0;             // blocks, when the latest begin came
        std::vector<uint64_t> blocks;  // numbers, the same where two share one
        bool held = false;
    };
    bool tier_missing(ta_tier t) const {
        return t == TA_TIER_HOST ? shape_->host_blocks == 0 : t == TA_TIER_DISK && shape_->disk_blocks == 0;
    }
    uint64_t dropped() const { return shape_ ? move_stats(pool_).dropped_blocks : 0; }
    bool is_missing(ta_seq id, uint64_t b) const {
        auto info = sized<ta_x_block_info>();
        ta_error err;
        const ta_status s = ta_x_seq_block(pool_.get(), id, b, &info, nullptr, 0, &err);
        EXPECT_TRUE(s == TA_OK || (s == TA_E_STATE && err.block == int64_t(b))) << ta_status_name(s) << ": " << err.message;
        return s != TA_OK;
    }

    uint64_t source_count() const {
        const FaultKind k = fault_.kind == FaultKind::kNone ? fault_.counts : fault_.kind;
        if (is_memory(k)) return allocations();
        if (is_file(k)) return files_->operations();
        return device_ ? device_->operations() : 0;
    }
    void arm() {
        if (!shape_) return;
        armed_ = true;
        armed_from_ = source_count();
        const FaultKind k = fault_.kind == FaultKind::kNone ? fault_.counts : fault_.kind;
        const bool waits = fault_.kind != FaultKind::kNone && (left_ >= 0 || fault_.forever);
        const int64_t skip = waits ? std::max<int64_t>(left_, 0) : INT64_MAX / 2;
        if (is_memory(k)) {
            break_memory(k == FaultKind::kHooks ? MemorySource::kHooks : MemorySource::kNew, fault_.forever, skip);
        } else if (waits && is_file(k)) {
            files_->break_now(Fault(int(k) - int(FaultKind::kEio) + int(Fault::kEio)), fault_.forever, uint64_t(skip));
        } else if (waits && device_) {
            device_->break_now(DeviceFault(int(k) - int(FaultKind::kCopyFails) + int(DeviceFault::kFails)), fault_.forever,
                               uint64_t(skip));
        }
    }
    void disarm() {
        heal_memory();
        if (!std::exchange(armed_, false)) return;
        if (files_) files_->heal();
        if (device_) device_->heal();
        const uint64_t n = source_count() - armed_from_;
        counted_ += n;
        left_ = std::max<int64_t>(left_ - int64_t(n), -1);
    }
    bool is_expected(ta_status s) const {
        const FaultKind k = fault_.kind;
        if (is_memory(k)) return s == TA_E_MEMORY;
        if (is_file(k)) return s == TA_E_IO || s == TA_E_TIER_FULL;
        if (k == FaultKind::kCopyFails) return s == TA_E_DEVICE || s == TA_E_MEMORY || s == TA_E_TIER_FULL;
        return k == FaultKind::kCopyWrong && (s == TA_E_CORRUPT || s == TA_E_TIER_FULL);
    }
    void call(const char* what, const std::function<ta_status(ta_error*)>& make, bool begins = false) {
        ta_error err{};
        arm();
        ta_status status = make(&err);
        disarm();
        if (status == TA_OK) return;
        SCOPED_TRACE(what);
        ++failures_;
        EXPECT_TRUE(is_expected(status)) << ta_status_name(status) << ": " << err.message;
        EXPECT_EQ(err.code, status);
        // docs/tiers.md: memory, a file or a GPU that fails after the choice leaves a begin that failed and has dropped blocks.
        const size_t before = missing_.size();
        look(begins);
        lost_by_failures_ += missing_.size() - before;
        const auto end = Clock::now() + kPatience;
        while ((status = make(&err)) != TA_OK && is_expected(status) && Clock::now() < end) std::this_thread::sleep_for(1ms);
        if (status != TA_OK)
            throw std::runtime_error(std::string(what) + ", again without the fault: " + ta_status_name(status) + ": " +
                                     err.message);
    }
    void begin(const Plan& plan, const std::vector<size_t>& members, const std::vector<int32_t>& n_new, int32_t n_query) {
        std::vector<ta_seq> ids;
        for (const size_t m : members) ids.push_back(seqs_[m].id);
        const std::vector<int32_t> queries(members.size(), n_query);
        const auto make = [&](auto* err) {
            return ta_plan_begin(plan.get(), uint32_t(ids.size()), ids.data(), n_new.data(), queries.data(), nullptr, err);
        };
        const uint64_t before = dropped();
        call("ta_plan_begin", make, true);
        for (const size_t m : members) seqs_[m].held = true;
        open_ = plan == plan_;
        dropped_at_begin_ = dropped();
        look(true);
        // With tiers below, what is evicted beside makes more room.
        if (dropped() == before || shape_->host_blocks + shape_->disk_blocks > 0) return;
        EXPECT_LT(tier_stats(pool_, TA_TIER_DEVICE).bytes_free, block_bytes_) << "more was dropped than had to go";
    }
    void ended(const std::vector<size_t>& members, const std::vector<int32_t>& n_new) {
        open_ = false;
        for (size_t m = 0; m < members.size(); ++m) {
            Seq& s = seqs_[members[m]];
            s.held = false;
            if (n_new[m] > 0) s.blocks.resize(size_t(s.length / 64));  // an open one may be copied now
            s.length += n_new[m];
            while (int64_t(s.blocks.size()) * 64 < s.length) s.blocks.push_back(next_block_++);
        }
        look(true);
        for (const size_t m : members) seqs_[m].full = uint64_t(seqs_[m].length / 64);
    }
    void look(bool may_lose);
    std::vector<DropReference::Part> parts_of(size_t s, size_t row, int64_t n_new, int64_t queries);
    void expect_attention(const Seq& s, size_t row, const std::vector<float>* out, const std::vector<float>* lse);

    const DropShape* const shape_;
    Inputs& inputs_;
    DropReference& reference_;
    const FaultPlan fault_;
    std::vector<Seq> seqs_;
    std::set<uint64_t> missing_, pinned_;  // blocks, ever
    uint64_t next_block_ = 0, block_bytes_ = 0, most_blocks_ = 0, dropped_at_begin_ = 0;
    size_t steps_ = 0, queries_ = 0;
    uint64_t failures_ = 0, lost_by_failures_ = 0;
    bool armed_ = false, open_ = false;
    int64_t left_;
    uint64_t counted_ = 0, armed_from_ = 0;
    CountingAllocator allocator_;
    std::shared_ptr<FaultyFiles> files_;
    SimulatedDevice* device_ = nullptr;
    Folder folder_;
    Context context_;
    KvPool pool_;
    Plan plan_, other_;
};

}  // namespace ta::testing
