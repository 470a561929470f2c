// Times of the CUDA prefill kernel: medians, L2 flushed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/cuda/any/expand/expand.h"
#include "support/numbers.h"
#include "tests/kernels/cuda/prefill_support.h"

namespace ta::cuda::testing {

int bench(const std::string& only, bool whole, const std::vector<const PrefillVariant*>& kernels);

namespace {

using ta::testing::Random;

struct Shape {
    const char* name;
    int batch, n_keys, n_query;
    bool causal;
    Pages pages;
    int bits;
    int d = 128;
    bool lse = false;
    ExpMode exp = ExpMode::kPoly;
    bool expanded = false;
};

// Pages repeat after kDistinct; addresses do not.
class Bench {
  public:
    Bench(const Shape& s, const PrefillVariant& kernel, bool whole)
        : s_(s),
          kernel_(kernel),
          pool_({s.d, kKvHeads, std::vector<uint8_t>(kKvHeads, uint8_t(s.bits)),
                 std::vector<uint8_t>(kKvHeads, uint8_t(s.bits))}) {
        constexpr int kDistinct = 16;
        Random random(1);
        const size_t page = size_t(kPageTokens) * kKvHeads * size_t(s.d);
        std::vector<float> k = random.normals(int64_t(page) * kDistinct, 1.0f),
                           v = random.normals(int64_t(page) * kDistinct, 1.0f);
        const int pages = (s.n_keys + 63) / 64, cached = s.pages == Pages::kPrefix ? (s.n_keys - s.n_query) / 64 : 0;
        std::vector<uint64_t> models[2];
        for (int n = 0; n < kDistinct; ++n) {
            const float *pk = k.data() + n * page, *pv = v.data() + n * page;
            models[0].push_back(pool_.add(PageKind::kToken, pk, pv, 64, false));
            const ScaleRule v_rule = s.pages == Pages::kPrompt ? ScaleRule::kPageExp : ScaleRule::kPage;
            if (s.pages != Pages::kTokenOwnScale) give_page_scales(pool_, models[0].back(), pk, pv, 64, v_rule);
            if (cached) models[1].push_back(pool_.add(PageKind::kChannel, pk, pv, 64, false));
        }
        const uint64_t first =
            s.pages == Pages::kPrompt ? pool_.add(PageKind::kToken, k.data(), v.data(), 64, false) : models[0][0];
        std::vector<uint8_t> bytes;
        std::vector<uint64_t> table;
        std::vector<SequenceArgs> sequences;
        for (int b = 0; b < s.batch; ++b) {
            sequences.push_back({s.n_keys, s.n_query, b * s.n_query, int32_t(table.size())});
            for (int n = 0; n < pages; ++n) {
                const bool channel = n > 0 && n < cached;
                const uint64_t from = n == 0 ? first : models[channel][size_t(n % kDistinct)];
                const size_t size = pool_.slot_bytes(channel ? PageKind::kChannel : PageKind::kToken);
                table.push_back(bytes.size() | (from & kEntryFlags));
                const auto* slot = pool_.bytes().data() + (from & ~kEntryFlags);
                bytes.insert(bytes.end(), slot, slot + size);
            }
        }
        d_pool_ = DevicePool(bytes);
        for (uint64_t& e : table) e += d_pool_.address();
        d_table_ = Device<uint64_t>(table);
        d_heads_ = Device<HeadArgs>(pool_.heads());
        const size_t row = size_t(kKvHeads) * kGroup * size_t(s.d), rows = size_t(s.batch) * size_t(s.n_query);
        std::vector<float> normals = random.normals(int64_t(row) * 64 + 7919, 1.0f);
        std::vector<uint16_t> q(rows * row);
        for (size_t n = 0; n < q.size(); ++n) q[n] = ta::testing::float_to_f16(normals[n % normals.size()]);
        d_q_ = Device<uint16_t>(q);
        d_out_ = Device<uint16_t>(q.size());
        d_lse_ = Device<float>(rows * kKvHeads * kGroup);
        d_signs_ = Device<float>(std::vector<float>(size_t(s.d), 1.0f));
        ctas_ = multiprocessors();
        const int cut_every = s.exp == ExpMode::kSas ? kPromptRangePages : 2;
        const PrefillShape shape{kGroup, s.causal, 0, kKvHeads, whole ? 0 : ctas_, cut_every, kernel.rows};
        PrefillPlan plan(sequences, shape);
        if (!cached && !whole) {
            PrefillPlan resident = PrefillPlan::resident(sequences, shape, kernel.resident_keys(args_of(s)), ctas_);
            args_.resident = !resident.tiles().empty();
            if (args_.resident) plan = std::move(resident);
        }
        std::vector<uint8_t> schedule(plan.bytes());
        plan.write(schedule.data());
        d_schedule_ = Device<uint8_t>(schedule);
        d_workspace_ = Device<uint8_t>(prefill_workspace_bytes(kernel.rows, s.d, ctas_));
        AttendArgs& a = args_;
        a.head_dim = s.d, a.kv_heads = kKvHeads, a.group = kGroup, a.batch = s.batch, a.table = d_table_.get();
        a.heads = cached ? d_heads_.get() : nullptr;
        a.token_layer_offset = pool_.token_layer_offset(), a.channel_layer_offset = pool_.channel_layer_offset();
        a.q = {d_q_.get(), int64_t(row), s.d, DType::kF16}, a.out = {d_out_.get(), int64_t(row), s.d, DType::kF16};
        a.lse = s.lse ? d_lse_.get() : nullptr, a.signs = d_signs_.get(), a.q_levels = kStage1Levels,
        a.scale = float(1.0 / std::sqrt(double(s.d)));
        a.causal = s.causal, a.exp = s.exp, a.p_levels = 255;
        a.long_tiles = plan.has_long_tiles() && s.pages != Pages::kTokenOwnScale;
        if (!s.expanded) return;
        const std::vector<uint32_t> entries = plan.entries();
        d_entries_ = Device<uint32_t>(entries);
        d_expanded_ = Device<uint8_t>(entries.size() * expanded_page_bytes(s.d, kKvHeads) + kEntryFlags);
        d_expanded_table_ = Device<uint64_t>(table.size());
        const uint64_t to = (reinterpret_cast<uint64_t>(d_expanded_.get()) + kEntryFlags) & ~kEntryFlags;
        expand_ = {d_entries_.get(), int32_t(entries.size()), reinterpret_cast<uint8_t*>(to), d_expanded_table_.get()};
    }

    void run(Device<uint8_t>& flush, size_t flush_bytes, int runs) {
        cudaEvent_t begin, end;
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
        std::vector<float> times;
        for (int n = 0; n < runs + 2; ++n) {
            CHECK(cudaMemsetAsync(flush.get(), n, flush_bytes));
            CHECK(cudaEventRecord(begin));
            AttendArgs args = args_;
            if (s_.expanded) {
                CHECK(cudaError_t(launch_expand(args, expand_, nullptr)));
                args.table = expand_.table, args.heads = nullptr;
            }
            CHECK(kernel_.launch(args, d_schedule_.get(), d_workspace_.get(), ctas_, nullptr));
            CHECK(cudaEventRecord(end));
            CHECK(cudaEventSynchronize(end));
            float ms = 0.0f;
            CHECK(cudaEventElapsedTime(&ms, begin, end));
            if (n >= 2) times.push_back(ms);
        }
        std::sort(times.begin(), times.end());
        const double ms = times[times.size() / 2];
        const double keys = s_.causal ? s_.n_keys - (s_.n_query - 1) / 2.0 : s_.n_keys;
        const double operations = 4.0 * s_.batch * kKvHeads * kGroup * double(s_.n_query) * keys * s_.d;
        std::printf("%-36s %-4s %8.4f ms  %6.0f TOPS  (min %.4f)\n", s_.name, kernel_.major ? "sm90" : "sm80", ms,
                    operations / ms * 1e-9, double(times[0]));
        std::fflush(stdout);
        CHECK(cudaEventDestroy(begin));
        CHECK(cudaEventDestroy(end));
    }

  private:
    static AttendArgs args_of(const Shape& s) {
        AttendArgs a{};
        a.head_dim = s.d;
        return a;
    }
    static constexpr int kKvHeads = 8, kGroup = 4;
    Shape s_;
    const PrefillVariant& kernel_;
    PagePool pool_;
    int ctas_ = 0;
    DevicePool d_pool_;
    Device<uint8_t> d_schedule_, d_workspace_, d_expanded_;
    Device<uint64_t> d_table_, d_expanded_table_;
    Device<uint32_t> d_entries_;
    ExpandArgs expand_{};
    Device<HeadArgs> d_heads_;
    Device<uint16_t> d_q_, d_out_;
    Device<float> d_lse_, d_signs_;
    AttendArgs args_{};
};

}  // namespace

int bench(const std::string& only, bool whole, const std::vector<const PrefillVariant*>& kernels) {
    constexpr size_t kFlush = size_t(256) << 20;
    Device<uint8_t> flush(kFlush);
    const Shape shapes[] = {
        {"b1 h32/8 n16384 full", 1, 16384, 16384, false, Pages::kToken, 4},
        {"b1 h32/8 n16384 causal", 1, 16384, 16384, true, Pages::kToken, 4},
        {"b4 h32/8 n4096 causal", 4, 4096, 4096, true, Pages::kToken, 4},
        {"b16 h32/8 n1024 causal", 16, 1024, 1024, true, Pages::kToken, 4},
        {"chunk 2048 on 30720 INT4", 1, 32768, 2048, true, Pages::kPrefix, 4},
        {"chunk 2048 on 30720 INT2", 1, 32768, 2048, true, Pages::kPrefix, 2},
        {"chunk 64 on 32704 INT4", 1, 32768, 64, true, Pages::kPrefix, 4},
        {"chunk 512 on 32256 INT4", 1, 32768, 512, true, Pages::kPrefix, 4},
        {"chunk 2048 on 30720 INT4, expanded", 1, 32768, 2048, true, Pages::kPrefix, 4, 128, false, ExpMode::kPoly, true},
        {"chunk 2048 on 30720 INT2, expanded", 1, 32768, 2048, true, Pages::kPrefix, 2, 128, false, ExpMode::kPoly, true},
        {"chunk 64 on 32704 INT4, expanded", 1, 32768, 64, true, Pages::kPrefix, 4, 128, false, ExpMode::kPoly, true},
        {"chunk 128 on 32640 INT4", 1, 32768, 128, true, Pages::kPrefix, 4},
        {"chunk 128 on 32640 INT4, expanded", 1, 32768, 128, true, Pages::kPrefix, 4, 128, false, ExpMode::kPoly, true},
        {"chunk 256 on 32512 INT4", 1, 32768, 256, true, Pages::kPrefix, 4},
        {"chunk 256 on 32512 INT4, expanded", 1, 32768, 256, true, Pages::kPrefix, 4, 128, false, ExpMode::kPoly, true},
        {"chunk 512 on 32256 INT4, expanded", 1, 32768, 512, true, Pages::kPrefix, 4, 128, false, ExpMode::kPoly, true},
        {"b1 h32/8 n1024 causal", 1, 1024, 1024, true, Pages::kToken, 4},
        {"b1 h32/8 n2048 causal", 1, 2048, 2048, true, Pages::kToken, 4},
        {"chunk 2048 on 30720 INT8", 1, 32768, 2048, true, Pages::kToken, 4},
        {"n16384 full, a prompt", 1, 16384, 16384, false, Pages::kPrompt, 4},
        {"n16384 causal, a prompt", 1, 16384, 16384, true, Pages::kPrompt, 4},
        {"n16384 causal, token scales", 1, 16384, 16384, true, Pages::kTokenOwnScale, 4},
        {"n16384 causal, LSE", 1, 16384, 16384, true, Pages::kToken, 4, 128, true},
        {"chunk 2048 on 30720 INT4, SAS", 1, 32768, 2048, true, Pages::kPrefix, 4, 128, false, ExpMode::kSas},
        {"n16384 causal, SAS", 1, 16384, 16384, true, Pages::kToken, 4, 128, false, ExpMode::kSas},
        {"b64 h32/8 n512 causal", 64, 512, 512, true, Pages::kToken, 4},
        {"b128 h32/8 n256 causal", 128, 256, 256, true, Pages::kToken, 4},
        {"b256 h32/8 n128 causal", 256, 128, 128, true, Pages::kToken, 4},
        {"b64 n512 causal, a prompt", 64, 512, 512, true, Pages::kPrompt, 4},
        {"b64 n512 causal, token scales", 64, 512, 512, true, Pages::kTokenOwnScale, 4},
        {"b64 n512 causal, SAS", 64, 512, 512, true, Pages::kToken, 4, 128, false, ExpMode::kSas},
        {"b64 n512 full", 64, 512, 512, false, Pages::kToken, 4},
        {"b1 n512 causal", 1, 512, 512, true, Pages::kToken, 4},
        {"b8 n256 causal", 8, 256, 256, true, Pages::kToken, 4},
        {"b16 n1024 causal d64", 16, 1024, 1024, true, Pages::kToken, 4, 64},
        {"b64 n512 causal d64", 64, 512, 512, true, Pages::kToken, 4, 64},
        {"b1 h32/8 n16384 causal d64", 1, 16384, 16384, true, Pages::kToken, 4, 64},
        {"n16384 causal d64, a prompt", 1, 16384, 16384, true, Pages::kPrompt, 4, 64},
        {"b1 h32/8 n16384 causal d256", 1, 16384, 16384, true, Pages::kToken, 4, 256},
        {"b1 h32/8 n16384 causal d96", 1, 16384, 16384, true, Pages::kToken, 4, 96},
    };
    for (const Shape& s : shapes) {
        if (std::string(s.name).find(only) == std::string::npos) continue;
        for (const PrefillVariant* kernel : kernels) {
            AttendArgs probe{};
            probe.head_dim = s.d, probe.p_levels = 255;
            if (!kernel->refusal(probe)) Bench(s, *kernel, whole).run(flush, kFlush, 15);
        }
    }
    return 0;
}

}  // namespace ta::cuda::testing
