// Tensors with wrong shapes, strides, types, addresses and values, in every place of the ABI that takes one.
#include <cmath>
#include <limits>

#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

class BadTensors : public WrongCalls {
  protected:
    static constexpr int64_t kTokens = 3;

    BadTensors() {
        Random random(11);
        k = Tensor(random.normals(kTokens * kRow), kTokens, kHeads, kDim);
        v = Tensor(random.normals(kTokens * kRow), kTokens, kHeads, kDim);
        q = Tensor(random.normals(kTokens * kQHeads * kDim), kTokens, kQHeads, kDim);
    }

    // One tensor argument of one call: `call` passes it, with all others right.
    struct Place {
        const char* name;
        int argument;
        const ta_tensor* good;
        std::function<ta_status(const ta_tensor*, ta_error*)> call;
    };

    // The plan must be open on 3 new tokens of one sequence, layer 0 appended.
    std::vector<Place> places() {
        const auto append_at = [this](int which, const ta_tensor* t, ta_error* err) {
            return ta_append(plan.get(), 1, which == 2 ? t : k.view(), which == 3 ? t : v.view(), err);
        };
        const auto attend_at = [this](int which, const ta_tensor* t, ta_error* err) {
            return ta_attend(plan.get(), 0, which == 2 ? t : q.view(), which == 3 ? t : out.view(), nullptr, nullptr, err);
        };
        const auto dense_at = [this](int which, const ta_tensor* t, ta_error* err) {
            return ta_attend_dense(context.get(), which == 1 ? t : q.view(), which == 2 ? t : k.view(),
                                   which == 3 ? t : v.view(), which == 4 ? t : out.view(), nullptr, nullptr, err);
        };
        const auto merge_at = [this](int which, const ta_tensor* t, ta_error* err) {
            const ta_tensor parts[] = {*q.view(), which == 2 && t ? *t : *q.view()};
            const float* const lses[] = {l.data(), l.data()};
            return ta_merge_states(context.get(), 2, parts, lses, which == 4 ? t : out.view(), nullptr, nullptr, err);
        };
        const auto bound = [](auto call, int which) {
            return [=](const ta_tensor* t, ta_error* err) { return call(which, t, err); };
        };
        return {
            {"append k", 2, k.view(), bound(append_at, 2)},  {"append v", 3, v.view(), bound(append_at, 3)},
            {"attend q", 2, q.view(), bound(attend_at, 2)},  {"attend out", 3, out.view(), bound(attend_at, 3)},
            {"dense q", 1, q.view(), bound(dense_at, 1)},    {"dense k", 2, k.view(), bound(dense_at, 2)},
            {"dense v", 3, v.view(), bound(dense_at, 3)},    {"dense out", 4, out.view(), bound(dense_at, 4)},
            {"merge part", 2, q.view(), bound(merge_at, 2)}, {"merge out", 4, out.view(), bound(merge_at, 4)},
        };
    }

    void open_plan() {
        begin(plan, {short_seq}, {kTokens});
        append(plan, 0, k, v);
    }

    Tensor k{1, 1, 1}, v{1, 1, 1}, q{1, 1, 1}, out{kTokens, kQHeads, kDim};
    const std::vector<float> l = std::vector<float>(kTokens * kQHeads, 0.5f);
};

TEST_F(BadTensors, ShapesStridesTypesAndAddressesAreRefused) {
    struct Change {
        const char* what;
        void (*change)(ta_tensor&);
        ta_status status;
    };
    const Change changes[] = {
        {"dtype 0", [](ta_tensor& t) { t.dtype = 0; }, TA_E_DTYPE},
        {"dtype 4", [](ta_tensor& t) { t.dtype = 4; }, TA_E_DTYPE},
        {"dtype -1", [](ta_tensor& t) { t.dtype = -1; }, TA_E_DTYPE},
        {"no data", [](ta_tensor& t) { t.data = nullptr; }, TA_E_INVALID},
        {"odd address", [](ta_tensor& t) { t.data = static_cast<char*>(t.data) + 1; }, TA_E_ALIGNMENT},
        {"f32 at an f16's address", [](ta_tensor& t) { t.data = static_cast<char*>(t.data) + 2; }, TA_E_ALIGNMENT},
        {"f16 at an odd address",
         [](ta_tensor& t) {
             t.dtype = TA_DTYPE_F16;
             t.data = static_cast<char*>(t.data) + 3;
         },
         TA_E_ALIGNMENT},
        {"-1 tokens", [](ta_tensor& t) { t.tokens = -1; }, TA_E_SHAPE},
        {"no heads", [](ta_tensor& t) { t.heads = 0; }, TA_E_SHAPE},
        {"-2 heads", [](ta_tensor& t) { t.heads = -2; }, TA_E_SHAPE},
        {"3 heads", [](ta_tensor& t) { t.heads = 3; }, TA_E_SHAPE},
        {"258 heads", [](ta_tensor& t) { t.heads = 258; }, TA_E_SHAPE},
        {"no channels", [](ta_tensor& t) { t.head_dim = 0; }, TA_E_SHAPE},
        {"-64 channels", [](ta_tensor& t) { t.head_dim = -64; }, TA_E_SHAPE},
        {"INT64_MAX tokens", [](ta_tensor& t) { t.tokens = INT64_MAX; }, TA_E_SHAPE},
        {"INT64_MIN tokens", [](ta_tensor& t) { t.tokens = INT64_MIN; }, TA_E_SHAPE},
        {"INT64_MAX heads", [](ta_tensor& t) { t.heads = INT64_MAX; }, TA_E_SHAPE},
        {"INT64_MAX channels", [](ta_tensor& t) { t.head_dim = INT64_MAX; }, TA_E_SHAPE},
        {"2^60 tokens", [](ta_tensor& t) { t.tokens = int64_t{1} << 60; }, TA_E_SHAPE},
        {"2^32 heads", [](ta_tensor& t) { t.heads = (int64_t{1} << 32) + t.heads; }, TA_E_SHAPE},
        {"rows upon rows, 2^52 of them",
         [](ta_tensor& t) {
             t.tokens = int64_t{1} << 26;
             t.heads = int64_t{1} << 37;
             t.stride_token = t.stride_head = t.head_dim;
         },
         TA_E_SHAPE},
        {"token stride 1", [](ta_tensor& t) { t.stride_token = 1; }, TA_E_SHAPE},
        {"token stride 63", [](ta_tensor& t) { t.stride_token = 63; }, TA_E_SHAPE},
        {"token stride -63", [](ta_tensor& t) { t.stride_token = -63; }, TA_E_SHAPE},
        {"head stride 63", [](ta_tensor& t) { t.stride_head = 63; }, TA_E_SHAPE},
        {"head stride -1", [](ta_tensor& t) { t.stride_head = -1; }, TA_E_SHAPE},
        {"token stride INT64_MAX", [](ta_tensor& t) { t.stride_token = INT64_MAX; }, TA_E_SHAPE},
        {"token stride INT64_MIN", [](ta_tensor& t) { t.stride_token = INT64_MIN; }, TA_E_SHAPE},
        {"head stride INT64_MIN", [](ta_tensor& t) { t.stride_head = INT64_MIN; }, TA_E_SHAPE},
        {"token stride 0 alone", [](ta_tensor& t) { t.stride_head = t.head_dim; }, TA_E_SHAPE},
        {"head stride 0 alone", [](ta_tensor& t) { t.stride_token = t.heads * t.head_dim; }, TA_E_SHAPE},
        {"a view of one row",
         [](ta_tensor& t) { t = ta_tensor_make_strided(t.data, t.dtype, t.tokens, t.heads, t.head_dim, 0, 0); }, TA_E_SHAPE},
        {"strides whose sum wraps",
         [](ta_tensor& t) {
             t.stride_token = INT64_MAX / 2 - 10;
             t.stride_head = INT64_MAX / 2 + 10;
         },
         TA_E_SHAPE},
    };
    open_plan();
    for (const Place& place : places()) {
        SCOPED_TRACE(place.name);
        const bool takes_any_heads = place.name == std::string_view("dense k");
        for (const Change& c : changes) {
            if (takes_any_heads && c.what == std::string_view("258 heads")) continue;  // then q is the one that does not fit
            ta_tensor t = *place.good;
            c.change(t);
            const auto call = [&](ta_error* err) { return place.call(&t, err); };
            // Which tensor of a dense call does not fit the others is a matter of taste, unless it is wrong by itself.
            const bool by_taste =
                place.argument == 2 && place.name == std::string_view("dense k") && c.what == std::string_view("3 heads");
            expect_failures({{c.what, call, c.status, by_taste ? 1 : place.argument, by_taste ? "q has" : ""}}, true);
        }
    }
    EXPECT_TRUE(out.all_poison());
    attend(plan, 0, q, out);
    append(plan, 1, k, v);
    attend(plan, 1, q, out);
    EXPECT_EQ(ta_attend_dense(context.get(), q.view(), k.view(), v.view(), out.view(), nullptr, nullptr, nullptr), TA_OK);
    end(plan);
}

TEST_F(BadTensors, ViewsOfOneRowAreCalledByTheirName) {
    open_plan();
    const auto with = [&](int64_t stride_token, int64_t stride_head) {
        return [=, this](ta_error* err) {
            const ta_tensor t =
                ta_tensor_make_strided(k.view()->data, TA_DTYPE_F32, kTokens, kHeads, kDim, stride_token, stride_head);
            return ta_append(plan.get(), 1, &t, v.view(), err);
        };
    };
    expect_failures({{"tokens", with(0, kDim), TA_E_SHAPE, 2, "k has stride 0 over 3 tokens, a broadcast view"},
                     {"heads", with(kHeads * kDim, 0), TA_E_SHAPE, 2, "k has stride 0 over 2 heads, a broadcast view"},
                     {"both", with(0, 0), TA_E_SHAPE, 2, "leave both strides 0 for a dense tensor"}},
                    true);
    // An axis with one element may have any stride.
    const std::vector<float> values(size_t(kHeads) * kDim, 0.5f);
    const ta_seq one = make_sequence(pool);
    const Plan other = make_plan(pool);
    for (const int64_t stride : {int64_t{0}, int64_t{1}, INT64_MAX, INT64_MIN, -int64_t{3}}) {
        begin(other, {one}, {1}, {0});
        const ta_tensor t = ta_tensor_make_strided(values.data(), TA_DTYPE_F32, 1, kHeads, kDim, stride, kDim);
        ta_error err;
        EXPECT_EQ(ta_append(other.get(), 0, &t, &t, &err), TA_OK) << stride << ": " << err.message;
        EXPECT_EQ(ta_plan_abort(other.get(), nullptr), TA_OK);
    }
}

TEST_F(BadTensors, TensorsThatAreMadeCarryStrides) {
    float x[6 * 64] = {};
    const ta_tensor t = ta_tensor_make(x, TA_DTYPE_F32, 3, 2, 64);
    EXPECT_EQ(t.struct_size, sizeof t);
    EXPECT_EQ(t.data, x);
    EXPECT_EQ(t.stride_token, 128);
    EXPECT_EQ(t.stride_head, 64);
    const ta_tensor huge = ta_tensor_make(x, TA_DTYPE_F32, 3, INT64_MAX, 2),
                    negative = ta_tensor_make(x, TA_DTYPE_F32, 3, -1, 2);
    EXPECT_EQ(huge.stride_token, 0);
    EXPECT_EQ(negative.stride_token, 0);
    EXPECT_EQ(ta_attend_dense(context.get(), &huge, &huge, &huge, &huge, nullptr, nullptr, nullptr), TA_E_SHAPE);
}

TEST_F(BadTensors, TokenAndChannelCountsMustBeThoseOfTheCall) {
    open_plan();
    for (const Place& place : places()) {
        SCOPED_TRACE(place.name);
        for (int64_t tokens : {0, 2, 4}) {
            if (place.argument <= 2 && place.name[0] == 'd') continue;  // the others have to follow q and k there
            ta_tensor t = *place.good;
            t.tokens = tokens;
            expect_failures(
                {{"tokens", [&](ta_error* err) { return place.call(&t, err); }, TA_E_SHAPE, place.argument, "takes [3, "}},
                true);
        }
        ta_tensor t = *place.good;
        t.head_dim = 32;
        expect_failures({{"channels", [&](ta_error* err) { return place.call(&t, err); }, TA_E_SHAPE, place.argument, "64]"}},
                        true);
    }
    // The channels of several tensors of a dense call.
    const auto dense = [&](int64_t of_q, int64_t of_k, int64_t of_v, int64_t of_out) {
        return [=, this](ta_error* err) {
            ta_tensor tensors[] = {*q.view(), *k.view(), *v.view(), *out.view()};
            const int64_t channels[] = {of_q, of_k, of_v, of_out};
            for (int i = 0; i < 4; ++i) tensors[i].head_dim = channels[i];
            return ta_attend_dense(context.get(), &tensors[0], &tensors[1], &tensors[2], &tensors[3], nullptr, nullptr, err);
        };
    };
    expect_failures({{"all 32", dense(32, 32, 32, 32), TA_E_UNSUPPORTED, 1, "q.head_dim is 32; it takes 64, 96, 128 or 256"},
                     {"all but q", dense(64, 32, 32, 32), TA_E_UNSUPPORTED, 2, "k.head_dim is 32"},
                     {"k and v", dense(64, 32, 32, 64), TA_E_SHAPE, 2, "k is [3, 2, 32]; this call takes [3, 2, 64]"},
                     {"q and out", dense(32, 64, 64, 32), TA_E_UNSUPPORTED, 1, "q.head_dim is 32"}},
                    true);
    EXPECT_TRUE(out.all_poison());
    ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
}

TEST_F(BadTensors, TheOutputMustNotOverlapInputs) {
    open_plan();
    Tensor both(kTokens + 1, kQHeads, kDim);
    std::vector<float> zeros(size_t(kTokens + 1) * kQHeads * kDim, 0.0f);
    const ta_tensor first = view_of(zeros.data(), kTokens, kQHeads, kDim);
    const ta_tensor second = view_of(zeros.data() + kQHeads * kDim, kTokens, kQHeads, kDim);
    ta_tensor backwards = view_of(zeros.data() + kTokens * kQHeads * kDim, kTokens, kQHeads, kDim);
    backwards.stride_token = -int64_t(kQHeads) * kDim;
    backwards.stride_head = kDim;
    for (const ta_tensor* o : {&first, &second, static_cast<const ta_tensor*>(&backwards)}) {
        expect_failures(
            {
                {"attend", [&](ta_error* err) { return ta_attend(plan.get(), 0, &first, o, nullptr, nullptr, err); },
                 TA_E_INVALID, 3, "overlaps q"},
                {"dense",
                 [&](ta_error* err) {
                     return ta_attend_dense(context.get(), &first, k.view(), v.view(), o, nullptr, nullptr, err);
                 },
                 TA_E_INVALID, 4, "overlaps q"},
            },
            true);
    }
    // LSE, too, and neither may lie on options.
    const auto dense = [&](const ta_tensor* o, float* lse, const ta_dense_options* with) {
        return [=, this](ta_error* err) {
            return ta_attend_dense(context.get(), q.view(), k.view(), v.view(), o, lse, with, err);
        };
    };
    auto on_out = sized<ta_attend_options>(), on_lse = sized<ta_attend_options>();
    on_out.alibi_slopes = zeros.data() + 5;
    std::vector<float> lse(size_t(kTokens) * kQHeads, 0.0f);
    on_lse.sinks = lse.data() + lse.size() - 1;
    auto dense_on_out = sized<ta_dense_options>(), dense_on_lse = sized<ta_dense_options>();
    dense_on_out.attend = &on_out, dense_on_lse.attend = &on_lse;
    const auto start = [](Tensor& t) { return static_cast<float*>(t.view()->data); };
    expect_failures(
        {
            {"lse on q", dense(&first, start(q), nullptr), TA_E_INVALID, 5, "lse overlaps q"},
            {"lse on k", dense(&first, start(k), nullptr), TA_E_INVALID, 5, "lse overlaps k"},
            {"lse on v", dense(&first, start(v) + 3, nullptr), TA_E_INVALID, 5, "lse overlaps v"},
            {"lse on out", dense(&first, zeros.data(), nullptr), TA_E_INVALID, 5, "lse overlaps out"},
            {"slopes", dense(&first, nullptr, &dense_on_out), TA_E_INVALID, 4, "out overlaps options.attend.alibi_slopes"},
            {"sinks", dense(&first, lse.data(), &dense_on_lse), TA_E_INVALID, 5, "lse overlaps options.attend.sinks"},
            {"attend's slopes",
             [&](ta_error* err) { return ta_attend(plan.get(), 0, q.view(), &first, nullptr, &on_out, err); }, TA_E_INVALID, 3,
             "out overlaps options.alibi_slopes"},
            {"attend's sinks",
             [&](ta_error* err) { return ta_attend(plan.get(), 0, q.view(), &first, lse.data(), &on_lse, err); }, TA_E_INVALID,
             4, "lse overlaps options.sinks"},
        },
        true);
    EXPECT_EQ(lse, std::vector<float>(lse.size(), 0.0f));
    const ta_tensor values = view_of(zeros.data() + 64, kTokens, kHeads, kDim);
    expect_failures(
        {
            {"dense k",
             [&](ta_error* err) {
                 return ta_attend_dense(context.get(), q.view(), &values, v.view(), &first, nullptr, nullptr, err);
             },
             TA_E_INVALID, 4, "overlaps k"},
            {"dense v",
             [&](ta_error* err) {
                 return ta_attend_dense(context.get(), q.view(), k.view(), &values, &first, nullptr, nullptr, err);
             },
             TA_E_INVALID, 4, "overlaps v"},
        },
        true);
    EXPECT_EQ(zeros, std::vector<float>(zeros.size(), 0.0f));
    // Directly behind one another is fine.
    std::vector<float> room(size_t(2 * kTokens) * kQHeads * kDim, 0.0f);
    const ta_tensor low = view_of(room.data(), kTokens, kQHeads, kDim),
                    high = view_of(room.data() + room.size() / 2, kTokens, kQHeads, kDim);
    EXPECT_EQ(ta_attend(plan.get(), 0, &low, &high, nullptr, nullptr, nullptr), TA_OK);
    EXPECT_EQ(ta_attend(plan.get(), 0, &high, &low, nullptr, nullptr, nullptr), TA_OK);
    ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
}

// An output is apart from all inputs, or it is one of them.
TEST_F(BadTensors, OutputsOfAMerge) {
    constexpr int64_t kRowOfQ = int64_t(kQHeads) * kDim, kLse = kTokens * kQHeads;
    std::vector<float> room(size_t(2 * kTokens * kRowOfQ), 1.0f), lse(size_t(2 * kLse), 0.0f);
    const ta_tensor first = view_of(room.data(), kTokens, kQHeads, kDim),
                    second = view_of(room.data() + kTokens * kRowOfQ, kTokens, kQHeads, kDim),
                    between = view_of(room.data() + kRowOfQ, kTokens, kQHeads, kDim);
    ta_tensor other_type = first, other_strides = first, itself = first;
    other_type.dtype = TA_DTYPE_BF16;
    other_strides.stride_token = kDim, other_strides.stride_head = kTokens * kDim;
    itself.stride_token = itself.stride_head = kDim;
    const ta_tensor parts[] = {first, second};
    const float* const lses[] = {lse.data(), lse.data() + kLse};
    const auto merge = [&](const ta_tensor& o, float* to) {
        return [&, to](ta_error* err) { return ta_merge_states(context.get(), 2, parts, lses, &o, to, nullptr, err); };
    };
    const std::vector<float> was = room;
    ta_tensor on_lse = first;
    on_lse.data = lse.data();
    expect_failures({
        {"out between parts", merge(between, nullptr), TA_E_INVALID, 4, "out overlaps parts[0], but is not the same view"},
        {"out of another type", merge(other_type, nullptr), TA_E_INVALID, 4, "out overlaps parts[0]"},
        {"out with other strides", merge(other_strides, nullptr), TA_E_INVALID, 4, "out overlaps parts[0]"},
        {"out on itself", merge(itself, nullptr), TA_E_INVALID, 4, "out overlaps itself"},
        {"out on lses", merge(on_lse, nullptr), TA_E_INVALID, 4, "out overlaps lses[0]"},
        {"lse on a part", merge(*out.view(), room.data() + room.size() - 1), TA_E_INVALID, 5, "lse overlaps parts[1]"},
        {"lse on out", merge(*out.view(), static_cast<float*>(out.view()->data)), TA_E_INVALID, 5, "lse overlaps out"},
        {"lse between lses", merge(*out.view(), lse.data() + 1), TA_E_INVALID, 5, "lse overlaps lses[0], but does not begin"},
    });
    EXPECT_EQ(room, was);
    EXPECT_TRUE(out.all_poison());
    ta_tensor huge = first;
    huge.head_dim = 1025;
    expect_failures(
        {{"too many channels",
          [&](ta_error* err) { return ta_merge_states(context.get(), 1, &huge, lses, &huge, nullptr, nullptr, err); },
          TA_E_UNSUPPORTED, 2, "parts[0].head_dim is 1025; it takes 1..1024"}});
    expect_success(merge(second, lse.data()));
}

// ------------------------------------------------------------------------------------------------------------- NaN and Inf

struct Where {
    int64_t token, head, channel;
};

class NonFinite : public BadTensors, public ::testing::WithParamInterface<std::tuple<ta_dtype, Layout>> {};

TEST_P(NonFinite, IsRefusedWhereverItStands) {
    const auto [dtype, layout] = GetParam();
    const std::vector<float> k_values = k.values(), v_values = v.values(), q_values = q.values();
    std::vector<float> bad = {kNan, -kNan, kInf, -kInf};
    if (dtype != TA_DTYPE_F16) bad.insert(bad.end(), {0x1.02p56f, -0x1p57f, 3e38f});
    open_plan();
    for (const float x : bad) {
        for (const Where w : {Where{0, 0, 0}, Where{1, 1, 31}, Where{kTokens - 1, kHeads - 1, kDim - 1}}) {
            SCOPED_TRACE(::testing::Message() << x << " at [" << w.token << ", " << w.head << ", " << w.channel << "]");
            Tensor bad_k(k_values, kTokens, kHeads, kDim, dtype, layout), bad_v(v_values, kTokens, kHeads, kDim, dtype, layout);
            Tensor bad_q(q_values, kTokens, kQHeads, kDim, dtype, layout);
            const Where in_q{w.token, w.head == 0 ? 0 : kQHeads - 1, w.channel};
            bad_k.set(w.token, w.head, w.channel, x);
            bad_v.set(w.token, w.head, w.channel, x);
            bad_q.set(in_q.token, in_q.head, in_q.channel, x);
            const auto text = [](const char* name, Where p) {
                return std::string(name) + "[" + std::to_string(p.token) + ", " + std::to_string(p.head) + ", " +
                       std::to_string(p.channel) + "]";
            };
            const std::string in_k = text("k", w), in_v = text("v", w), at_q = text("q", in_q);
            const auto dense = [&](Tensor& qt, Tensor& kt, Tensor& vt) {
                return [&](ta_error* err) {
                    return ta_attend_dense(context.get(), qt.view(), kt.view(), vt.view(), out.view(), nullptr, nullptr, err);
                };
            };
            expect_failures(
                {
                    {"append k", [&](ta_error* err) { return ta_append(plan.get(), 1, bad_k.view(), v.view(), err); },
                     TA_E_NONFINITE, 2, in_k.c_str()},
                    {"append v", [&](ta_error* err) { return ta_append(plan.get(), 1, k.view(), bad_v.view(), err); },
                     TA_E_NONFINITE, 3, in_v.c_str()},
                    {"attend q",
                     [&](ta_error* err) { return ta_attend(plan.get(), 0, bad_q.view(), out.view(), nullptr, nullptr, err); },
                     TA_E_NONFINITE, 2, at_q.c_str()},
                    {"dense q", dense(bad_q, k, v), TA_E_NONFINITE, 1, at_q.c_str()},
                    {"dense k", dense(q, bad_k, v), TA_E_NONFINITE, 2, in_k.c_str()},
                    {"dense v", dense(q, k, bad_v), TA_E_NONFINITE, 3, in_v.c_str()},
                },
                true);
            ta_error err;
            ASSERT_EQ(ta_append(plan.get(), 1, bad_k.view(), v.view(), &err), TA_E_NONFINITE);
            EXPECT_EQ(err.layer, 1);
            EXPECT_EQ(err.token, w.token);
            EXPECT_EQ(err.head, w.head);
        }
    }
    EXPECT_TRUE(out.all_poison());
    append(plan, 1, k, v);
    end(plan);

    // The refused calls left no trace: a pool that never saw them has the same bits.
    const KvPool twin = make_pool(context, [] {
        auto options = pool_options(kLayers, kHeads, kDim);
        options.budget_bytes = 1 << 20;
        return options;
    }());
    const ta_seq a = make_sequence(twin), b = make_sequence(twin);
    const Plan twin_plan = make_plan(twin);
    step(twin_plan, {a, b}, {130, 10});
    begin(twin_plan, {b}, {kTokens});
    append(twin_plan, 0, k, v);
    append(twin_plan, 1, k, v);
    end(twin_plan);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        EXPECT_EQ(dequantize(pool, short_seq, layer, 0, 13, kRow), dequantize(twin, b, layer, 0, 13, kRow));
    }
}

INSTANTIATE_TEST_SUITE_P(All, NonFinite, ::testing::Combine(::testing::ValuesIn(kDtypes), ::testing::ValuesIn(kLayouts)));

TEST_F(BadTensors, TheLargestMagnitudeIsAccepted) {
    k.set(0, 0, 0, 0x1p56f);
    v.set(2, 1, 63, -0x1p56f);
    q.set(1, 3, 7, 0x1p56f);
    open_plan();
    attend(plan, 0, q, out);
    for (float x : out.values()) ASSERT_TRUE(std::isfinite(x));
    ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
}

TEST_F(BadTensors, SaturateReplacesAndCounts) {
    auto numerics = sized<ta_numerics>();
    numerics.nonfinite = TA_NONFINITE_SATURATE;
    for (ta_dtype dtype : kDtypes) {
        SCOPED_TRACE(dtype);
        const KvPool saturating = make_pool(context, pool_options(kLayers, kHeads, kDim, 8, &numerics));
        const ta_seq seq = make_sequence(saturating);
        const Plan p = make_plan(saturating);
        Tensor bad_k(k.values(), kTokens, kHeads, kDim, dtype), bad_v(v.values(), kTokens, kHeads, kDim, dtype);
        Tensor bad_q(q.values(), kTokens, kQHeads, kDim, dtype);
        bad_k.set(0, 0, 0, kNan);
        bad_v.set(1, 1, 1, kInf);
        bad_v.set(2, 1, 1, -kInf);
        bad_q.set(0, 0, 0, kNan);
        begin(p, {seq}, {kTokens});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            append(p, layer, bad_k, bad_v);
            attend(p, layer, bad_q, out);
            for (float x : out.values()) ASSERT_TRUE(std::isfinite(x));
        }
        end(p);
        EXPECT_EQ(stats(saturating).saturated_values, 2u * (3 + 1));
        const Stored s = dequantize(saturating, seq, 0, 0, kTokens, kRow);
        const float largest = dtype == TA_DTYPE_F16 ? 65504.0f : 0x1p56f;
        EXPECT_NEAR(s.v[1 * kRow + kDim + 1] / largest, 1.0f, 1e-6f);
        EXPECT_NEAR(s.v[2 * kRow + kDim + 1] / largest, -1.0f, 1e-6f);
        for (float x : s.k) ASSERT_TRUE(std::isfinite(x));
    }
}

// Rows of a batch stand one after the other; the error says whose the bad one is, though others have none.
TEST_F(BadTensors, NonfiniteRowsNameTheirSequence) {
    const ta_seq seqs[] = {long_seq, make_sequence(pool), short_seq, make_sequence(pool)};
    const int32_t n_new[] = {2, 0, 3, 1};
    const Plan batch = make_plan(pool);
    const int32_t queries[] = {1, 0, 2, 1};
    ASSERT_EQ(ta_plan_begin(batch.get(), 4, seqs, n_new, queries, nullptr, nullptr), TA_OK);
    const int64_t of_new[] = {0, 0, 2, 2, 2, 3}, of_query[] = {0, 2, 2, 3};
    Random random(5);
    ta_error err;
    for (int64_t row = 0; row < 6; ++row) {
        Tensor good(random.normals(6 * kRow), 6, kHeads, kDim), bad(random.normals(6 * kRow), 6, kHeads, kDim);
        bad.set(row, 1, 7, std::numeric_limits<float>::quiet_NaN());
        EXPECT_EQ(ta_append(batch.get(), 0, good.view(), bad.view(), &err), TA_E_NONFINITE);
        EXPECT_EQ(err.sequence, of_new[row]) << row;
        EXPECT_EQ(err.token, row);
        EXPECT_EQ(err.head, 1);
        EXPECT_EQ(err.layer, 0);
    }
    Tensor good(random.normals(6 * kRow), 6, kHeads, kDim), to(4, kQHeads, kDim);
    append(batch, 0, good, good);
    for (int64_t row = 0; row < 4; ++row) {
        Tensor bad(random.normals(4 * kQHeads * kDim), 4, kQHeads, kDim);
        bad.set(row, 3, 0, std::numeric_limits<float>::infinity());
        EXPECT_EQ(ta_attend(batch.get(), 0, bad.view(), to.view(), nullptr, nullptr, &err), TA_E_NONFINITE);
        EXPECT_EQ(err.sequence, of_query[row]) << row;
        EXPECT_EQ(err.token, row);
    }
    EXPECT_TRUE(to.all_poison());
}

}  // namespace
}  // namespace ta::testing
