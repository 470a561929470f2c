// A plan: one batch step over all layers, from the reservation of blocks to their commit.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "src/attend/executor.h"
#include "src/kv/pool.h"
#include "src/kv/tensor.h"

namespace ta {

class Plan {
  public:
    explicit Plan(std::shared_ptr<Pool> pool);
    ~Plan();
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    Pool& pool() const { return *pool_; }

    Status begin(std::span<const ta_seq> seqs, const int32_t* n_new, const int32_t* n_query);
    Status append(uint32_t layer, const TensorView& k, const TensorView& v);
    Status attend(uint32_t layer, const TensorView& q, const TensorView& out, float* lse, const ta_attend_options* options);
    Status end();
    Status abort();

  private:
    // A block that receives tokens [have, end) in this step. Its INT8 page is `token`'s or, when all 64 tokens arrive now, one of
    // the workspace, which holds a single layer: nobody reads it after the layer's attend.
    struct Touched {
        int64_t index = 0;
        int have = 0, end = 0;
        BlockPtr token;
        int64_t workspace_page = -1;
        BlockPtr channel;  // what the block becomes; null while it stays open or at 8 bits
        bool stays_8_bits = false, closes = false;
    };
    struct Member {
        Sequence* sequence = nullptr;
        int64_t length = 0;  // before the step
        int64_t n_new = 0, n_query = 0;
        int64_t new_row = 0, query_row = 0;
        std::vector<Touched> touched;
        std::vector<float> open_amax;  // the sequence's, updated by this step's tokens
        uint64_t reopened = 0, copied = 0;
    };
    struct AppendTask {
        size_t member;
        uint32_t head;
        size_t first, last;  // of touched
    };
    struct AppendScratch;

    void list_touched(Member& member);
    Status reserve_blocks();
    void copy_tokens(const Block& from, int tokens, Block& to);
    Status check_layer(uint32_t layer) const;
    void make_append_tasks();
    uint8_t* token_page(const Touched& t, uint32_t layer) const;
    void append_block(Member& member, Touched& t, uint32_t layer, uint32_t head, const TensorView& k, const TensorView& v,
                      AppendScratch& scratch);
    void read_rows(const TensorView& x, int64_t row, int n, uint32_t head, const float* offset, bool rotate, float* out,
                   float* amax);
    void list_pages(uint32_t layer);
    void clear();

    std::shared_ptr<Pool> pool_;
    bool open_ = false;
    std::vector<Member> members_;
    std::vector<Sequence*> sequences_;
    int64_t total_new_ = 0, total_query_ = 0, workspace_pages_ = 0;
    std::vector<uint8_t> appended_;  // [layers]
    int64_t last_layer_ = -1;
    std::vector<AppendTask> append_tasks_;
    std::atomic<uint64_t> saturated_{0}, clamped_{0};

    std::vector<PageBase> pages_;
    std::vector<AttendSequence> attend_sequences_;
    Buffer workspace_, append_scratch_;
    AttendExecutor executor_;
};

}  // namespace ta
