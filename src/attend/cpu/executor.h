// Runs attention over pages on the CPU: cuts a call into jobs (kv head, query rows, page range), runs them on all threads, and
// meanwhile joins the parts of each result in order. Cut and order depend on shapes only, so results do not depend on the
// number of threads. The workspace grows with the threads, not with the context: docs/threading.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/cpu/attend.h"
#include "src/attend/call.h"
#include "src/core/context.h"

namespace ta {

// Keeps workspaces between calls. One call at a time.
class AttendExecutor {
  public:
    explicit AttendExecutor(Context& context)
        : context_(context),
          scratch_(context.allocator()),
          parts_(context.allocator()),
          results_(context.allocator()),
          masses_(context.allocator()) {}

    // The caller has checked the inputs. TA_E_MEMORY: no workspace; nothing was written. Adds the number of replaced query
    // values to `saturated`.
    Status run(const AttendCall& call, uint64_t* saturated);

    // Frees what grows with the call, and keeps what grows with the threads.
    void trim() {
        results_.trim();
        masses_.trim();
    }

  private:
    // Query rows of a sequence that are computed together, for each kv head, and the pages that they see.
    struct Tile {
        int32_t sequence;
        int64_t row_begin, row_end;  // of n_query * group
        int64_t page_begin, page_end;
        int64_t part_pages, parts;         // pages of each part but the last; number of parts
        int64_t first_job;                 // jobs [head, part]
        int64_t first_part, first_result;  // numbers among the parts and results of tiles with several parts
        int64_t observed_begin;            // rows [observed_begin, row_end) are observed
        int64_t mass;                      // in masses_: [head, page]
        int64_t rows() const { return row_end - row_begin; }
        int64_t pages() const { return page_end - page_begin; }
        int64_t observed() const { return row_end - observed_begin; }
    };
    struct Job {
        const Tile* tile;
        int32_t head;
        int64_t part, page_begin, page_end;
        int64_t pages() const { return page_end - page_begin; }
    };
    // Rows of a part or a result, without gaps. `sums`, only for an observed result: [pages, observed rows], relative to the
    // maxima [parts, observed rows] that follow.
    struct Rows {
        float *o, *m, *l, *sums;
        static Rows at(float* o, int64_t rows, int d) { return {o, o + rows * d, o + rows * (d + 1), o + rows * (d + 2)}; }
    };
    struct ResultTurn {
        std::atomic<int64_t> serves{0};  // the result that has this place
        std::atomic<int64_t> next{0};    // its part to be joined next, or kJoining
    };
    static constexpr int64_t kJoining = -1;
    // States of part_turns_: the place is free for this part; the part is computed.
    static int64_t free_for(int64_t part) { return 2 * part; }
    static int64_t done(int64_t part) { return 2 * part + 1; }
    class Scratch;

    static int64_t part_of(const Job& job) { return job.tile->first_part + job.head * job.tile->parts + job.part; }
    static int64_t result_of(const Job& job) { return job.tile->first_result + job.head; }

    void make_tiles(const AttendCall& call);
    Status reserve(const AttendCall& call);
    Job job_at(int64_t i) const;
    static Rows rows_of(Buffer& buffer, size_t floats, int64_t place, const Tile& tile, int d);
    static void place_pages(const AttendCall& call, const Job& job, Scratch& scratch);
    static bool has_rest(const AttendCall& call, const Tile& tile);
    void attend_each(const AttendCall& call, const Job& job, const cpu::AttendTask& run, Scratch& scratch) const;
    void attend_few(const cpu::AttendTask& run, int64_t first, int64_t rows, Scratch& scratch) const;
    void quantize_queries(const AttendCall& call, const Job& job, Scratch& scratch, std::atomic<uint64_t>& saturated);
    void run_job(const AttendCall& call, const Job& job, Scratch& scratch, std::atomic<uint64_t>& saturated);
    Rows start_part(const Job& job, int d);
    void keep_page_sums(const Job& job, int d, const float* m, const float* page_sums);
    void finish_part(const AttendCall& call, const Job& job, Scratch& scratch);
    void finish_result(const AttendCall& call, const Job& job, const Rows& result, Scratch& scratch);
    float finish_row(const AttendCall& call, const Job& job, int64_t r, const Rows& rows, Scratch& scratch) const;
    static void fold_page_sums(const Job& job, const float* page_sums, float* sums);
    void add_masses(const Job& job, const float* sums, const float* factor);
    Scratch scratch_of(const AttendCall& call, int worker);

    Context& context_;
    std::vector<Tile> tiles_;
    int64_t n_jobs_ = 0, n_parts_ = 0, n_results_ = 0, n_masses_ = 0, work_ = 0;
    int64_t max_pages_ = 0, max_rows_ = 0, max_sums_ = 0;  // largest of any job
    int64_t max_part_rows_ = 0, max_result_sums_ = 0;      // largest of results with several parts
    size_t part_floats_ = 0, result_floats_ = 0;
    int64_t parts_in_work_ = 0, results_in_work_ = 0;
    std::vector<std::atomic<int64_t>> part_turns_;
    std::vector<ResultTurn> result_turns_;
    Buffer scratch_, parts_, results_, masses_;
};

}  // namespace ta
