// Attention against the vectors, through the public C ABI alone. Pages are compared byte by byte as docs/FORMAT.md
// describes them; the positions are computed here on their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "turboattention.h"
#include "turboattention_experimental.h"
#include "vectors.h"

namespace {

using ta::vectors::Array;
using ta::vectors::Case;

#define TA_CHECK(call)                                                           \
    do {                                                                         \
        ta_error e_ = {};                                                        \
        ta_error* err = &e_;                                                     \
        ASSERT_EQ(call, TA_OK) << ta_status_name(e_.code) << ": " << e_.message; \
    } while (false)

struct Handles {
    ta_context* context = nullptr;
    ta_kv_pool* pool = nullptr;
    ta_plan* plan = nullptr;
    Handles() = default;
    Handles(const Handles&) = delete;
    Handles& operator=(const Handles&) = delete;
    ~Handles() {
        ta_plan_destroy(plan);
        ta_kv_pool_destroy(pool);
        ta_context_destroy(context);
    }
};

void create_context(ta_cpu_isa isa, ta_context** out) {
    ta_context_options options = {};
    options.struct_size = sizeof options;
    options.threads = 2;
    options.cpu_isa = isa;
    TA_CHECK(ta_context_create(&options, out, err));
}

ta_tensor view(std::vector<uint16_t>& data, int64_t first, int64_t tokens, int64_t heads, int64_t d) {
    ta_tensor t = {};
    t.struct_size = sizeof t;
    t.dtype = TA_DTYPE_F16;
    t.data = data.data() + first * heads * d;
    t.tokens = tokens;
    t.heads = heads;
    t.head_dim = d;
    return t;
}

ta_tensor view(std::vector<float>& data, int64_t tokens, int64_t heads, int64_t d) {
    ta_tensor t = {};
    t.struct_size = sizeof t;
    t.dtype = TA_DTYPE_F32;
    t.data = data.data();
    t.tokens = tokens;
    t.heads = heads;
    t.head_dim = d;
    return t;
}

ta_attend_options attend_options(ta_exp exp, ta_p p) {
    ta_attend_options o = {};
    o.struct_size = sizeof o;
    o.exp = exp;
    o.p = p;
    return o;
}

struct Result {
    std::vector<float> o, lse;
};

struct Distance {
    double rel_l2 = 0, max_abs = 0, lse = 0;
};

Distance distance(const Result& got, const Case& test, const std::string& ref) {
    const auto o = test.array<float>("o_" + ref), lse = test.array<float>("lse_" + ref);
    EXPECT_EQ(got.o.size(), o.size());
    EXPECT_EQ(got.lse.size(), lse.size());
    Distance out;
    double error = 0, norm = 0;
    for (size_t i = 0; i < o.size(); ++i) {
        const double e = double(got.o[i]) - o[i];
        error += e * e;
        norm += double(o[i]) * o[i];
        // A NaN must not pass for small.
        if (!(std::fabs(e) <= out.max_abs)) out.max_abs = std::isnan(e) ? INFINITY : std::fabs(e);
    }
    out.rel_l2 = std::sqrt(error / norm);
    for (size_t i = 0; i < lse.size(); ++i) {
        if (std::isinf(lse[i]) && got.lse[i] == lse[i]) continue;
        const double e = std::fabs(double(got.lse[i]) - lse[i]);
        if (!(e <= out.lse)) out.lse = std::isnan(e) ? INFINITY : e;
    }
    return out;
}

void log_distance(const Case& test, const std::string& what, const Distance& d) {
    testing::Test::RecordProperty(test.name() + "." + what,
                                  std::to_string(d.rel_l2) + " " + std::to_string(d.max_abs) + " " + std::to_string(d.lse));
    if (std::getenv("TA_VECTORS_VERBOSE")) {
        std::printf("%-24s %-28s rel_l2 %.3e  max %.3e  lse %.3e\n", test.name().c_str(), what.c_str(), d.rel_l2, d.max_abs,
                    d.lse);
    }
}

// Tight: the same arithmetic in the same tiles. `slack` adds to rel_l2 and lse_atol what docs/numerics.md departs by.
void expect_tight(const Result& got, const Case& test, const std::string& ref, double slack = 0.0) {
    const Distance d = distance(got, test, ref);
    log_distance(test, "tight." + ref, d);
    const auto& bound = test.json().at("refs").at(ref);
    EXPECT_LE(d.rel_l2, bound.at("rel_l2").get<double>() + slack) << test.name() << " against " << ref;
    EXPECT_LE(d.max_abs, bound.at("atol").get<double>()) << test.name() << " against " << ref;
    EXPECT_LE(d.lse, bound.at("lse_atol").get<double>() + slack) << test.name() << " against " << ref;
}

// Envelope: no further from exact attention than 1.25 times the reference's own distance.
void expect_envelope(const Result& got, const Case& test, const std::string& ref) {
    const Distance d = distance(got, test, "exact");
    log_distance(test, "envelope." + ref, d);
    const auto& bound = test.json().at("refs").at(ref);
    EXPECT_LE(d.rel_l2, bound.at("env_rel_l2").get<double>()) << test.name() << ", envelope of " << ref;
    EXPECT_LE(d.lse, bound.at("env_lse").get<double>()) << test.name() << ", envelope of " << ref;
}

// Rotated keys have other rounding errors, so a single row's LSE has no bound of its own; the error of O must not be
// larger.
void expect_more_accurate(const Result& got, const Case& test) {
    const Distance d = distance(got, test, "exact");
    log_distance(test, "accurate", d);
    EXPECT_LE(d.rel_l2, test.json().at("refs").at("spec").at("oracle_rel_l2").get<double>()) << test.name();
}

struct AttentionVectors : testing::TestWithParam<ta_cpu_isa> {
    void SetUp() override {
        ta_context_options options = {};
        options.struct_size = sizeof options;
        options.threads = 1;
        options.cpu_isa = GetParam();
        ta_context* context = nullptr;
        const ta_status status = ta_context_create(&options, &context, nullptr);
        ta_context_destroy(context);
        if (status == TA_E_UNSUPPORTED) GTEST_SKIP() << "this CPU or build does not run these kernels";
    }
};
INSTANTIATE_TEST_SUITE_P(
    , AttentionVectors, testing::Values(TA_CPU_ISA_AUTO, TA_CPU_ISA_AVX2, TA_CPU_ISA_SCALAR), [](const auto& param) {
        return std::string(param.param == TA_CPU_ISA_AUTO ? "best" : param.param == TA_CPU_ISA_AVX2 ? "avx2" : "scalar");
    });

// ------------------------------------------------------------------------------------------------ prefill

void run_dense(const Case& test, ta_cpu_isa isa, ta_exp exp, ta_p p, Result* out) {
    Handles h;
    ASSERT_NO_FATAL_FAILURE(create_context(isa, &h.context));
    const int64_t d = test.get<int64_t>("d"), hq = test.get<int64_t>("hq"), hkv = test.get<int64_t>("hkv");
    std::vector<uint16_t> q = test.halves("q"), k = test.halves("k"), v = test.halves("v");
    const auto cu_q = test.array<int64_t>("cu_q"), cu_k = test.array<int64_t>("cu_k");
    const int64_t nq = cu_q.data.back(), nk = cu_k.data.back();
    out->o.assign(size_t(nq * hq * d), NAN);
    out->lse.assign(size_t(nq * hq), NAN);
    const ta_attend_options attend = attend_options(exp, p);
    ta_dense_options options = {};
    options.struct_size = sizeof options;
    options.variant = TA_DENSE_INT8_PAGE;
    options.batch = uint32_t(cu_q.size() - 1);
    options.q_offsets = cu_q.data.data();
    options.k_offsets = cu_k.data.data();
    options.attend = &attend;
    const ta_tensor tq = view(q, 0, nq, hq, d), tk = view(k, 0, nk, hkv, d), tv = view(v, 0, nk, hkv, d);
    const ta_tensor to = view(out->o, nq, hq, d);
    TA_CHECK(ta_attend_dense(h.context, &tq, &tk, &tv, &to, out->lse.data(), &options, err));
}

ta_numerics paper_numerics() {
    ta_numerics n = {};
    n.struct_size = sizeof n;
    n.profile = TA_PROFILE_PAPER;
    return n;
}

void create_pool(Handles& h, const Case& test, const ta_numerics& numerics, const std::vector<uint8_t>& k_bits,
                 const std::vector<uint8_t>& v_bits) {
    ta_kv_pool_options options = {};
    options.struct_size = sizeof options;
    options.layers = 1;
    options.kv_heads = test.get<uint32_t>("hkv");
    options.head_dim = test.get<uint32_t>("d");
    options.k_bits = k_bits.empty() ? nullptr : k_bits.data();
    options.v_bits = v_bits.empty() ? nullptr : v_bits.data();
    options.budget_bytes = 64 << 20;
    options.numerics = &numerics;
    TA_CHECK(ta_kv_pool_create(h.context, &options, &h.pool, err));
    TA_CHECK(ta_plan_create(h.pool, nullptr, &h.plan, err));
}

// The ragged batch as sequences of a pool: one step that brings all keys and asks with the last tokens.
void run_pool_prefill(const Case& test, ta_cpu_isa isa, const ta_numerics& numerics, Result* out) {
    Handles h;
    ASSERT_NO_FATAL_FAILURE(create_context(isa, &h.context));
    ASSERT_NO_FATAL_FAILURE(create_pool(h, test, numerics, {}, {}));
    const int64_t d = test.get<int64_t>("d"), hq = test.get<int64_t>("hq"), hkv = test.get<int64_t>("hkv");
    std::vector<uint16_t> q = test.halves("q"), k = test.halves("k"), v = test.halves("v");
    const auto cu_q = test.array<int32_t>("cu_q"), cu_k = test.array<int32_t>("cu_k");
    const size_t batch = cu_q.size() - 1;
    std::vector<ta_seq> seqs(batch);
    std::vector<int32_t> n_new(batch), n_query(batch);
    for (size_t i = 0; i < batch; ++i) {
        TA_CHECK(ta_seq_create(h.pool, &seqs[i], err));
        n_new[i] = cu_k[i + 1] - cu_k[i];
        n_query[i] = cu_q[i + 1] - cu_q[i];
    }
    const int64_t nq = cu_q.data.back(), nk = cu_k.data.back();
    out->o.assign(size_t(nq * hq * d), NAN);
    out->lse.assign(size_t(nq * hq), NAN);
    const ta_tensor tq = view(q, 0, nq, hq, d), tk = view(k, 0, nk, hkv, d), tv = view(v, 0, nk, hkv, d);
    const ta_tensor to = view(out->o, nq, hq, d);
    TA_CHECK(ta_plan_begin(h.plan, uint32_t(batch), seqs.data(), n_new.data(), n_query.data(), nullptr, err));
    TA_CHECK(ta_append(h.plan, 0, &tk, &tv, err));
    TA_CHECK(ta_attend(h.plan, 0, &tq, &to, out->lse.data(), nullptr, err));
    TA_CHECK(ta_plan_end(h.plan, nullptr, err));
}

void check_prefill(const char* name, ta_cpu_isa isa) {
    TA_LOAD_CASE(test, name);
    Result r;
    ASSERT_NO_FATAL_FAILURE(run_dense(test, isa, TA_EXP_EXACT, TA_P_S8_127, &r));
    expect_tight(r, test, "spec");
    expect_envelope(r, test, "spec");
    ASSERT_NO_FATAL_FAILURE(run_dense(test, isa, TA_EXP_POLY, TA_P_U8, &r));
    expect_envelope(r, test, "spec");
    // `paper` gives a tile of queries one scale, we give each row its own: no tight comparison.
    ASSERT_NO_FATAL_FAILURE(run_dense(test, isa, TA_EXP_SAS, TA_P_S8_119, &r));
    expect_envelope(r, test, "paper");

    ta_numerics numerics = paper_numerics();
    ASSERT_NO_FATAL_FAILURE(run_pool_prefill(test, isa, numerics, &r));
    expect_envelope(r, test, "paper");
    numerics.open_scale = TA_OPEN_SCALE_TOKEN;
    numerics.exp = TA_EXP_EXACT;
    numerics.p = TA_P_S8_127;
    ASSERT_NO_FATAL_FAILURE(run_pool_prefill(test, isa, numerics, &r));
    expect_envelope(r, test, "spec");
    ta_numerics accurate = {};
    accurate.struct_size = sizeof accurate;
    ASSERT_NO_FATAL_FAILURE(run_pool_prefill(test, isa, accurate, &r));
    expect_more_accurate(r, test);
}

TEST_P(AttentionVectors, PrefillGqa4D64Ragged) {
    check_prefill("pre_gqa4_d64_ragged", GetParam());
}
TEST_P(AttentionVectors, PrefillFewerQueriesThanKeys) {
    check_prefill("pre_nq_lt_nk", GetParam());
}
TEST_P(AttentionVectors, PrefillRisingMaximum) {
    check_prefill("advp_rising_max", GetParam());
}

// --------------------------------------------------------------------------------------- decode and chunks

float load_f32(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// docs/FORMAT.md, "Order of the codes": byte and lowest bit of a code.
struct Place {
    size_t byte;
    int shift;
};
Place place_of(bool is_v, int d, int bits, int token, int channel) {
    const int per_byte = 8 / bits;
    int tile, r, i, step, low, high, b;  // low, high: bits 0 and 1 of the word index
    if (is_v) {
        const int stored = (d + 16 * per_byte - 1) / (16 * per_byte) * 16 * per_byte, run = stored / 8;
        r = channel / run, tile = channel % run / 2, low = channel % 2;
        high = token / 32, b = token / 8 % 4, i = token / 2 % 4, step = token % 2;
    } else {
        const int run = d / 4;
        tile = token / 16, low = token / 8 % 2, r = token % 8;
        i = channel / run, step = channel % run / 8, high = channel / 4 % 2, b = channel % 4;
    }
    const int steps = is_v ? 2 : d / 32;
    const int load = tile / per_byte * steps + step;
    return {size_t(load) * 512 + size_t(4 * r + i) * 16 + size_t(2 * high + low) * 4 + size_t(b), tile % per_byte * bits};
}

struct Slot {
    ta_x_block_info info = {};
    std::vector<uint8_t> bytes;
};

void read_slot(const Handles& h, ta_seq seq, uint64_t block, Slot* out) {
    out->info.struct_size = sizeof out->info;
    TA_CHECK(ta_x_seq_block(h.pool, seq, block, &out->info, nullptr, 0, err));
    out->bytes.assign(out->info.bytes, 0);
    TA_CHECK(ta_x_seq_block(h.pool, seq, block, &out->info, out->bytes.data(), out->bytes.size(), err));
}

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

// Pages of layer 0 against the vectors' k_c, k_s, k_z, k_s1 (closed) and kb_q, kb_s (open), and the same of V.
void check_pages(const Handles& h, ta_seq seq, const Case& test) {
    const int d = test.get<int>("d"), heads = test.get<int>("hkv");
    const auto bits_of_k = test.get<std::vector<int>>("kbits"), bits_of_v = test.get<std::vector<int>>("vbits");
    const auto closed = size_t(test.array<float>("k_s1").shape[1]);
    const bool open = test.has("kb_q");
    for (size_t block = 0; block < closed + open; ++block) {
        Slot slot;
        ASSERT_NO_FATAL_FAILURE(read_slot(h, seq, block, &slot));
        ASSERT_EQ(slot.info.bits == 8, block == closed) << "block " << block;
        size_t piece = 0;
        for (int head = 0; head < heads; ++head) {
            size_t end = 0;
            for (const bool is_v : {false, true}) {
                const std::string name = is_v ? "v" : "k";
                SCOPED_TRACE(test.name() + " " + name + " block " + std::to_string(block) + " head " + std::to_string(head));
                const int kb = bits_of_k[head], vb = bits_of_v[head], bits = is_v ? vb : kb;
                if (block == closed) {
                    const auto q = test.array<int>(name + "b_q");
                    const auto s = test.array<float>(name + "b_s");
                    const int64_t tokens = q.shape[1];
                    ASSERT_EQ(int64_t(slot.info.tokens), tokens);
                    const uint8_t* codes = &slot.bytes[piece + (is_v ? size_t(64) * d : 0)];
                    const uint8_t* scales = &slot.bytes[piece + size_t(128) * d + (is_v ? 256 : 0)];
                    for (int t = 0; t < tokens; ++t) {
                        const float scale = s[size_t(head) * tokens + t];
                        ASSERT_NEAR(load_f32(scales + 4 * t), scale, 1e-6 * scale) << "token " << t;
                        for (int c = 0; c < d; ++c) {
                            const int code = int8_t(codes[place_of(is_v, d, 8, t, c).byte]);
                            ASSERT_NEAR(code, q[(size_t(head) * tokens + t) * d + c], 1) << "token " << t << " channel " << c;
                        }
                    }
                    end = size_t(128) * d + 512;
                    continue;
                }
                const size_t at = size_t(head) * closed + block;
                const size_t k_bytes = size_t(8) * d * kb;
                const size_t v_bytes = round_up(size_t(d), size_t(16) * (8 / vb)) * 8 * vb;
                const uint8_t* codes = &slot.bytes[piece + (is_v ? k_bytes : 0)];
                const uint8_t* metadata = &slot.bytes[piece + k_bytes + v_bytes];
                const uint8_t *step = metadata + (is_v ? 2 * d : 0), *zero = step + d;
                const float scale = test.array<float>(name + "_s1")[at];
                ASSERT_NEAR(load_f32(metadata + 4 * d + 32 + (is_v ? 4 : 0)), scale, 1e-6 * scale);
                const auto c = test.array<int>(name + "_c"), s = test.array<int>(name + "_s"), z = test.array<int>(name + "_z");
                for (int channel = 0; channel < d; ++channel) {
                    ASSERT_EQ(step[channel], s[at * d + channel]) << "channel " << channel;
                    ASSERT_EQ(int8_t(zero[channel]), z[at * d + channel]) << "channel " << channel;
                    for (int t = 0; t < 64; ++t) {
                        const Place p = place_of(is_v, d, bits, t, channel);
                        ASSERT_EQ(codes[p.byte] >> p.shift & ((1 << bits) - 1), c[(at * 64 + t) * d + channel])
                            << "token " << t << " channel " << channel;
                    }
                }
                for (int i = 0; i < 32; ++i) ASSERT_EQ(metadata[4 * d + i], 0) << "no token exponents in this profile";
                end = round_up(k_bytes + v_bytes + size_t(4) * d + 40, 128);
            }
            piece += end;
        }
        EXPECT_EQ(slot.info.trailer_offset, piece);
        EXPECT_EQ(std::memcmp(&slot.bytes[piece], "TAKV", 4), 0);
    }
}

struct Setting {
    ta_exp exp;
    ta_p p;
    Result result;
};

// Prefills, decodes one by one, attends with every setting at the end. `chunk`: the last step brings the chunk and
// attends with it. The pages are checked once.
void run_pool(const Case& test, ta_cpu_isa isa, const ta_numerics& numerics, bool with_pages, std::vector<Setting>* settings) {
    Handles h;
    ASSERT_NO_FATAL_FAILURE(create_context(isa, &h.context));
    const auto kb = test.get<std::vector<uint8_t>>("kbits"), vb = test.get<std::vector<uint8_t>>("vbits");
    ASSERT_NO_FATAL_FAILURE(create_pool(h, test, numerics, kb, vb));
    const int64_t d = test.get<int64_t>("d"), hq = test.get<int64_t>("hq"), hkv = test.get<int64_t>("hkv");
    const int64_t n_prefill = test.get<int64_t>("n_prefill"), n_decode = test.get<int64_t>("n_decode");
    const int64_t chunk = test.get<int64_t>("chunk");
    std::vector<uint16_t> q = test.halves("q"), k = test.halves("k"), v = test.halves("v");
    ta_seq seq = 0;
    TA_CHECK(ta_seq_create(h.pool, &seq, err));
    const auto begin = [&](int64_t first, int64_t n_new, int64_t n_query) {
        const auto n = int32_t(n_new), nq = int32_t(n_query);
        const ta_tensor tk = view(k, first, n_new, hkv, d), tv = view(v, first, n_new, hkv, d);
        TA_CHECK(ta_plan_begin(h.plan, 1, &seq, &n, &nq, nullptr, err));
        if (n_new > 0) {
            TA_CHECK(ta_append(h.plan, 0, &tk, &tv, err));
        }
    };
    const auto step = [&](int64_t first, int64_t n_new) {
        ASSERT_NO_FATAL_FAILURE(begin(first, n_new, 0));
        TA_CHECK(ta_plan_end(h.plan, nullptr, err));
    };
    ASSERT_NO_FATAL_FAILURE(step(0, n_prefill));
    for (int64_t t = 0; t < n_decode; ++t) ASSERT_NO_FATAL_FAILURE(step(n_prefill + t, 1));
    if (with_pages) {
        ASSERT_NO_FATAL_FAILURE(check_pages(h, seq, test));
    }
    const int64_t queries = chunk ? chunk : 1;
    ASSERT_NO_FATAL_FAILURE(begin(n_prefill, chunk, queries));
    for (Setting& s : *settings) {
        s.result.o.assign(size_t(queries * hq * d), NAN);
        s.result.lse.assign(size_t(queries * hq), NAN);
        const ta_tensor tq = view(q, 0, queries, hq, d), to = view(s.result.o, queries, hq, d);
        const ta_attend_options options = attend_options(s.exp, s.p);
        TA_CHECK(ta_attend(h.plan, 0, &tq, &to, s.result.lse.data(), &options, err));
    }
    TA_CHECK(ta_plan_end(h.plan, nullptr, err));
    TA_CHECK(ta_seq_verify(h.pool, seq, err));
}

void check_decode(const char* name, ta_cpu_isa isa) {
    TA_LOAD_CASE(test, name);
    ta_numerics numerics = paper_numerics();
    if (test.get<std::string>("buffer") == "token") numerics.open_scale = TA_OPEN_SCALE_TOKEN;
    std::vector<Setting> settings = {{TA_EXP_EXACT, TA_P_S8_127, {}}, {TA_EXP_SAS, TA_P_S8_119, {}},
                                     {TA_EXP_EXACT, TA_P_U8, {}},     {TA_EXP_POLY, TA_P_S8_127, {}},
                                     {TA_EXP_SAS, TA_P_S8_127, {}},   {TA_EXP_POLY, TA_P_U16, {}}};
    ASSERT_NO_FATAL_FAILURE(run_pool(test, isa, numerics, true, &settings));
    const auto& refs = test.json().at("refs");
    const bool chunk = test.get<int64_t>("chunk") > 0;
    // The last tokens of the chunk do not fill a page: the reference gives them a scale of their own, we the open
    // page's.
    expect_tight(settings[0].result, test, "spec", chunk ? 1.5e-3 : 0.0);
    // The exact rescale departs from the printed one: at most 4e-4 for each earlier tile. In a chunk, `paper` has tile scales
    // of Q too.
    const double rescale = 4e-4 * double((test.array<float>("k").shape[0] + 63) / 64);
    if (!chunk) expect_tight(settings[1].result, test, "paper", rescale);
    if (refs.contains("spec_u8")) expect_tight(settings[2].result, test, "spec_u8");
    if (refs.contains("spec_sas2")) expect_tight(settings[3].result, test, "spec_sas2");
    if (refs.contains("spec_sas")) expect_tight(settings[4].result, test, "spec_sas", rescale);
    expect_envelope(settings[0].result, test, "spec");
    expect_envelope(settings[1].result, test, "paper");
    expect_envelope(settings[5].result, test, "spec");

    ta_numerics accurate = {};
    accurate.struct_size = sizeof accurate;
    std::vector<Setting> defaults = {{TA_EXP_DEFAULT, TA_P_DEFAULT, {}}};
    ASSERT_NO_FATAL_FAILURE(run_pool(test, isa, accurate, false, &defaults));
    expect_more_accurate(defaults[0].result, test);
}

TEST_P(AttentionVectors, DecodeGqa4D64B4) {
    check_decode("dec_gqa4_d64_b4", GetParam());
}
TEST_P(AttentionVectors, DecodeGqa4D64B2) {
    check_decode("dec_gqa4_d64_b2", GetParam());
}
TEST_P(AttentionVectors, DecodeTokenScalesD128) {
    check_decode("dec_tokenbuf_d128", GetParam());
}
TEST_P(AttentionVectors, DecodeMixedHeadsD128) {
    check_decode("dec_mixed_heads_d128", GetParam());
}
TEST_P(AttentionVectors, DecodePolynomialsD128) {
    check_decode("dec_sas2_d128", GetParam());
}
TEST_P(AttentionVectors, DecodeConstantRows) {
    check_decode("advd_const_v_rows", GetParam());
}
TEST_P(AttentionVectors, ChunkGqa4D128B4) {
    check_decode("chunk_gqa4_d128_b4", GetParam());
}

// --------------------------------------------------------------------------------------------- calibration

TEST_P(AttentionVectors, HeadPriorities) {
    TA_LOAD_CASE(test, "priority");
    const auto x = test.array<float>("x");  // [head, token, channel]
    const int64_t heads = x.shape[0], tokens = x.shape[1], d = x.shape[2];
    std::vector<float> values(x.size());
    for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t c = 0; c < d; ++c) values[size_t((t * heads + h) * d + c)] = x[size_t((h * tokens + t) * d + c)];
        }
    }
    Handles h;
    ASSERT_NO_FATAL_FAILURE(create_context(GetParam(), &h.context));
    ta_calibrator* created = nullptr;
    TA_CHECK(ta_calibrator_create(h.context, 1, uint32_t(heads), uint32_t(d), &created, err));
    const std::unique_ptr<ta_calibrator, decltype(&ta_calibrator_destroy)> calibrator(created, ta_calibrator_destroy);
    // In two parts.
    ta_tensor k = view(values, tokens / 2, heads, d), v = k;
    TA_CHECK(ta_calibrator_observe(calibrator.get(), 0, &k, &v, err));
    k.data = v.data = values.data() + tokens / 2 * heads * d;
    k.tokens = v.tokens = tokens - tokens / 2;
    TA_CHECK(ta_calibrator_observe(calibrator.get(), 0, &k, &v, err));
    std::vector<uint8_t> k_bits(heads), v_bits(heads);
    std::vector<float> k_priority(heads), v_priority(heads);
    TA_CHECK(ta_calibrator_finish(calibrator.get(), test.get<uint32_t>("n_low"), k_bits.data(), v_bits.data(),
                                  k_priority.data(), v_priority.data(), err));
    const auto priority = test.array<float>("priority");
    const auto bits = test.array<int>("bits");
    for (int64_t i = 0; i < heads; ++i) {
        EXPECT_NEAR(k_priority[i], priority[i], test.get<double>("rtol") * priority[i]);
        EXPECT_EQ(k_bits[i], bits[i]);
        EXPECT_EQ(v_priority[i], k_priority[i]);
        EXPECT_EQ(v_bits[i], k_bits[i]);
    }
}

}  // namespace
