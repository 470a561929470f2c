// struct_size: what programs built with an older or a younger header may pass, for every struct of the ABI.
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "abi/wrong_calls.h"
#include "support/groups.h"

namespace ta::testing {
namespace {

// A copy of `bytes` bytes of a struct, in memory of exactly that size, with the tail filled with `fill`: a sanitizer sees reads
// and writes beyond it.
template <class T>
class Resized {
  public:
    Resized(const T& from, size_t bytes, uint8_t fill, uint32_t struct_size) : memory_(std::malloc(bytes), std::free) {
        std::memset(memory_.get(), fill, bytes);
        std::memcpy(memory_.get(), &from, std::min(bytes, sizeof(T)));
        std::memcpy(memory_.get(), &struct_size, sizeof struct_size);
    }
    T* get() const { return static_cast<T*>(memory_.get()); }
    uint8_t* bytes() const { return static_cast<uint8_t*>(memory_.get()); }

  private:
    std::unique_ptr<void, void (*)(void*)> memory_;
};

constexpr uint32_t kImpossible[] = {0, 1, 4, 7, (1 << 16) + 1, UINT32_MAX};

class BadStructs : public WrongCalls {
  protected:
    // `call` takes the struct and an error. `shortest`: bytes of an older header's struct that the call can do with.
    template <class T, class Call>
    void check_input(const T& good, size_t shortest, int argument, Call call) {
        const auto pass = [&](size_t bytes, uint8_t fill, uint32_t size, ta_error* err) {
            const Resized<T> given(good, bytes, fill, size);
            return call(given.get(), err);
        };
        ta_error err;
        const auto size = uint32_t(sizeof(T));
        EXPECT_EQ(pass(size, 0, size, &err), TA_OK) << err.message;
        EXPECT_EQ(pass(shortest, 0, uint32_t(shortest), &err), TA_OK) << "of an older header: " << err.message;
        for (size_t more : {1, 8, 256}) {
            EXPECT_EQ(pass(size + more, 0, uint32_t(size + more), &err), TA_OK) << "with a zero tail: " << err.message;
            const auto with_tail = [&, more](ta_error* e) { return pass(size + more, 0x01, uint32_t(size + more), e); };
            expect_failures({{"unknown field", with_tail, TA_E_STRUCT, argument, "does not know"}});
        }
        for (uint32_t impossible : kImpossible) {
            const auto with_size = [&, impossible](ta_error* e) { return pass(size, 0, impossible, e); };
            expect_failures({{"impossible size", with_size, TA_E_STRUCT, argument, "struct_size is"}});
        }
        for (uint32_t cut = shortest + 1; cut < size; ++cut) {
            if (cut % 8 == 0) continue;
            const auto with_size = [&, cut](ta_error* e) { return pass(cut, 0, cut, e); };
            expect_failures({{"cut field", with_size, TA_E_STRUCT, argument, "the size of no header's struct"}});
        }
    }

    template <class T, class Call>
    void check_output(int argument, Call call) {
        const T empty{};
        const auto size = uint32_t(sizeof(T));
        T whole{};
        whole.struct_size = size;
        ASSERT_EQ(call(&whole, nullptr), TA_OK);
        const auto* expected = reinterpret_cast<const uint8_t*>(&whole);
        for (size_t shorter : {size_t{8}, size_t{16}, sizeof(T) - 8}) {
            const Resized<T> given(empty, shorter, 0, uint32_t(shorter));
            ASSERT_EQ(call(given.get(), nullptr), TA_OK);
            EXPECT_EQ(std::memcmp(given.bytes() + 4, expected + 4, shorter - 4), 0);
        }
        const Resized<T> longer(empty, size + 64, 0x77, size + 64);
        ASSERT_EQ(call(longer.get(), nullptr), TA_OK);
        EXPECT_EQ(longer.get()->struct_size, size + 64) << "the caller's struct_size was changed";
        EXPECT_EQ(std::memcmp(longer.bytes() + 4, expected + 4, size - 4), 0);
        for (size_t i = size; i < size + 64; ++i) ASSERT_EQ(longer.bytes()[i], 0) << "fields unknown here must read as zero";
        for (uint32_t impossible : kImpossible) {
            const Resized<T> given(empty, size, 0, impossible);
            const std::vector<uint8_t> was(given.bytes(), given.bytes() + size);
            const auto with_size = [&](ta_error* e) { return call(given.get(), e); };
            expect_failures({{"impossible size", with_size, TA_E_STRUCT, argument, "struct_size is"}});
            EXPECT_EQ(was, std::vector<uint8_t>(given.bytes(), given.bytes() + size));
        }
        for (const uint32_t cut : {9u, 12u, 17u, size - 4, size - 1}) check_cut_output<T>(cut, argument, call);
    }
    template <class T, class Call>
    void check_cut_output(uint32_t cut, int argument, Call call) {
        const Resized<T> given(T{}, cut, 0x77, cut);
        const auto with_size = [&](ta_error* e) { return call(given.get(), e); };
        expect_failures({{"cut field", with_size, TA_E_STRUCT, argument, "the size of no header's struct"}});
    }
};

TEST_F(BadStructs, ContextOptions) {
    auto good = sized<ta_context_options>();
    good.threads = 1;
    check_input(good, offsetof(ta_context_options, allocator), 0, [](const ta_context_options* o, ta_error* err) {
        ta_context* out = nullptr;
        const ta_status status = ta_context_create(o, &out, err);
        ta_context_destroy(out);
        return status;
    });
}

TEST_F(BadStructs, Allocator) {
    auto good = sized<ta_allocator>();
    good.allocate = [](size_t bytes, size_t alignment, void*) {
        return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    good.deallocate = [](void* p, size_t, size_t, void*) { std::free(p); };
    check_input(good, offsetof(ta_allocator, user), 0, [](const ta_allocator* a, ta_error* err) {
        auto options = sized<ta_context_options>();
        options.threads = 1;
        options.allocator = a;
        ta_context* out = nullptr;
        const ta_status status = ta_context_create(&options, &out, err);
        ta_context_destroy(out);
        return status;
    });
}

TEST_F(BadStructs, LogSink) {
    check_input(sized<ta_log_sink>(), 8, 0, [](const ta_log_sink* sink, ta_error* err) {
        auto options = sized<ta_context_options>();
        options.threads = 1;
        options.log = sink;
        ta_context* out = nullptr;
        const ta_status status = ta_context_create(&options, &out, err);
        ta_context_destroy(out);
        return status;
    });
}

TEST_F(BadStructs, Progress) {
    check_input(sized<ta_progress>(), 8, 3, [&](const ta_progress* progress, ta_error* err) {
        const std::filesystem::path path =
            std::filesystem::temp_directory_path() / ("ta-bad-structs-" + std::to_string(getpid()));
        const ta_status status = ta_seq_save(pool.get(), long_seq, path.c_str(), progress, err);
        std::filesystem::remove(path);
        return status;
    });
}

TEST_F(BadStructs, PoolOptions) {
    check_input(pool_options(1, 1, 64), offsetof(ta_kv_pool_options, max_sequences), 1,
                [&](const ta_kv_pool_options* o, ta_error* err) {
                    ta_kv_pool* out = nullptr;
                    const ta_status status = ta_kv_pool_create(context.get(), o, &out, err);
                    ta_kv_pool_destroy(out);
                    return status;
                });
}

TEST_F(BadStructs, LayerGroup) {
    auto good = sized<ta_layer_group>();
    good.layers = 1;
    good.window = 100;
    check_input(good, offsetof(ta_layer_group, window), 1, [&](const ta_layer_group* g, ta_error* err) {
        auto options = pool_options(1, 1, 64);
        options.layer_groups = g;
        options.n_layer_groups = 1;
        ta_kv_pool* out = nullptr;
        const ta_status status = ta_kv_pool_create(context.get(), &options, &out, err);
        ta_kv_pool_destroy(out);
        return status;
    });
}

TEST_F(BadStructs, Rotary) {
    auto good = sized<ta_rotary>();
    const double angle = 1.0;
    good.channels = 2;
    good.layers = 1;
    good.angles = &angle;
    check_input(good, sizeof good, 1, [&](const ta_rotary* r, ta_error* err) {
        auto options = pool_options(1, 1, 64);
        options.rotary = r;
        ta_kv_pool* out = nullptr;
        const ta_status status = ta_kv_pool_create(context.get(), &options, &out, err);
        ta_kv_pool_destroy(out);
        return status;
    });
}

TEST_F(BadStructs, Retention) {
    auto good = sized<ta_retention>();
    good.priority = 5;
    check_input(good, offsetof(ta_retention, duration_ms), 4,
                [&](const ta_retention* r, ta_error* err) { return ta_seq_retain(pool.get(), long_seq, 0, 1, r, err); });
}

TEST_F(BadStructs, Numerics) {
    check_input(sized<ta_numerics>(), 8, 1, [&](const ta_numerics* n, ta_error* err) {
        const auto options = pool_options(1, 1, 64, 4, n);
        ta_kv_pool* out = nullptr;
        const ta_status status = ta_kv_pool_create(context.get(), &options, &out, err);
        ta_kv_pool_destroy(out);
        return status;
    });
}

TEST_F(BadStructs, Tensors) {
    Random random(3);
    Tensor k(random.normals(kRow), 1, kHeads, kDim), q(random.normals(kQHeads * kDim), 1, kQHeads, kDim), out(1, kQHeads, kDim);
    const size_t without_strides = offsetof(ta_tensor, stride_token);
    const auto append_with = [&](const ta_tensor* kt, const ta_tensor* vt, ta_error* err) {
        begin(plan, {short_seq}, {1});
        const ta_status status = ta_append(plan.get(), 0, kt, vt, err);
        ta_plan_abort(plan.get(), nullptr);
        return status;
    };
    const auto attend_with = [&](const ta_tensor* qt, const ta_tensor* ot, ta_error* err) {
        begin(plan, {short_seq}, {0}, {1});
        const ta_status status = ta_attend(plan.get(), 0, qt, ot, nullptr, nullptr, err);
        ta_plan_abort(plan.get(), nullptr);
        return status;
    };
    const ta_tensor good_k = *k.view(), good_q = *q.view(), good_out = *out.view();
    check_input(good_k, without_strides, 2, [&](const ta_tensor* t, ta_error* err) { return append_with(t, k.view(), err); });
    check_input(good_k, without_strides, 3, [&](const ta_tensor* t, ta_error* err) { return append_with(k.view(), t, err); });
    check_input(good_q, without_strides, 2, [&](const ta_tensor* t, ta_error* err) { return attend_with(t, out.view(), err); });
    check_input(good_out, without_strides, 3, [&](const ta_tensor* t, ta_error* err) { return attend_with(q.view(), t, err); });
    for (int i = 0; i < 4; ++i) {
        check_input(i == 0   ? good_q
                    : i == 3 ? good_out
                             : good_k,
                    without_strides, i + 1, [&](const ta_tensor* t, ta_error* err) {
                        return ta_attend_dense(context.get(), i == 0 ? t : q.view(), i == 1 ? t : k.view(),
                                               i == 2 ? t : k.view(), i == 3 ? t : out.view(), nullptr, nullptr, err);
                    });
    }
}

// Of an array the elements lie as far apart as the first says.
TEST_F(BadStructs, TensorsOfAMerge) {
    Random random(3);
    Tensor a(random.normals(kRow), 1, kHeads, kDim), b(random.normals(kRow), 1, kHeads, kDim), out(1, kHeads, kDim),
        expected(1, kHeads, kDim);
    const std::vector<float> lse(kHeads, 1.0f);
    const float* const lses[] = {lse.data(), lse.data()};
    const auto merge = [&](const ta_tensor* parts, uint32_t n, const ta_tensor* o, ta_error* err) {
        return ta_merge_states(context.get(), n, parts, lses, o, nullptr, nullptr, err);
    };
    const size_t without_strides = offsetof(ta_tensor, stride_token);
    check_input(*a.view(), without_strides, 2, [&](const ta_tensor* t, ta_error* err) { return merge(t, 1, out.view(), err); });
    check_input(*out.view(), without_strides, 4, [&](const ta_tensor* t, ta_error* err) { return merge(a.view(), 1, t, err); });
    const ta_tensor both[] = {*a.view(), *b.view()};
    ASSERT_EQ(merge(both, 2, expected.view(), nullptr), TA_OK);
    for (const size_t size : {without_strides, sizeof(ta_tensor), sizeof(ta_tensor) + 64}) {
        std::vector<uint64_t> array(2 * size / sizeof(uint64_t));
        auto* bytes = reinterpret_cast<uint8_t*>(array.data());
        for (size_t i = 0; i < 2; ++i) {
            ta_tensor t = both[i];
            t.struct_size = uint32_t(size);
            std::memcpy(bytes + i * size, &t, std::min(size, sizeof t));
        }
        const auto* parts = reinterpret_cast<const ta_tensor*>(bytes);
        ASSERT_EQ(merge(parts, 2, out.view(), nullptr), TA_OK) << size;
        EXPECT_EQ(out.values(), expected.values()) << size;
        reinterpret_cast<ta_tensor*>(bytes + size)->struct_size -= 8;
        expect_failures(
            {{"two sizes", [&](ta_error* e) { return merge(parts, 2, out.view(), e); }, TA_E_STRUCT, 2, "have one size"}});
    }
}

TEST_F(BadStructs, AttendOptions) {
    Random random(3);
    Tensor q(random.normals(kQHeads * kDim), 1, kQHeads, kDim), out(1, kQHeads, kDim);
    check_input(sized<ta_attend_options>(), 8, 5, [&](const ta_attend_options* o, ta_error* err) {
        begin(plan, {short_seq}, {0}, {1});
        const ta_status status = ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, o, err);
        ta_plan_abort(plan.get(), nullptr);
        return status;
    });
}

TEST_F(BadStructs, StepOptions) {
    check_input(sized<ta_step_options>(), 8, 5, [&](const ta_step_options* o, ta_error* err) {
        const ta_status status = ta_plan_begin(plan.get(), 1, &short_seq, nullptr, nullptr, o, err);
        ta_plan_abort(plan.get(), nullptr);
        return status;
    });
}

TEST_F(BadStructs, DenseOptions) {
    Random random(3);
    Tensor k(random.normals(kRow), 1, kHeads, kDim), q(random.normals(kQHeads * kDim), 1, kQHeads, kDim), out(1, kQHeads, kDim);
    check_input(sized<ta_dense_options>(), 8, 6, [&](const ta_dense_options* o, ta_error* err) {
        return ta_attend_dense(context.get(), q.view(), k.view(), k.view(), out.view(), nullptr, o, err);
    });
    check_input(sized<ta_attend_options>(), 8, 6, [&](const ta_attend_options* o, ta_error* err) {
        auto options = sized<ta_dense_options>();
        options.attend = o;
        return ta_attend_dense(context.get(), q.view(), k.view(), k.view(), out.view(), nullptr, &options, err);
    });
}

TEST_F(BadStructs, Groups) {
    ta_group_id id = make_group_id();
    const auto create = [&](const ta_group_options* o, ta_error* err) {
        ta_group* group = nullptr;
        const ta_status status = ta_group_create(context.get(), o, &group, err);
        ta_group_destroy(group);
        id = make_group_id();  // that of a group that was destroyed is stale
        return status;
    };
    check_input(group_options(id, 0, 1), offsetof(ta_group_options, connect_ms), 1, create);
    check_input(sized<ta_x_group_fault>(), 8, 1, [&](const ta_x_group_fault* f, ta_error* err) {
        auto options = group_options(id, 0, 1);
        options.fault = f;
        return create(&options, err);
    });
    const ta_group_id pair = make_group_id();
    const GroupHandle first = make_group(context, group_options(pair, 0, 2)),
                      second = make_group(context, group_options(pair, 1, 2));
    ASSERT_EQ(poll(first), TA_GROUP_READY);
    check_input(sized<ta_partition_options>(), 8, 3, [&](const ta_partition_options* o, ta_error* err) {
        const ta_seq spread = make_sequence(pool);
        const ta_status status = ta_seq_partition(first.get(), pool.get(), spread, o, err);
        EXPECT_EQ(ta_seq_release(pool.get(), spread, nullptr), TA_OK);
        return status;
    });
    check_output<ta_group_info>(1, [&](ta_group_info* i, ta_error* err) { return ta_group_get_info(first.get(), i, err); });
    check_output<ta_group_peer>(2, [&](ta_group_peer* p, ta_error* err) { return ta_group_get_peer(first.get(), 1, p, err); });
    ta_ticket ticket = 0;
    ASSERT_EQ(ta_seq_send(first.get(), pool.get(), long_seq, 1, 1, TA_SEND_COPY, &ticket, nullptr), TA_OK);
    check_output<ta_transfer_info>(
        2, [&](ta_transfer_info* i, ta_error* err) { return ta_transfer_query(first.get(), ticket, i, err); });
    check_output<ta_transfer_info>(
        3, [&](ta_transfer_info* i, ta_error* err) { return ta_transfer_wait(first.get(), ticket, 1, i, err); });
    const GroupHandle alone = make_group(context, group_options(id, 0, 1));
    ASSERT_EQ(poll(alone), TA_GROUP_READY);
    Random random(1);
    Tensor q(random.normals(kDim), 1, 1, kDim), out(1, 1, kDim);
    const auto scatter = [&](const ta_x_scatter_options* o, ta_x_scatter_info* i, ta_error* err) {
        return ta_x_group_attend_dense(alone.get(), q.view(), q.view(), q.view(), out.view(), nullptr, nullptr, 0, o, i, err);
    };
    check_input(sized<ta_x_scatter_options>(), 8, 8,
                [&](const ta_x_scatter_options* o, ta_error* err) { return scatter(o, nullptr, err); });
    check_output<ta_x_scatter_info>(9, [&](ta_x_scatter_info* i, ta_error* err) {
        const ta_status status = scatter(nullptr, i, err);
        const size_t times = offsetof(ta_x_scatter_info, pack_ns);  // which differ from call to call
        const size_t end = std::min<size_t>(i->struct_size, sizeof *i);
        if (status == TA_OK && end > times) std::memset(reinterpret_cast<char*>(i) + times, 0, end - times);
        return status;
    });
}

TEST_F(BadStructs, NamespaceOptions) {
    auto good = sized<ta_namespace_options>();
    good.salt[31] = 1;
    const auto create = [&](const ta_namespace_options* o, ta_error* err) {
        ta_namespace space = 0;
        const ta_status status = ta_namespace_create(pool.get(), o, &space, err);
        if (status == TA_OK) {
            EXPECT_EQ(ta_namespace_destroy(pool.get(), space, nullptr), TA_OK);
        }
        return status;
    };
    check_input(good, sizeof good, 1, create);
    good.salt[0] = 1;
    for (const uint32_t cut : {24u, 32u, 40u}) {  // a salt of fewer bytes would be easier to guess
        const Resized<ta_namespace_options> given(good, cut, 0, cut);
        const auto with_size = [&](ta_error* e) { return create(given.get(), e); };
        expect_failures({{"cut salt", with_size, TA_E_STRUCT, 1, "the size of no header's struct"}});
    }
}

TEST_F(BadStructs, Stores) {
    auto salted = sized<ta_namespace_options>();
    salted.salt[0] = 3;
    ta_namespace space = 0;
    ASSERT_EQ(ta_namespace_create(pool.get(), &salted, &space, nullptr), TA_OK);
    const ta_store_fn none = [](void*, ta_store_item*, uint64_t, int64_t) { return 0; };
    auto good = sized<ta_block_store>();
    good.exists = good.get = good.put = good.remove = none;
    const auto attach = [&](const ta_block_store* s, const ta_store_options* o, ta_error* err) {
        const ta_status status = ta_namespace_attach_store(pool.get(), space, s, o, err);
        if (status == TA_OK) {
            EXPECT_EQ(ta_namespace_detach_store(pool.get(), space, nullptr), TA_OK);
        }
        return status;
    };
    check_input(good, offsetof(ta_block_store, user), 2,
                [&](const ta_block_store* s, ta_error* e) { return attach(s, nullptr, e); });
    check_input(sized<ta_store_options>(), 8, 3, [&](const ta_store_options* o, ta_error* e) { return attach(&good, o, e); });
    auto off = sized<ta_store_options>();
    off.write_through = TA_OFF;
    ASSERT_EQ(ta_namespace_attach_store(pool.get(), space, &good, &off, nullptr), TA_OK);
    const auto get = [&](ta_store_stats* s, ta_error* e) { return ta_namespace_get_store_stats(pool.get(), space, s, e); };
    auto whole = sized<ta_store_stats>();
    ASSERT_EQ(get(&whole, nullptr), TA_OK);
    for (const size_t shorter : {size_t{8}, size_t{16}, offsetof(ta_store_stats, failure)}) {
        const Resized<ta_store_stats> given(ta_store_stats{}, shorter, 0, uint32_t(shorter));
        ASSERT_EQ(get(given.get(), nullptr), TA_OK);
        EXPECT_EQ(std::memcmp(given.bytes() + 4, reinterpret_cast<const uint8_t*>(&whole) + 4, shorter - 4), 0);
    }
    // A text that is cut would not end.
    for (const size_t cut : {size_t{9}, size_t{12}, offsetof(ta_store_stats, failure) + 64, sizeof(ta_store_stats) - 8})
        check_cut_output<ta_store_stats>(uint32_t(cut), 2, get);
    ASSERT_EQ(ta_namespace_destroy(pool.get(), space, nullptr), TA_OK);
}

TEST_F(BadStructs, StructsThatTheLibraryFillsIn) {
    check_output<ta_context_info>(
        1, [&](ta_context_info* i, ta_error* err) { return ta_context_get_info(context.get(), i, err); });
    check_output<ta_kv_pool_stats>(
        1, [&](ta_kv_pool_stats* s, ta_error* err) { return ta_kv_pool_get_stats(pool.get(), s, err); });
    check_output<ta_kv_pool_description>(
        1, [&](ta_kv_pool_description* d, ta_error* err) { return ta_kv_pool_describe(pool.get(), d, err); });
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 1 << 20;
    auto options = pool_options(1, 1, 64);
    options.tiers = &tiers;
    const KvPool tiered = make_pool(context, options);
    check_output<ta_memory_range>(
        2, [&](ta_memory_range* m, ta_error* err) { return ta_kv_pool_get_memory(tiered.get(), TA_TIER_HOST, m, err); });
    check_output<ta_move_stats>(1,
                                [&](ta_move_stats* s, ta_error* err) { return ta_kv_pool_get_move_stats(pool.get(), s, err); });
    const int32_t many = 1 << 20;
    check_output<ta_fit>(4, [&](ta_fit* f, ta_error* err) { return ta_kv_pool_fit(pool.get(), 1, &long_seq, &many, f, err); });
    check_output<ta_x_block_info>(
        3, [&](ta_x_block_info* i, ta_error* err) { return ta_x_seq_block(pool.get(), long_seq, 1, i, nullptr, 0, err); });
    // A text that is cut would not end.
    const auto get_info = [&](ta_context_info* i, ta_error* err) { return ta_context_get_info(context.get(), i, err); };
    const auto get_tier = [&](ta_tier_stats* s, ta_error* err) {
        return ta_kv_pool_get_tier_stats(pool.get(), TA_TIER_DEVICE, s, err);
    };
    check_output<ta_tier_stats>(2, get_tier);
    check_cut_output<ta_context_info>(offsetof(ta_context_info, degraded) - 8, 1, get_info);
    check_cut_output<ta_context_info>(offsetof(ta_context_info, degraded) + 8, 1, get_info);
    check_cut_output<ta_tier_stats>(offsetof(ta_tier_stats, reason) + 64, 2, get_tier);
}

}  // namespace
}  // namespace ta::testing
