// A random walk through the API beside a simple model: which blocks each sequence has and shares. After every move the library must
// agree: lengths, statistics to the last block, hashes. Stored pages and results must be, bit for bit, those of a replay: the
// scalar kernels of one thread, in a pool in which each sequence gets the same tokens alone, without forks.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/groups.h"
#include "support/tiers.h"

namespace ta::testing {

struct Config {
    const char* name;
    uint32_t layers, kv_heads, q_heads, head_dim, bits;
    std::vector<uint8_t> map = {};  // [layers, kv_heads] for K, backwards for V; empty: bits
    ta_profile profile = TA_PROFILE_ACCURATE;
    int32_t sink_blocks = 0;
    bool k_offset = false;
    ta_switch hadamard = TA_DEFAULT;
    ta_granularity granularity = TA_GRANULARITY_DEFAULT;
    ta_dtype dtype = TA_DTYPE_F32;
    int threads = 1;
    uint32_t budget_blocks = 40;  // token blocks that the budget holds

    int64_t row() const { return int64_t(kv_heads) * head_dim; }
    int64_t q_row() const { return int64_t(q_heads) * head_dim; }
};

inline std::ostream& operator<<(std::ostream& out, const Config& c) {
    return out << c.name;
}

// One block: sequences that share it share the pointer.
struct ModelBlock {
    bool channel = false;
    bool sealed = false;
};

// An input of a sequence, in order: tokens, or a length to which it was cut.
struct Event {
    int64_t length = 0;                    // afterwards
    std::vector<std::vector<float>> k, v;  // [layers]; empty: it was cut
};

struct ModelSequence {
    ta_seq id = 0, replay = 0;
    int64_t length = 0;
    std::vector<std::shared_ptr<ModelBlock>> blocks;
    std::vector<std::shared_ptr<const Event>> events;
    std::vector<Stored> stored;  // [layers] by the replay
    bool knows_scales = true;    // the universal ones: else the next step copies its first block, whose codes they may change
    int64_t reserved = 0;        // tokens that surely find room; unknown after what a reservation says nothing of
};

class Walk {
  public:
    Walk(const Config& config, uint64_t seed);
    void move();
    void check_all();
    std::string history() const { return history_.str(); }

  private:
    static constexpr uint32_t kMaxSequences = 9, kMostMembers = 4;
    // Of O and LSE beside float64 over what is stored and given, both around 1. A step of INT8 of Q, K and V is 5/119 at the most;
    // rounding to it is an error of 0.012 of each channel, and so of a score, to which V and P bring as much. This is ten times
    // that. It finds other keys than those that a row sees; walks.cpu judges the kernels' arithmetic.
    static constexpr double kNear = 0.2;
    using Sequence = std::shared_ptr<ModelSequence>;

    std::ostringstream& note() {
        history_ << "\n";
        return history_;
    }
    Sequence any() { return sequences_.empty() ? nullptr : random_.pick(sequences_); }

    // ------------------------------------------------------------------------------------------------------ sequence calls

    void create();
    void fork();
    void reserve();
    void there_and_back();
    ta_seq replay(const std::vector<std::shared_ptr<const Event>>& events);
    void append_to_replay(const Plan& plan, uint32_t layer, int64_t n, const std::vector<float>& k,
                          const std::vector<float>& v);
    void truncate();
    void release();
    void wrong_call();

    // -------------------------------------------------------------------------------------------------------------- a step

    struct Member {
        Sequence sequence;
        int32_t n_new, n_query;
        int64_t new_row, query_row;
        std::vector<std::shared_ptr<ModelBlock>> blocks;  // afterwards
        uint64_t closed = 0, reopened = 0, copied = 0;
        std::vector<std::pair<ModelBlock*, bool>> in_place;  // written to where they are, and whether that fills them
        bool released = false;                               // since begin
    };

    void plan_blocks(Member& m, bool drafts);
    void drafts_that_do_not_stay();
    void step();
    void commit(Member& m, const std::vector<std::vector<float>>& new_k, const std::vector<std::vector<float>>& new_v);
    void take_over(std::vector<float>& stored, const std::vector<float>& given, const std::vector<float>& now, int64_t from);
    std::vector<float> rows_of(const Member& m, const std::vector<float>& x) const;
    void end_released(const std::vector<Member>& members);
    void release_within(std::vector<Member>& members);
    void wrong_calls_within(uint32_t layer, int64_t total_new, int64_t total_query, Tensor& k, Tensor& v,
                            const std::vector<Member>& members);
    std::vector<float> new_values_with_nan(int64_t n);
    std::vector<float> values(int64_t tokens, size_t mean_at);

    // -------------------------------------------------------------------------------------------------------------- checks

    void check_attention(uint32_t layer, int64_t total_query, const std::vector<Member>& members,
                         const std::vector<float>& new_k, const std::vector<float>& new_v, bool drafts);
    void check_sequence(const ModelSequence& s);
    void check_values(const ModelSequence& s);
    void check_statistics();

    const Config c_;
    Random random_;
    Context context_;
    KvPool pool_;
    Plan plan_, other_plan_;
    Context peer_context_ = make_context(1);
    KvPool peer_pool_;
    GroupHandle groups_[2];
    KvPool replay_pool_;
    Plan replay_plans_[kMostMembers];
    int64_t sinks_ = 0;  // of the pool as it is in effect, and the next ones
    bool universal_ = false, closes_ = false;
    std::vector<float> mean_;
    std::vector<Sequence> sequences_;
    std::vector<ta_seq> dead_;
    std::set<ta_seq> ids_;
    uint64_t appended_ = 0, closed_ = 0, reopened_ = 0, copied_ = 0;
    uint64_t need_token_ = 0, need_channel_ = 0;
    std::ostringstream history_;
};

}  // namespace ta::testing
