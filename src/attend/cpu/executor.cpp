#include "src/attend/cpu/executor.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/math.h"
#include "kernels/format/visible.h"
#include "src/attend/cpu/row_end.h"
#include "src/core/checked.h"

namespace ta {
namespace {

// Rows of a job: many enough that unpacking a page pays, few enough for a worker's cache.
constexpr int64_t kRowTile = 240;
// Rows x pages: a smaller call is done before another thread would wake up.
constexpr int64_t kAloneWork = 64;
// Most rows of attend_few(): a token's, or those of a decode.
constexpr int64_t kMostFew = std::max<int64_t>(kMaxStepGroup, kP16Rows);
// Places for parts that are computed or wait for their turn: two for each thread. If parts are small, as many as fit these
// bytes, so that other threads go on while one sleeps.
constexpr size_t kPartBytes = size_t{1} << 20;
// Places for results: enough for the parts' results, but at least two, and no more than fit these bytes.
constexpr size_t kResultBytes = size_t{16} << 20;

// Floats of a part or a result: O [rows, d], m and l [rows], and `more`.
size_t row_floats(int d, int64_t rows, int64_t more = 0) {
    return size_t(round_up(size_t(rows * (d + 2) + more), 16));
}

void wait_for(const std::atomic<int64_t>& what, int64_t value) {
    for (int64_t now; (now = what.load(std::memory_order_acquire)) != value;) what.wait(now, std::memory_order_acquire);
}

void set(std::atomic<int64_t>& what, int64_t value) {
    what.store(value, std::memory_order_release);
    what.notify_all();
}

KeyRange<int64_t> visible_keys(const AttendSettings& s, int64_t n_keys, int64_t p) {
    return ta::visible_keys(s.mask == TA_MASK_CAUSAL, s.window, n_keys, p);
}

// A bit for each new token that a tree's token sees within the window.
uint64_t seen_in_tree(const AttendSettings& s, const TreeRow* tree, int64_t token) {
    uint64_t seen = tree[token].seen;
    for (int64_t i = 0; i < token; ++i) {
        if (!in_window<int64_t>(s.window, tree[token].depth - tree[i].depth)) seen &= ~(uint64_t{1} << i);
    }
    return seen;
}

// Finds the end of the pages from `first` on that one kernel call can take: it handles one width of channel pages. The next
// call continues with O as it was left. Returns true if the width is the low one.
bool end_run(const StoredPage* pages, int64_t first, int64_t end, int64_t& last) {
    PageKind width = PageKind::kToken;  // no channel page yet
    for (last = first; last < end; ++last) {
        const PageKind kind = pages[last].kind;
        if (kind == PageKind::kToken || kind == width || !pages[last].page) continue;
        if (width != PageKind::kToken) break;
        width = kind;
    }
    return width == PageKind::kLow;
}

// The number of rows that decides the precision of queries and P: those of a decode have more bits.
int64_t rows_together(const AttendCall& call, const AttendSequence& seq) {
    return (call.batch_invariant ? 1 : seq.n_query) * call.group;
}

// In a batch_invariant call: the page with the sequence's queries. -1: there is none.
int64_t own_page(const AttendCall& call, const AttendSequence& seq) {
    return call.batch_invariant && seq.n_keys > 0 ? (seq.n_keys - 1) / kPageTokens : -1;
}

}  // namespace

// One worker's share of the scratch buffer.
class AttendExecutor::Scratch {
  public:
    Scratch(uint8_t* data, int d, int64_t rows, int64_t pages, int64_t sums, const AttendCall& call) {
        uintptr_t next = reinterpret_cast<uintptr_t>(data);  // an integer, since `data` is null if only the size is wanted
        const auto take = [&next](auto*& ptr, int64_t n) {
            ptr = reinterpret_cast<std::remove_reference_t<decltype(ptr)>>(next);
            next += round_up(size_t(n) * sizeof *ptr, 64);
        };
        take(pages_, pages);
        take(q, rows * d);
        take(q_rest, call.q_rest ? (call.batch_invariant ? rows : std::min<int64_t>(rows, kP16Rows)) * d : 0);
        take(few_q, call.batch_invariant ? kMostFew * d : 0);
        take(few_rest, call.batch_invariant ? kMostFew * d : 0);
        take(q_scale, rows);
        take(q_float, call.k_turning ? rows * d : 0);
        take(key_begin, rows);
        take(key_end, rows);
        take(position, rows);
        take(seen, rows);
        take(slope, rows);
        take(bias, rows);
        take(row, d);
        take(o, int64_t(row_floats(d, rows)));
        take(factor, rows);
        take(page_sums, sums * 2);
        take(sums_, sums);
        take(workspace, int64_t(cpu::workspace_bytes(d, int(rows))));
        bytes = size_t(next - reinterpret_cast<uintptr_t>(data));
    }
    cpu::PageRef* pages_;
    int8_t *q, *q_rest;        // q_rest: for rows of a decode
    int8_t *few_q, *few_rest;  // for attend_few()
    float *q_scale, *q_float, *slope, *bias, *row;
    float* o;                           // of a result with a single part
    float *factor, *page_sums, *sums_;  // of observed rows
    int64_t *key_begin, *key_end, *position;
    uint64_t* seen;  // for rows of a tree
    uint8_t* workspace;
    size_t bytes;
};

AttendExecutor::Scratch AttendExecutor::scratch_of(const AttendCall& call, int worker) {
    const size_t bytes = Scratch(nullptr, call.head_dim, max_rows_, max_pages_, max_sums_, call).bytes;
    return {scratch_.data() + size_t(worker) * bytes, call.head_dim, max_rows_, max_pages_, max_sums_, call};
}

void AttendExecutor::make_tiles(const AttendCall& call) {
    tiles_.clear();
    n_jobs_ = n_parts_ = n_results_ = n_masses_ = work_ = 0;
    max_pages_ = max_rows_ = max_sums_ = max_part_rows_ = max_result_sums_ = 0;
    for (size_t s = 0; s < call.sequences.size(); ++s) {
        const AttendSequence& seq = call.sequences[s];
        const int64_t rows = seq.n_query * call.group;
        if (rows == 0) continue;
        const bool decode = rows_together(call, seq) <= kP16Rows;
        const int64_t step = rows <= kP16Rows ? rows : kRowTile / call.group * call.group;
        const int64_t first_position = seq.n_keys - seq.n_query;
        const int64_t first_observed = rows - (seq.mass ? seq.n_observed * call.group : 0);
        for (int64_t row = 0; row < rows; row += step) {
            Tile t{};
            t.sequence = int32_t(s);
            t.row_begin = row;
            t.row_end = std::min(row + step, rows);
            // Both ends of the visible range grow with the position. In a tree the position does not grow with the row: its
            // first token has the lowest range.
            const KeyRange<int64_t> lowest =
                visible_keys(call.settings, seq.n_keys, first_position + (seq.tree ? 0 : row / call.group));
            const KeyRange<int64_t> highest =
                visible_keys(call.settings, seq.n_keys, first_position + (t.row_end - 1) / call.group);
            t.page_begin = lowest.begin / kPageTokens;
            t.page_end = std::max(t.page_begin, (highest.end + kPageTokens - 1) / kPageTokens);
            t.observed_begin = std::min(std::max(row, first_observed), t.row_end);
            // A longer range is split along the sequence, so that a single long sequence uses every core.
            t.part_pages = decode ? kDecodeRangePages : kPromptRangePages;
            // Parts must not depend on which rows are in the tile. A page that a row does not see leaves the row as it is.
            if (call.batch_invariant) t.page_begin = t.page_begin / t.part_pages * t.part_pages;
            t.parts = std::max<int64_t>(1, (t.pages() + t.part_pages - 1) / t.part_pages);
            t.first_job = n_jobs_;
            n_jobs_ += t.parts * call.kv_heads;
            work_ += t.pages() * t.rows() * call.kv_heads;
            max_rows_ = std::max(max_rows_, t.rows());
            max_pages_ = std::max(max_pages_, std::min(t.pages(), t.part_pages));
            if (t.observed() > 0) {
                t.mass = n_masses_;
                n_masses_ += t.pages() * call.kv_heads;
                max_sums_ = std::max(max_sums_, std::min(t.pages(), t.part_pages) * t.rows());
            }
            if (t.parts > 1) {
                t.first_part = n_parts_;
                t.first_result = n_results_;
                n_parts_ += t.parts * call.kv_heads;
                n_results_ += call.kv_heads;
                max_part_rows_ = std::max(max_part_rows_, t.rows());
                if (t.observed() > 0) max_result_sums_ = std::max(max_result_sums_, (t.pages() + t.parts) * t.observed());
            }
            tiles_.push_back(t);
        }
    }
}

AttendExecutor::Job AttendExecutor::job_at(int64_t i) const {
    const auto after =
        std::upper_bound(tiles_.begin(), tiles_.end(), i, [](int64_t n, const Tile& t) { return n < t.first_job; });
    const Tile& t = *std::prev(after);
    const int64_t head = (i - t.first_job) / t.parts, part = (i - t.first_job) % t.parts;
    const int64_t begin = t.page_begin + part * t.part_pages;
    return {&t, int32_t(head), part, begin, std::min(begin + t.part_pages, t.page_end)};
}

// Takes memory for scratch, and for parts and results in work.
Status AttendExecutor::reserve(const AttendCall& call) {
    const size_t threads = size_t(context_.threads().threads());
    const size_t scratch_bytes = Scratch(nullptr, call.head_dim, max_rows_, max_pages_, max_sums_, call).bytes * threads;
    part_floats_ = row_floats(call.head_dim, max_part_rows_);
    result_floats_ = row_floats(call.head_dim, max_part_rows_, max_result_sums_);
    size_t parts = 0, results = 0;
    if (n_parts_ > 0) {
        parts = std::max(2 * threads, kPartBytes / (part_floats_ * sizeof(float)));
        parts = std::min(parts, size_t(n_parts_));
        int64_t fewest = n_parts_;
        for (const Tile& t : tiles_) fewest = t.parts > 1 ? std::min(fewest, t.parts) : fewest;
        results = std::min(parts / size_t(fewest) + 2, std::max<size_t>(2, kResultBytes / (result_floats_ * sizeof(float))));
        results = std::min(results, size_t(n_results_));
    }
    const size_t part_bytes = parts * part_floats_ * sizeof(float), result_bytes = results * result_floats_ * sizeof(float);
    const size_t mass_bytes = size_t(n_masses_) * sizeof(float);
    if (!scratch_.reserve(scratch_bytes) || !parts_.reserve(part_bytes) || !results_.reserve(result_bytes) ||
        !masses_.reserve(mass_bytes)) {
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the workspace of this call",
                    scratch_bytes + part_bytes + result_bytes + mass_bytes)
            .bytes(scratch_bytes + part_bytes + result_bytes + mass_bytes);
    }
    if (part_turns_.size() < parts) part_turns_ = std::vector<std::atomic<int64_t>>(parts);
    if (result_turns_.size() < results) result_turns_ = std::vector<ResultTurn>(results);
    parts_in_work_ = int64_t(parts);
    results_in_work_ = int64_t(results);
    for (size_t i = 0; i < parts; ++i) part_turns_[i] = free_for(int64_t(i));
    for (size_t i = 0; i < results; ++i) {
        result_turns_[i].serves = int64_t(i);
        result_turns_[i].next = 0;
    }
    return {};
}

AttendExecutor::Rows AttendExecutor::rows_of(Buffer& buffer, size_t floats, int64_t place, const Tile& tile, int d) {
    float* o = reinterpret_cast<float*>(buffer.data()) + floats * size_t(place);
    return Rows::at(o, tile.rows(), d);
}

Status AttendExecutor::run(const AttendCall& call, uint64_t* saturated) {
    make_tiles(call);
    if (n_jobs_ == 0) return {};
    TA_RETURN_IF_ERROR(reserve(call));
    std::atomic<uint64_t> replaced{0};
    context_.threads().parallel_for(n_jobs_, work_ < kAloneWork ? n_jobs_ : 1, [&](int64_t i, int worker) {
        Scratch scratch = scratch_of(call, worker);
        run_job(call, job_at(i), scratch, replaced);
    });
    // In a fixed order, so that sums do not depend on threads.
    const float* masses = reinterpret_cast<const float*>(masses_.data());
    for (const Tile& t : tiles_) {
        if (t.observed() == 0) continue;
        float* sum = call.sequences[size_t(t.sequence)].mass + t.page_begin;
        const float* mass = masses + t.mass;
        for (int32_t head = 0; head < call.kv_heads; ++head) {
            for (int64_t p = 0; p < t.pages(); ++p) sum[p] += *mass++;
        }
    }
    *saturated += replaced.load();
    return {};
}

// Converts the kernel's values of a job, for each page and row, to weights of pages within the part: sums [pages, observed].
void AttendExecutor::fold_page_sums(const Job& job, const float* page_sums, float* sums) {
    const int64_t rows = job.tile->rows(), n = job.tile->observed(), first = job.tile->observed_begin - job.tile->row_begin;
    float later[kRowTile];  // product of the alphas of later pages
    std::fill_n(later, n, 1.0f);
    for (int64_t p = job.pages(); p-- > 0;) {
        const float* alpha = page_sums + p * 2 * rows + first;
        const float* sum = alpha + rows;
        for (int64_t r = 0; r < n; ++r) {
            sums[p * n + r] = sum[r] * later[r];
            later[r] *= alpha[r];
        }
    }
}

// Sums the weights over the observed rows; `factor` is the part's share of each whole row.
void AttendExecutor::add_masses(const Job& job, const float* sums, const float* factor) {
    const Tile& t = *job.tile;
    float* masses = reinterpret_cast<float*>(masses_.data()) + t.mass + job.head * t.pages() + (job.page_begin - t.page_begin);
    const int64_t n = t.observed();
    for (int64_t p = 0; p < job.pages(); ++p) {
        float sum = 0.0f;
        for (int64_t r = 0; r < n; ++r) sum += sums[p * n + r] * factor[r];
        masses[p] = sum;
    }
}

// Fills scratch.pages_ with the address of the job's head in each of its pages.
void AttendExecutor::place_pages(const AttendCall& call, const Job& job, Scratch& scratch) {
    const AttendSequence& seq = call.sequences[size_t(job.tile->sequence)];
    const size_t token_stride = TokenLayout(call.head_dim).bytes(), low_stride = ChannelLayout(call.head_dim, 2, 2).bytes();
    for (int64_t p = job.page_begin; p < job.page_end; ++p) {
        const StoredPage& page = p == own_page(call, seq) ? seq.own : seq.pages[p];
        const size_t offset = page.kind == PageKind::kToken ? size_t(job.head) * token_stride
                              : page.kind == PageKind::kLow ? size_t(job.head) * low_stride
                                                            : call.channel_head_offset[job.head];
        scratch.pages_[p - job.page_begin] = {page.page ? page.page + offset : nullptr,
                                              page.kind == PageKind::kToken ? PageKind::kToken : PageKind::kChannel};
    }
}

bool AttendExecutor::has_rest(const AttendCall& call, const Tile& tile) {
    return call.q_rest && rows_together(call, call.sequences[size_t(tile.sequence)]) <= kP16Rows;
}

void AttendExecutor::quantize_queries(const AttendCall& call, const Job& job, Scratch& scratch,
                                      std::atomic<uint64_t>& saturated) {
    const AttendSettings& s = call.settings;
    const AttendSequence& seq = call.sequences[size_t(job.tile->sequence)];
    const cpu::PageCodec& codec = *context_.kernels().codec;
    const int d = call.head_dim;
    const int64_t rows = job.tile->rows();
    // Scores are kept in log2 units, but before a softcap in natural ones, as its tanh needs.
    const float unit = s.softcap > 0.0f ? s.scale : s.scale * cpu::kLog2e;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = (job.tile->row_begin + r) / call.group, in_group = (job.tile->row_begin + r) % call.group;
        const int64_t q_head = int64_t(job.head) * call.group + in_group, first = seq.n_keys - seq.n_query;
        const int64_t position = first + (seq.tree ? seq.tree[token].depth : token);
        float* x = scratch.row;
        const int64_t replaced = codec.to_float(call.q.at(seq.query_row + token, q_head), call.q.dtype, d, call.saturate, x);
        if (replaced) saturated.fetch_add(uint64_t(replaced), std::memory_order_relaxed);
        if (call.k_offset) {
            // Keys are stored minus their offset mu, so every score of the row lacks q.mu.
            const float* mu = call.k_offset + int64_t(job.head) * d;
            double dot = 0.0;
            for (int c = 0; c < d; ++c) dot += double(x[c]) * double(mu[c]);
            scratch.bias[r] = float(dot * double(unit));
        }
        for (int c = 0; c < d && call.k_turning; ++c) scratch.q_float[r * d + c] = x[c] * unit;
        if (call.rotation_signs) codec.rotate(x, d, call.rotation_signs);
        const float scale = stage1_scale(codec.amax(x, d), call.q_levels);
        codec.quantize(x, d, scale, call.q_levels, scratch.q + r * d);
        if (has_rest(call, *job.tile))
            codec.quantize_rest(x, d, scale, call.q_levels, scratch.q + r * d, scratch.q_rest + r * d);
        scratch.q_scale[r] = scale * unit;
        const KeyRange<int64_t> keys = visible_keys(s, seq.n_keys, position);
        scratch.key_begin[r] = keys.begin;
        scratch.key_end[r] = seq.tree ? first + token + 1 : keys.end;
        scratch.position[r] = position;
        if (seq.tree) scratch.seen[r] = seen_in_tree(s, seq.tree, token);
        if (s.alibi_slopes) scratch.slope[r] = s.alibi_slopes[q_head] * cpu::kLog2e;
    }
}

// Attends to pages in a batch_invariant call. A row's result for a page depends on other rows in two cases only, and then few
// rows are taken at a time. First, 15-bit queries are only for few rows. Second, in the page of the queries themselves, V's
// unit depends on which keys exist, and each later token has more.
void AttendExecutor::attend_each(const AttendCall& call, const Job& job, const cpu::AttendTask& run, Scratch& scratch) const {
    const int64_t own_at = own_page(call, call.sequences[size_t(job.tile->sequence)]);
    const int64_t decode = kP16Rows / call.group * call.group;
    const auto takes_rest = [&run](int64_t p) {
        return run.q_rest && (run.k_bits == 8 || run.pages[p].kind == PageKind::kToken);
    };
    cpu::AttendTask task = run;
    for (task.page_end = run.page_begin; task.page_end < run.page_end;) {
        task.page_begin = task.page_end;
        const bool rest = takes_rest(task.page_begin), own = task.page_begin == own_at;
        while (task.page_end < run.page_end && takes_rest(task.page_end) == rest) ++task.page_end;
        if (run.page_sums) task.page_sums = run.page_sums + (task.page_begin - run.page_begin) * 2 * run.page_sums_rows;
        task.q_rest = rest ? run.q_rest : nullptr;
        if (!rest && !own) {
            context_.kernels().attend(task);
            continue;
        }
        const int64_t step = own ? call.group : decode;
        for (int64_t row = 0; row < run.rows; row += step) {
            if (own) task.n_keys = scratch.position[row] + 1;
            attend_few(task, row, std::min(step, run.rows - row), scratch);
        }
    }
}

void AttendExecutor::attend_few(const cpu::AttendTask& run, int64_t first, int64_t rows, Scratch& scratch) const {
    cpu::AttendTask task = run;
    const int64_t d = run.head_dim;
    task.rows = int(rows);
    task.q = std::copy_n(run.q + first * d, rows * d, scratch.few_q) - rows * d;  // copied for alignment
    if (run.q_rest) task.q_rest = std::copy_n(run.q_rest + first * d, rows * d, scratch.few_rest) - rows * d;
    for (const float** of_rows : {&task.q_scale, &task.slope, &task.bias}) *of_rows += *of_rows ? first : 0;
    for (const int64_t** of_rows : {&task.key_begin, &task.key_end, &task.position}) *of_rows += first;
    if (run.q_float) task.q_float += first * d;
    task.o += first * d;
    task.m += first;
    task.l += first;
    if (run.page_sums) task.page_sums += first;
    context_.kernels().attend(task);
}

void AttendExecutor::run_job(const AttendCall& call, const Job& job, Scratch& scratch, std::atomic<uint64_t>& saturated) {
    const AttendSettings& s = call.settings;
    const AttendSequence& seq = call.sequences[size_t(job.tile->sequence)];
    const Tile& tile = *job.tile;
    const int d = call.head_dim;
    const int64_t rows = tile.rows();
    place_pages(call, job, scratch);
    quantize_queries(call, job, scratch, saturated);

    const bool alone = tile.parts == 1, observed = tile.observed() > 0;
    const Rows part = alone ? Rows::at(scratch.o, rows, d) : start_part(job, d);
    std::fill_n(part.o, rows * d, 0.0f);
    std::fill_n(part.m, rows, cpu::kMinusInf);
    std::fill_n(part.l, rows, 0.0f);

    const PFormat p = p_format(s.p, rows_together(call, seq));
    cpu::AttendTask task{};
    task.head_dim = d;
    task.pages = scratch.pages_ - job.page_begin;
    task.n_keys = seq.n_keys;
    task.rows = int(rows);
    task.q = scratch.q;
    task.q_rest = has_rest(call, tile) ? scratch.q_rest : nullptr;
    task.q_scale = scratch.q_scale;
    task.q_float = call.k_turning ? scratch.q_float : nullptr;
    task.key_begin = scratch.key_begin;
    task.key_end = scratch.key_end;
    task.position = scratch.position;
    task.slope = s.alibi_slopes ? scratch.slope : nullptr;
    task.bias = call.k_offset ? scratch.bias : nullptr;
    task.softcap_log2 = s.softcap * cpu::kLog2e;
    task.softcap_inv = s.softcap > 0.0f ? 1.0f / s.softcap : 0.0f;
    task.exp = s.exp;
    task.p_levels = p.levels;
    task.p_running = p.running;
    if (seq.v_float) {
        task.v_float = seq.v_float + int64_t(job.head) * d;
        task.v_float_stride = int64_t(call.kv_heads) * d;
    }
    task.o = part.o;
    task.m = part.m;
    task.l = part.l;
    task.workspace = scratch.workspace;
    if (observed) {
        for (int64_t page = 0; page < job.pages(); ++page) {
            std::fill_n(scratch.page_sums + page * 2 * rows, rows, 1.0f);
            std::fill_n(scratch.page_sums + (page * 2 + 1) * rows, rows, 0.0f);
        }
    }
    const cpu::TreeKeys tree{scratch.seen, seq.n_keys - seq.n_query, seq.tree};
    const int64_t tree_page = seq.tree ? tree.first / kPageTokens : job.page_end;
    // A run of pages ends where the tree's pages begin, or before the page of the queries.
    const int64_t stop = call.batch_invariant ? own_page(call, seq) : tree_page;
    const int64_t stops[] = {std::min(stop, job.page_end), job.page_end};
    task.page_sums_rows = int(rows);
    for (task.page_begin = job.page_begin; task.page_begin < job.page_end; task.page_begin = task.page_end) {
        task.tree = task.page_begin >= tree_page ? &tree : nullptr;
        const bool low = end_run(seq.pages, task.page_begin, stops[task.page_begin >= stops[0]], task.page_end);
        task.k_bits = low ? 2 : call.k_bits ? call.k_bits[job.head] : 8;
        task.v_bits = low ? 2 : call.v_bits ? call.v_bits[job.head] : 8;
        if (observed) task.page_sums = scratch.page_sums + (task.page_begin - job.page_begin) * 2 * rows;
        if (call.batch_invariant) {
            attend_each(call, job, task, scratch);
        } else {
            context_.kernels().attend(task);
        }
    }
    if (!alone) {
        if (observed) keep_page_sums(job, d, part.m, scratch.page_sums);
        finish_part(call, job, scratch);
        return;
    }
    for (int64_t r = 0; r < rows; ++r) scratch.factor[r] = finish_row(call, job, r, part, scratch);
    if (!observed) return;
    fold_page_sums(job, scratch.page_sums, scratch.sums_);
    add_masses(job, scratch.sums_, scratch.factor + (tile.observed_begin - tile.row_begin));
}

// ------------------------------------------------------------------------------------- results of several parts, in order
//
// Part k of a call is computed in place k mod parts_in_work_, and waits there for its turn. The parts of a result are joined in
// order, by the thread that finishes the part whose turn it is, or that joined the one before. Result r is joined in place r
// mod results_in_work_. A thread waits for both places before it starts a part. Jobs begin in order, so the first unjoined part
// never waits for a place, and the call makes progress.

// Waits for the places of a part and of its result.
AttendExecutor::Rows AttendExecutor::start_part(const Job& job, int d) {
    const int64_t result = result_of(job), part = part_of(job);
    wait_for(result_turns_[size_t(result % results_in_work_)].serves, result);
    wait_for(part_turns_[size_t(part % parts_in_work_)], free_for(part));
    return rows_of(parts_, part_floats_, part % parts_in_work_, *job.tile, d);
}

// Keeps the weights of the part's pages, and the maxima that they are relative to, in the result's place until the result is
// whole.
void AttendExecutor::keep_page_sums(const Job& job, int d, const float* m, const float* page_sums) {
    const Tile& t = *job.tile;
    const Rows result = rows_of(results_, result_floats_, result_of(job) % results_in_work_, t, d);
    fold_page_sums(job, page_sums, result.sums + (job.page_begin - t.page_begin) * t.observed());
    float* part_m = result.sums + t.pages() * t.observed() + job.part * t.observed();
    std::copy_n(m + (t.observed_begin - t.row_begin), t.observed(), part_m);
}

// Called when a part is computed. Joins it if it is its turn, then the following ones that are ready.
void AttendExecutor::finish_part(const AttendCall& call, const Job& job, Scratch& scratch) {
    const Tile& t = *job.tile;
    const int64_t place = result_of(job) % results_in_work_, first = part_of(job) - job.part;
    ResultTurn& turn = result_turns_[size_t(place)];
    const Rows result = rows_of(results_, result_floats_, place, t, call.head_dim);
    // NOTES: all sequentially consistent. One thread finishes a part, another joins the part before it: at least one of them
    // sees what the other did. Both may; the exchange gives the turn to one.
    part_turns_[size_t(part_of(job) % parts_in_work_)] = done(part_of(job));
    for (int64_t part = job.part; part < t.parts; ++part) {
        std::atomic<int64_t>& state = part_turns_[size_t((first + part) % parts_in_work_)];
        if (state.load() != done(first + part)) return;
        int64_t next = part;
        if (!turn.next.compare_exchange_strong(next, kJoining)) return;
        const Rows from = rows_of(parts_, part_floats_, (first + part) % parts_in_work_, t, call.head_dim);
        if (part == 0) {
            std::copy_n(from.o, t.rows() * (call.head_dim + 2), result.o);  // m and l lie behind O
        } else {
            context_.kernels().join({call.head_dim, t.rows(), result.o, result.m, result.l, from.o, from.m, from.l});
        }
        set(state, free_for(first + part + parts_in_work_));
        if (part + 1 < t.parts) turn.next = part + 1;
    }
    finish_result(call, job, result, scratch);
    turn.next = 0;
    set(turn.serves, result_of(job) + results_in_work_);
}

void AttendExecutor::finish_result(const AttendCall& call, const Job& job, const Rows& result, Scratch& scratch) {
    const Tile& t = *job.tile;
    for (int64_t r = 0; r < t.rows(); ++r) scratch.factor[r] = finish_row(call, job, r, result, scratch);
    const int64_t n = t.observed(), first = t.observed_begin - t.row_begin;
    if (n == 0) return;
    const float* part_m = result.sums + t.pages() * n;
    for (Job part{&t, job.head, 0, t.page_begin, 0}; part.part < t.parts; ++part.part, part_m += n) {
        part.page_end = std::min(part.page_begin + t.part_pages, t.page_end);
        float weight[kRowTile];
        for (int64_t r = 0; r < n; ++r) {
            const bool saw = part_m[r] != cpu::kMinusInf;
            weight[r] = saw ? scratch.factor[first + r] * cpu::exp2_neg_exact(result.m[first + r] - part_m[r]) : 0.0f;
        }
        add_masses(part, result.sums + (part.page_begin - t.page_begin) * n, weight);
        part.page_begin = part.page_end;
    }
}

// Divides by the denominator, which includes the learned sink, and writes the row. Returns the factor that it multiplied by.
float AttendExecutor::finish_row(const AttendCall& call, const Job& job, int64_t r, const Rows& rows, Scratch& scratch) const {
    const AttendSequence& seq = call.sequences[size_t(job.tile->sequence)];
    const int64_t row = job.tile->row_begin + r, token = seq.query_row + row / call.group;
    const int64_t q_head = int64_t(job.head) * call.group + row % call.group;
    const int d = call.head_dim;
    const float m = rows.m[r], l = rows.l[r];
    const float* o = rows.o + r * d;
    const cpu::RowEnd end = cpu::end_row(m, l, call.settings.sinks ? call.settings.sinks + q_head : nullptr);
    for (int c = 0; c < d; ++c) scratch.row[c] = o[c] * end.factor;
    context_.kernels().codec->from_float(scratch.row, d, call.out.dtype, call.out.at(token, q_head));
    if (call.lse) call.lse[token * call.kv_heads * call.group + q_head] = end.lse;
    return end.factor;
}

}  // namespace ta
