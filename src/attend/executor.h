// Runs attention over pages on the CPU: cuts a call into jobs (kv head, query rows, page range), runs them on all threads and
// merges the parts. The cut depends on shapes alone, so results do not change with the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "src/attend/call.h"
#include "src/core/context.h"

namespace ta {

// Keeps its workspaces from call to call. One call at a time.
class AttendExecutor {
  public:
    explicit AttendExecutor(Context& context)
        : context_(context), scratch_(context.allocator()), partials_(context.allocator()), masses_(context.allocator()) {}

    // Inputs are checked already. TA_E_MEMORY when there is no workspace; nothing is written then.
    // `saturated` grows by the number of query values that were replaced.
    Status run(const AttendCall& call, uint64_t* saturated);

  private:
    struct Job {
        int32_t sequence, head;
        int64_t row_begin, row_end;  // of n_query * group
        int64_t page_begin, page_end;
        int64_t partial_row;  // first row of its part in partials_, -1: writes the result itself
        // Rows [observed_begin, row_end) are observed. Offsets in masses_: [pages, observed rows] of the part, relative to its
        // maximum, and [pages] of the result; -1 where there are none.
        int64_t observed_begin = 0, part_mass = -1, mass = -1;
        int64_t pages() const { return page_end - page_begin; }
        int64_t observed() const { return row_end - observed_begin; }
    };
    struct Group {  // the jobs [first, last) whose parts make one result
        size_t first, last;
    };
    class Scratch;

    void make_jobs(const AttendCall& call);
    static void place_pages(const AttendCall& call, const Job& job, Scratch& scratch);
    void quantize_queries(const AttendCall& call, const Job& job, Scratch& scratch, std::atomic<uint64_t>& saturated);
    void run_job(const AttendCall& call, const Job& job, Scratch& scratch, std::atomic<uint64_t>& saturated);
    void merge_group(const AttendCall& call, const Group& group, Scratch& scratch);
    float finish_row(const AttendCall& call, const Job& job, int64_t row, float m, float l, float* o, Scratch& scratch) const;
    void fold_page_sums(const Job& job, const float* page_sums);
    void add_masses(const Job& job, const float* factor);
    Scratch scratch_of(const AttendCall& call, int worker);

    Context& context_;
    std::vector<Job> jobs_;
    std::vector<Group> groups_;
    int64_t partial_rows_ = 0, max_pages_ = 0, max_rows_ = 0, max_page_sums_ = 0, n_masses_ = 0;
    Buffer scratch_, partials_, masses_;
};

}  // namespace ta
