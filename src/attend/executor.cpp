#include "src/attend/executor.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/math.h"
#include "src/core/checked.h"

namespace ta {
namespace {

// Rows of one job: enough to use an unpacked page many times, few enough for a worker's cache.
constexpr int64_t kRowTile = 240;
// Rows x pages below which the call is done before another thread would wake up.
constexpr int64_t kAloneWork = 64;

struct KeyRange {
    int64_t begin, end;
};
// Keys that the query at position p sees.
KeyRange visible_keys(const AttendSettings& s, int64_t n_keys, int64_t p) {
    KeyRange r{0, n_keys};
    if (s.mask == TA_MASK_CAUSAL) r.end = std::clamp<int64_t>(p + 1, 0, n_keys);
    if (s.window > 0) {
        r.begin = std::clamp<int64_t>(p - s.window + 1, 0, n_keys);
        if (s.mask == TA_MASK_FULL) r.end = std::clamp<int64_t>(p + s.window, 0, n_keys);
    }
    if (r.begin > r.end) r.begin = r.end;
    return r;
}

// The end of the pages from `first` on that a kernel takes at once: it knows one width of channel pages, and goes on where
// another call has left O. True when that width is the low one.
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

}  // namespace

// One worker's share of the scratch buffer.
class AttendExecutor::Scratch {
  public:
    Scratch(uint8_t* data, int d, int64_t rows, int64_t pages, int64_t sums) {
        uintptr_t next = reinterpret_cast<uintptr_t>(data);  // an integer: `data` is null when only the size is asked for
        const auto take = [&next](auto*& ptr, int64_t n) {
            ptr = reinterpret_cast<std::remove_reference_t<decltype(ptr)>>(next);
            next += round_up(size_t(n) * sizeof *ptr, 64);
        };
        take(pages_, pages);
        take(q, rows * d);
        take(q_scale, rows);
        take(key_begin, rows);
        take(key_end, rows);
        take(position, rows);
        take(slope, rows);
        take(bias, rows);
        take(row, d);
        take(o, rows * d);
        take(m, rows);
        take(l, rows);
        take(factor, rows);
        take(page_sums, sums);
        take(workspace, int64_t(cpu::workspace_bytes(d, int(rows))));
        bytes = size_t(next - reinterpret_cast<uintptr_t>(data));
    }
    cpu::PageRef* pages_;
    int8_t* q;
    float *q_scale, *slope, *bias, *row, *o, *m, *l;
    float *factor, *page_sums;  // of observed rows
    int64_t *key_begin, *key_end, *position;
    uint8_t* workspace;
    size_t bytes;
};

AttendExecutor::Scratch AttendExecutor::scratch_of(const AttendCall& call, int worker) {
    const size_t bytes = Scratch(nullptr, call.head_dim, max_rows_, max_pages_, max_page_sums_).bytes;
    return {scratch_.data() + size_t(worker) * bytes, call.head_dim, max_rows_, max_pages_, max_page_sums_};
}

void AttendExecutor::make_jobs(const AttendCall& call) {
    jobs_.clear();
    groups_.clear();
    partial_rows_ = max_pages_ = max_rows_ = max_page_sums_ = n_masses_ = 0;
    for (size_t s = 0; s < call.sequences.size(); ++s) {
        const AttendSequence& seq = call.sequences[s];
        const int64_t rows = seq.n_query * call.group;
        if (rows == 0) continue;
        const bool decode = rows <= kP16Rows;
        const int64_t tile = decode ? rows : kRowTile / call.group * call.group;
        // A longer range is split along the sequence, so that a single long sequence uses every core.
        const int64_t pages_per_job = decode ? kDecodeRangePages : kPromptRangePages;
        const int64_t first_position = seq.n_keys - seq.n_query;
        const int64_t first_observed = seq.mass ? rows - std::min(seq.n_query, kObservedTokens) * call.group : rows;
        for (int64_t row = 0; row < rows; row += tile) {
            const int64_t row_end = std::min(row + tile, rows);
            // Both ends of the visible range grow with the position.
            const KeyRange lowest = visible_keys(call.settings, seq.n_keys, first_position + row / call.group);
            const KeyRange highest = visible_keys(call.settings, seq.n_keys, first_position + (row_end - 1) / call.group);
            const int64_t page_begin = lowest.begin / kPageTokens;
            const int64_t page_end = std::max(page_begin, (highest.end + kPageTokens - 1) / kPageTokens);
            max_pages_ = std::max(max_pages_, page_end);
            max_rows_ = std::max(max_rows_, row_end - row);
            const int64_t parts = std::max<int64_t>(1, (page_end - page_begin + pages_per_job - 1) / pages_per_job);
            for (int32_t head = 0; head < call.kv_heads; ++head) {
                groups_.push_back({jobs_.size(), jobs_.size() + size_t(parts)});
                for (int64_t part = 0; part < parts; ++part) {
                    const int64_t begin = page_begin + part * pages_per_job;
                    Job job{int32_t(s), head, row, row_end, begin, std::min(begin + pages_per_job, page_end), -1};
                    if (parts > 1) {
                        job.partial_row = partial_rows_;
                        partial_rows_ += row_end - row;
                    }
                    if (first_observed < row_end) {
                        job.observed_begin = std::max(row, first_observed);
                        job.part_mass = n_masses_;
                        job.mass = job.part_mass + job.pages() * job.observed();
                        n_masses_ = job.mass + job.pages();
                        max_page_sums_ = std::max(max_page_sums_, job.pages() * 2 * (row_end - row));
                    }
                    jobs_.push_back(job);
                }
            }
        }
    }
}

Status AttendExecutor::run(const AttendCall& call, uint64_t* saturated) {
    make_jobs(call);
    if (jobs_.empty()) return {};
    ThreadPool& threads = context_.threads();
    const size_t scratch_bytes =
        Scratch(nullptr, call.head_dim, max_rows_, max_pages_, max_page_sums_).bytes * size_t(threads.threads());
    const size_t partial_bytes = size_t(partial_rows_) * size_t(call.head_dim + 2) * sizeof(float);
    const size_t mass_bytes = size_t(n_masses_) * sizeof(float);
    if (!scratch_.reserve(scratch_bytes) || !partials_.reserve(partial_bytes) || !masses_.reserve(mass_bytes)) {
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the workspace of this call",
                    scratch_bytes + partial_bytes + mass_bytes)
            .bytes(scratch_bytes + partial_bytes + mass_bytes);
    }
    std::atomic<uint64_t> replaced{0};
    int64_t work = 0;
    for (const Job& job : jobs_) work += (job.page_end - job.page_begin) * (job.row_end - job.row_begin);
    const int64_t n_jobs = int64_t(jobs_.size());
    threads.parallel_for(n_jobs, work < kAloneWork ? n_jobs : 1, [&](int64_t i, int worker) {
        Scratch scratch = scratch_of(call, worker);
        run_job(call, jobs_[size_t(i)], scratch, replaced);
    });
    if (partial_rows_ > 0) {
        threads.parallel_for(int64_t(groups_.size()), 4, [&](int64_t i, int worker) {
            Scratch scratch = scratch_of(call, worker);
            merge_group(call, groups_[size_t(i)], scratch);
        });
    }
    // One after the other, so that sums do not depend on threads.
    const float* masses = reinterpret_cast<const float*>(masses_.data());
    for (const Job& job : jobs_) {
        if (job.mass < 0) continue;
        float* sum = call.sequences[size_t(job.sequence)].mass + job.page_begin;
        for (int64_t p = 0; p < job.pages(); ++p) sum[p] += masses[job.mass + p];
    }
    *saturated += replaced.load();
    return {};
}

// From what the kernel left for each page and row of a job to the weight of pages in the job's part.
void AttendExecutor::fold_page_sums(const Job& job, const float* page_sums) {
    const int64_t rows = job.row_end - job.row_begin, n = job.observed(), first = job.observed_begin - job.row_begin;
    float later[kRowTile];  // product of the alphas of later pages
    std::fill_n(later, n, 1.0f);
    for (int64_t p = job.pages(); p-- > 0;) {
        const float* alpha = page_sums + p * 2 * rows + first;
        const float* sum = alpha + rows;
        float* to = reinterpret_cast<float*>(masses_.data()) + job.part_mass + p * n;
        for (int64_t r = 0; r < n; ++r) {
            to[r] = sum[r] * later[r];
            later[r] *= alpha[r];
        }
    }
}

// The sums over the observed rows, each times what its part counts in the whole.
void AttendExecutor::add_masses(const Job& job, const float* factor) {
    float* masses = reinterpret_cast<float*>(masses_.data());
    const int64_t n = job.observed();
    for (int64_t p = 0; p < job.pages(); ++p) {
        const float* of_page = masses + job.part_mass + p * n;
        float sum = 0.0f;
        for (int64_t r = 0; r < n; ++r) sum += of_page[r] * factor[r];
        masses[job.mass + p] = sum;
    }
}

// Where the job's head is in each of its pages.
void AttendExecutor::place_pages(const AttendCall& call, const Job& job, Scratch& scratch) {
    const AttendSequence& seq = call.sequences[size_t(job.sequence)];
    const size_t token_stride = TokenLayout(call.head_dim).bytes(), low_stride = ChannelLayout(call.head_dim, 2, 2).bytes();
    for (int64_t p = job.page_begin; p < job.page_end; ++p) {
        const StoredPage& page = seq.pages[p];
        const size_t offset = page.kind == PageKind::kToken ? size_t(job.head) * token_stride
                              : page.kind == PageKind::kLow ? size_t(job.head) * low_stride
                                                            : call.channel_head_offset[job.head];
        scratch.pages_[p] = {page.page ? page.page + offset : nullptr,
                             page.kind == PageKind::kToken ? PageKind::kToken : PageKind::kChannel};
    }
}

void AttendExecutor::quantize_queries(const AttendCall& call, const Job& job, Scratch& scratch,
                                      std::atomic<uint64_t>& saturated) {
    const AttendSettings& s = call.settings;
    const AttendSequence& seq = call.sequences[size_t(job.sequence)];
    const cpu::PageCodec& codec = *context_.kernels().codec;
    const int d = call.head_dim;
    const int64_t rows = job.row_end - job.row_begin;
    // Scores are kept in log2 units, except before a softcap, whose tanh works in natural ones.
    const float unit = s.softcap > 0.0f ? s.scale : s.scale * cpu::kLog2e;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = (job.row_begin + r) / call.group, in_group = (job.row_begin + r) % call.group;
        const int64_t q_head = int64_t(job.head) * call.group + in_group, position = seq.n_keys - seq.n_query + token;
        float* x = scratch.row;
        const int64_t replaced = codec.to_float(call.q.at(seq.query_row + token, q_head), call.q.dtype, d, call.saturate, x);
        if (replaced) saturated.fetch_add(uint64_t(replaced), std::memory_order_relaxed);
        if (call.k_offset) {
            // Keys are stored less their offset mu: every score of the row lacks q.mu.
            const float* mu = call.k_offset + int64_t(job.head) * d;
            double dot = 0.0;
            for (int c = 0; c < d; ++c) dot += double(x[c]) * double(mu[c]);
            scratch.bias[r] = float(dot * double(unit));
        }
        if (call.rotation_signs) codec.rotate(x, d, call.rotation_signs);
        const float scale = stage1_scale(codec.amax(x, d), call.q_levels);
        codec.quantize(x, d, scale, call.q_levels, scratch.q + r * d);
        scratch.q_scale[r] = scale * unit;
        const KeyRange keys = visible_keys(s, seq.n_keys, position);
        scratch.key_begin[r] = keys.begin;
        scratch.key_end[r] = keys.end;
        scratch.position[r] = position;
        if (s.alibi_slopes) scratch.slope[r] = s.alibi_slopes[q_head] * cpu::kLog2e;
    }
}

void AttendExecutor::run_job(const AttendCall& call, const Job& job, Scratch& scratch, std::atomic<uint64_t>& saturated) {
    const AttendSettings& s = call.settings;
    const AttendSequence& seq = call.sequences[size_t(job.sequence)];
    const int d = call.head_dim;
    const int64_t rows = job.row_end - job.row_begin;
    place_pages(call, job, scratch);
    quantize_queries(call, job, scratch, saturated);

    float* parts = reinterpret_cast<float*>(partials_.data());
    const bool partial = job.partial_row >= 0;
    float* o = partial ? parts + job.partial_row * d : scratch.o;
    float* m = partial ? parts + partial_rows_ * d + job.partial_row : scratch.m;
    float* l = partial ? parts + partial_rows_ * (d + 1) + job.partial_row : scratch.l;
    std::fill_n(o, rows * d, 0.0f);
    std::fill_n(m, rows, cpu::kMinusInf);
    std::fill_n(l, rows, 0.0f);

    const PFormat p = p_format(s.p, seq.n_query * call.group);
    cpu::AttendTask task{};
    task.head_dim = d;
    task.pages = scratch.pages_;
    task.n_keys = seq.n_keys;
    task.rows = int(rows);
    task.q = scratch.q;
    task.q_scale = scratch.q_scale;
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
    task.o = o;
    task.m = m;
    task.l = l;
    task.workspace = scratch.workspace;
    if (job.mass >= 0) {
        for (int64_t page = 0; page < job.pages(); ++page) {
            std::fill_n(scratch.page_sums + page * 2 * rows, rows, 1.0f);
            std::fill_n(scratch.page_sums + (page * 2 + 1) * rows, rows, 0.0f);
        }
    }
    for (task.page_begin = job.page_begin; task.page_begin < job.page_end; task.page_begin = task.page_end) {
        const bool low = end_run(seq.pages, task.page_begin, job.page_end, task.page_end);
        task.k_bits = low ? 2 : call.k_bits ? call.k_bits[job.head] : 8;
        task.v_bits = low ? 2 : call.v_bits ? call.v_bits[job.head] : 8;
        if (job.mass >= 0) task.page_sums = scratch.page_sums + (task.page_begin - job.page_begin) * 2 * rows;
        context_.kernels().attend(task);
    }
    if (job.mass >= 0) fold_page_sums(job, scratch.page_sums);
    if (partial) return;
    for (int64_t r = 0; r < rows; ++r) scratch.factor[r] = finish_row(call, job, r, m[r], l[r], o + r * d, scratch);
    if (job.mass >= 0) add_masses(job, scratch.factor + (job.observed_begin - job.row_begin));
}

void AttendExecutor::merge_group(const AttendCall& call, const Group& group, Scratch& scratch) {
    if (group.last - group.first == 1) return;
    const int d = call.head_dim;
    const float* o = reinterpret_cast<const float*>(partials_.data());
    const float* m = o + partial_rows_ * d;
    const float* l = m + partial_rows_;
    const Job& job = jobs_[group.first];
    for (int64_t r = 0; r < job.row_end - job.row_begin; ++r) {
        float m_all = cpu::kMinusInf, l_all = 0.0f;
        for (size_t j = group.first; j < group.last; ++j) m_all = std::max(m_all, m[jobs_[j].partial_row + r]);
        std::fill_n(scratch.o, d, 0.0f);
        for (size_t j = group.first; j < group.last; ++j) {
            const int64_t part = jobs_[j].partial_row + r;
            if (m[part] == cpu::kMinusInf) continue;
            const float weight = cpu::exp2_neg_exact(m_all - m[part]);
            l_all = std::fma(weight, l[part], l_all);
            for (int c = 0; c < d; ++c) scratch.o[c] = std::fma(weight, o[part * d + c], scratch.o[c]);
        }
        scratch.m[r] = m_all;
        scratch.factor[r] = finish_row(call, job, r, m_all, l_all, scratch.o, scratch);
    }
    if (job.mass < 0) return;
    for (size_t j = group.first; j < group.last; ++j) {
        const Job& part = jobs_[j];
        for (int64_t r = part.observed_begin - part.row_begin; r < part.row_end - part.row_begin; ++r) {
            const float m_part = m[part.partial_row + r];
            scratch.l[r] = m_part == cpu::kMinusInf ? 0.0f : scratch.factor[r] * cpu::exp2_neg_exact(scratch.m[r] - m_part);
        }
        add_masses(part, scratch.l + (part.observed_begin - part.row_begin));
    }
}

// Divides by the denominator, with the learned sink in it, and writes the row. Returns what it multiplied with.
float AttendExecutor::finish_row(const AttendCall& call, const Job& job, int64_t row, float m, float l, float* o,
                                 Scratch& scratch) const {
    const AttendSequence& seq = call.sequences[size_t(job.sequence)];
    const int64_t token = seq.query_row + (job.row_begin + row) / call.group;
    const int64_t q_head = int64_t(job.head) * call.group + (job.row_begin + row) % call.group;
    const int d = call.head_dim;
    double denominator = l, top = m;  // the denominator is denominator * 2^top
    float weight = 1.0f;
    if (call.settings.sinks) {
        const double sink = double(call.settings.sinks[q_head]) * double(cpu::kLog2e);
        top = std::max(double(m), sink);
        weight = m == cpu::kMinusInf ? 0.0f : float(std::exp2(double(m) - top));
        denominator = double(l) * double(weight) + std::exp2(sink - top);
    }
    const float factor = denominator > 0.0 ? float(double(weight) / denominator) : 0.0f;
    for (int c = 0; c < d; ++c) scratch.row[c] = o[c] * factor;
    context_.kernels().codec->from_float(scratch.row, d, call.out.dtype, call.out.at(token, q_head));
    if (!call.lse) return factor;
    call.lse[token * call.kv_heads * call.group + q_head] =
        denominator > 0.0 ? float((top + std::log2(denominator)) / double(cpu::kLog2e)) : cpu::kMinusInf;
    return factor;
}

}  // namespace ta
