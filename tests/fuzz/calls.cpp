// A byte string as a program of calls of the public ABI, with right and with hostile arguments: sizes of structs, null and
// misaligned pointers, huge counts, strides, stale ids, the wrong order, budgets that are too small, files in the way.
//
// For each call two bytes: which one, and 0 if all of its arguments are right. Otherwise each argument takes bytes of its own,
// which say how it is wrong. Memory that the library gets is as large as the arguments say and no byte larger, so that
// AddressSanitizer sees what goes beyond. Calls that are the caller's own fault (a tensor larger than its memory, a handle that
// was destroyed) are not made.
#include <sys/stat.h>

#include <cstring>
#include <filesystem>

#include "tests/fuzz/calls_plan.h"

namespace ta::fuzz {
namespace {

// Each class of calls_*.h adds calls to those of the class before it; inputs may make all of them.
class Program : public PlanCalls {
  public:
    using PlanCalls::PlanCalls;
    void run();

  private:
    struct Call {
        const char* name;
        ta_status (Program::*make)(ta_error* err);
    };
    static const Call kCalls[];
    friend Seeds fuzz::seeds();

    // The values of the pools that only a call that succeeds may change.
    std::vector<uint64_t> state() const {
        std::vector<uint64_t> s;
        for (const ta_kv_pool* p : pools_) {
            ta_kv_pool_stats stats{};
            stats.struct_size = sizeof stats;
            if (ta_kv_pool_get_stats(p, &stats, nullptr) == TA_OK)
                s.insert(s.end(), {stats.sequences, stats.tokens, stats.bytes_promised});
        }
        return s;
    }
    static void check_error(const Call& call, ta_status s, const ta_error& err) {
        const auto* end = static_cast<const char*>(std::memchr(err.message, 0, sizeof err.message));
        require(end != nullptr, call.name, "wrote a text without an end");
        require(err.code == s, call.name, "returned something else than it wrote to err");
        require((s == TA_OK) == (end == err.message), call.name, err.message);
        require(std::strcmp(ta_status_name(s), "unknown") != 0, call.name, "returned an unknown status");
        require(s != TA_E_INTERNAL, call.name, err.message);
        require(std::find(err.message, end, '\n') == end, call.name, err.message);
    }
};

// New ones are added at the end: inputs name calls by their place here.
const Program::Call Program::kCalls[] = {
    {"context_create", &Program::context_create},
    {"context_destroy", &Program::context_destroy},
    {"context_get_info", &Program::context_get_info},
    {"context_health", &Program::context_health},
    {"pool_create", &Program::pool_create},
    {"tiered_pool_create", &Program::tiered_pool_create},
    {"pool_close", &Program::pool_close},
    {"pool_destroy", &Program::pool_destroy},
    {"pool_get_stats", &Program::pool_get_stats},
    {"seq_create", &Program::seq_create},
    {"seq_fork", &Program::seq_fork},
    {"seq_truncate", &Program::seq_truncate},
    {"seq_set_priority", &Program::seq_set_priority},
    {"seq_release", &Program::seq_release},
    {"seq_length", &Program::seq_length},
    {"seq_verify", &Program::seq_verify},
    {"seq_residency", &Program::seq_residency},
    {"seq_save", &Program::seq_save},
    {"seq_load", &Program::seq_load},
    {"pool_save", &Program::pool_save},
    {"pool_load", &Program::pool_load},
    {"namespace_create", &Program::namespace_create},
    {"namespace_destroy", &Program::namespace_destroy},
    {"namespace_get_stats", &Program::namespace_get_stats},
    {"namespace_flush", &Program::namespace_flush},
    {"seq_publish", &Program::seq_publish},
    {"seq_match_prefix", &Program::seq_match_prefix},
    {"seq_move", &Program::seq_move},
    {"seq_prefetch", &Program::seq_prefetch},
    {"seq_pin", &Program::seq_pin},
    {"seq_unpin", &Program::seq_unpin},
    {"move_query", &Program::move_query},
    {"move_wait", &Program::move_wait},
    {"pool_descriptor", &Program::pool_descriptor},
    {"move_cancel", &Program::move_cancel},
    {"get_tier_stats", &Program::get_tier_stats},
    {"write_metrics", &Program::write_metrics},
    {"plan_create", &Program::plan_create},
    {"plan_destroy", &Program::plan_destroy},
    {"plan_set_stream", &Program::plan_set_stream},
    {"plan_begin", &Program::plan_begin},
    {"append", &Program::append},
    {"attend", &Program::attend},
    {"plan_end", &Program::plan_end},
    {"plan_abort", &Program::plan_abort},
    {"attend_dense", &Program::attend_dense},
    {"calibrator_create", &Program::calibrator_create},
    {"calibrator_destroy", &Program::calibrator_destroy},
    {"calibrator_observe", &Program::calibrator_observe},
    {"calibrator_finish", &Program::calibrator_finish},
    {"calibrator_choose", &Program::calibrator_choose},
    {"x_seq_block", &Program::x_seq_block},
    {"x_seq_dequantize", &Program::x_seq_dequantize},
    {"x_seq_attention", &Program::x_seq_attention},
    {"about", &Program::about},
    {"get_move_stats", &Program::get_move_stats},
    {"pool_describe", &Program::pool_describe},
    {"merge_states", &Program::merge_states},
    {"seq_reserve", &Program::seq_reserve},
    {"seq_suspend", &Program::seq_suspend},
    {"pool_fit", &Program::pool_fit},
    {"move_take_finished", &Program::move_take_finished},
    {"seq_export", &Program::seq_export},
    {"seq_import", &Program::seq_import},
    {"namespace_attach_store", &Program::namespace_attach_store},
    {"namespace_detach_store", &Program::namespace_detach_store},
    {"namespace_load", &Program::namespace_load},
    {"namespace_flush_store", &Program::namespace_flush_store},
    {"namespace_get_store_stats", &Program::namespace_get_store_stats},
    {"seq_forget", &Program::seq_forget},
    {"seq_retain", &Program::seq_retain},
    {"seq_describe_blocks", &Program::seq_describe_blocks},
    {"rotary_pool_create", &Program::rotary_pool_create},
    {"seq_shift", &Program::seq_shift},
    {"plan_begin_at", &Program::plan_begin_at},
    {"seq_locate_blocks", &Program::seq_locate_blocks},
    {"pool_get_memory", &Program::pool_get_memory},
    {"calibrator_create_for", &Program::calibrator_create_for},
};

void Program::run() {
    constexpr int kMostCalls = 64;
    for (int i = 0; i < kMostCalls && !in_.empty(); ++i) {
        const Call& call = kCalls[in_.below(std::size(kCalls))];
        plain_ = in_.byte() < 96;
        const std::vector<uint64_t> before = state();
        const size_t pools = pools_.size();
        ta_error err = kNoError;
        const bool with_error = !odd();
        const ta_status s = (this->*call.make)(with_error ? &err : nullptr);
        if (with_error) check_error(call, s, err);
        if (s != TA_OK && pools == pools_.size()) require(state() == before, call.name, "failed and changed the pool");
        memory_.clear();
    }
    // In any order: this one depends on the input.
    plain_ = false;
    while (contexts_.size() + pools_.size() + plans_.size() + calibrators_.size() > 0) {
        switch (in_.empty() ? 4 : in_.byte() % 4) {
            case 0:
                context_destroy(nullptr);
                break;
            case 1:
                pool_destroy(nullptr);
                break;
            case 2:
                plan_destroy(nullptr);
                break;
            case 3:
                calibrator_destroy(nullptr);
                break;
            default:
                if (!contexts_.empty())
                    context_destroy(nullptr);
                else if (!pools_.empty())
                    pool_destroy(nullptr);
                else if (!plans_.empty())
                    plan_destroy(nullptr);
                else
                    calibrator_destroy(nullptr);
        }
    }
    require(allocator_.blocks_alive() == 0, "memory was not given back");
    for (const auto& w : watches_)
        require(w->released == 1 || (w->released == 0 && !w->plain), "a callback set was not released once");
    require(allocator_.faults() == 0, "memory was asked for or given back as the ABI excludes");
}

}  // namespace

Seeds seeds() {
    static const std::pair<const char*, std::vector<const char*>> kPrograms[] = {
        {"step",
         {"context_create", "pool_create", "seq_create", "plan_create", "plan_begin", "append", "attend", "append", "attend",
          "plan_end", "seq_length", "seq_verify", "x_seq_block", "x_seq_dequantize", "pool_get_stats", "context_get_info"}},
        {"files",
         {"context_create", "pool_create", "seq_create", "plan_create", "plan_begin", "append", "append", "plan_end",
          "seq_fork", "seq_truncate", "seq_save", "seq_load", "pool_save", "pool_load", "seq_release"}},
        {"prefix",
         {"context_create", "tiered_pool_create", "seq_create", "plan_create", "plan_begin", "append", "append", "plan_end",
          "namespace_create", "seq_publish", "seq_match_prefix", "seq_verify", "namespace_get_stats", "namespace_flush",
          "pool_save", "namespace_destroy", "pool_load"}},
        {"tiers",
         {"context_create", "tiered_pool_create", "seq_create",   "plan_create", "plan_begin", "append",    "append",
          "plan_end",       "plan_begin",         "append",       "append",      "plan_end",   "seq_move",  "move_query",
          "move_wait",      "seq_residency",      "seq_prefetch", "move_cancel", "seq_pin",    "seq_unpin", "get_tier_stats",
          "write_metrics",  "plan_begin",         "append",       "attend",      "plan_abort"}},
        {"room",
         {"context_create", "tiered_pool_create", "seq_create", "seq_reserve", "plan_create", "plan_begin",    "append",
          "append",         "plan_end",           "pool_fit",   "seq_suspend", "move_wait",   "seq_residency", "seq_reserve",
          "seq_fork",       "plan_begin",         "append",     "attend",      "append",      "plan_end",      "pool_get_stats",
          "seq_release"}},
        {"store",
         {"context_create",
          "pool_create",
          "seq_create",
          "plan_create",
          "plan_begin",
          "append",
          "append",
          "plan_end",
          "namespace_create",
          "seq_publish",
          "namespace_attach_store",
          "namespace_get_store_stats",
          "namespace_destroy",
          "namespace_create",
          "namespace_attach_store",
          "namespace_load",
          "move_query",
          "seq_match_prefix",
          "seq_verify",
          "namespace_flush_store",
          "namespace_detach_store"}},
        {"dense",
         {"context_create", "attend_dense", "merge_states", "calibrator_create", "calibrator_observe", "calibrator_finish",
          "calibrator_create_for", "calibrator_choose", "context_health", "about"}},
        {"closed",
         {"context_create", "pool_create", "seq_create", "plan_create", "plan_begin", "pool_close", "append", "plan_destroy",
          "pool_close", "seq_create", "plan_create", "context_destroy", "pool_get_stats"}},
    };
    Seeds all;
    for (const auto& [name, calls] : kPrograms) {
        auto& [seed_name, bytes] = all.emplace_back(name, std::vector<uint8_t>{});
        for (const char* call : calls) {
            const auto* found = std::find_if(std::begin(Program::kCalls), std::end(Program::kCalls),
                                             [&](const Program::Call& c) { return std::strcmp(c.name, call) == 0; });
            require(found != std::end(Program::kCalls), "a seed has no call", call);
            bytes.insert(bytes.end(), {uint8_t(found - std::begin(Program::kCalls)), 0});
        }
    }
    return all;
}

}  // namespace ta::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const bool made = mkfifo(ta::fuzz::folder().file("fifo").c_str(), 0600) == 0;
    ta::fuzz::require(made, "no fifo");
    for (const char* left : {"0", "1", "line\nbreak"}) std::filesystem::remove(ta::fuzz::folder().file(left));
    ta::fuzz::Program(data, size).run();
    return 0;
}
