// Attention as numerics.md section 8 defines it, over the pages and codes that a CPU's step reads. Scores and P are exact integers,
// all else is float64. Each result has a bound of what rounding in fp32 may make of it. Two things are not decided: a code of a query
// that lies half way between two, and a P that does. There the bound has both.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/attend.h"
#include "support/handles.h"

namespace ta::testing {

// Whose results are judged.
enum class Kernel {
    kCpu,
    kDecode,         // of a GPU: 2^x in place of the CPU's cubic under TA_EXP_POLY
    kHopperPrefill,  // sm90/prefill
    kPrefill,        // sm80/prefill
};
inline constexpr int kKernels = 4;
const char* name_of(Kernel kernel);
// The rows of one kv head of a sequence.
struct RowsOfHead {
    int head_dim;
    int64_t rows;
    int p_levels;
    bool p_running, batch_invariant;
};
using KernelOf = Kernel (*)(const RowsOfHead& rows);

// A call of attention as the test made it. Of the options mask and window are looked at.
struct ReplayedCall {
    struct Member {
        int64_t n_keys, n_query;
    };
    std::vector<Member> members;  // in the order of the plan
    int64_t kv_heads = 1, group = 1;
    int head_dim = 64;
    bool channel_pages = true;              // the pool can have some
    const float* q = nullptr;               // [sum of n_query, kv_heads * group, head_dim]
    const float* k_offset = nullptr;        // [kv_heads, head_dim] of the layer, or none
    double scale = 1.0;                     // of q.k, natural units
    const ta_numerics* numerics = nullptr;  // in effect
    ta_attend_options options{};
    bool with_lse = false;
};

struct ReplayedRow {
    Kernel kernel = Kernel::kCpu;
    std::vector<double> o, o_error;  // [head_dim]
    double lse = 0.0, lse_error = 0.0;
    bool judged = true;  // false where a GPU's ranges begin at other pages (gpu.md), which SAS and running P show
};

// A context of one thread. Its kernels' arguments go to the Replay that is alive, too.
Context make_recorded_context(ta_cpu_isa isa = TA_CPU_ISA_AUTO);

// The largest shares of their bounds that were seen.
struct Shares {
    double o[kKernels] = {}, lse[kKernels] = {};
    uint64_t rows[kKernels] = {};
};

struct Page;
struct Share;
struct QueryRow;

class Replay {
  public:
    Replay(const ReplayedCall& call, KernelOf kernel_of);
    ~Replay();
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;

    // After the call: what is wrong with `out` [rows, q_heads, head_dim] of elements `type` and with `lse`, or nothing.
    std::string judge(const std::vector<float>& out, ta_dtype type, const std::vector<float>& lse, Shares& shares);

    // For the kernels that are recorded.
    void take(const cpu::AttendTask& task);

  private:
    // What a failure tells of a key.
    struct Key {
        int64_t key;
        double score, v_scale, unit;  // in log2 units; V's scale; unit of P times that
        double size() const { return score + std::log2(v_scale); }
    };
    // A row so far. Values with an error are in units of 2^m.
    struct Row {
        explicit Row(size_t head_dim) : o(head_dim), o_error(head_dim), v_most(head_dim) {}
        void scale_to(double top);
        void add(const Page& page, int key, int head_dim, const Share& share);
        void note(const Key& key);
        std::string keys() const;

        double m = -std::numeric_limits<double>::infinity(), l = 0.0, l_error = 0.0;
        std::vector<double> o, o_error;
        double held = 0.0;                              // what rounding may leave of zero points and offsets, in each channel
        double left = 0.0;                              // of offsets, by the largest page's
        double size = 0.0;                              // of the terms of the largest scores
        double range_top = 0.0, range_top_error = 0.0;  // score of the range so far
        std::vector<double> v_most;                     // the largest |V| that it sees, by channel
        double v_largest = 0.0;                         // V's largest scale
        Kernel kernel = Kernel::kCpu;
        bool judged = true;
        std::vector<Key> heaviest;  // what counts for most in O
    };
    // Returns the task's first row in the tile.
    int64_t find_place(const cpu::AttendTask& task);
    QueryRow read_query(const cpu::AttendTask& task, int row, int64_t at);
    void add(const cpu::AttendTask& task, int row, const QueryRow& query, const std::vector<Page>& pages, Row& to);
    ReplayedRow finish(int64_t at, bool expanded) const;
    std::string judge_row(const ReplayedRow& row, const float* out, ta_dtype type, const float* lse, Shares& shares) const;

    const ReplayedCall& call_;
    const KernelOf kernel_of_;
    std::vector<Row> rows_[2];  // [rows, q_heads]; the second over expanded pages, if some kernel may have those
    // The position of the tasks so far: the member, its first row of the call, the tile's first row, the kv head.
    size_t member_ = 0;
    int64_t first_query_ = 0, first_row_ = 0, head_ = -1;
    int64_t tile_rows_ = 0, position_ = -1, page_ = -1;  // of the tile; of its first row; where the last task ended
    const int64_t* positions_ = nullptr;                 // of the tile's rows
    std::string wrong_;
};

}  // namespace ta::testing
