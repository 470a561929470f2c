#include "tests/kernels/cuda/prefill_cases.h"

namespace ta::cuda::testing {

std::vector<Case> all_cases(bool quick) {
    std::vector<Case> cases;
    const auto add = [&](std::string name, auto change) {
        Case c;
        c.name = std::move(name);
        change(c);
        for (const char letter : c.name)
            c.seed = (c.seed ^ uint8_t(letter)) * 0x100000001b3;  // FNV-1a: other cases do not count
        cases.push_back(c);
    };
    for (int n : quick ? std::vector<int>{1, 65, 300} : std::vector<int>{1, 63, 64, 65, 127, 128, 129, 1000, 4097}) {
        for (const bool causal : {false, true}) {
            add("n" + std::to_string(n) + (causal ? " causal" : " full"), [&](Case& c) {
                c.sequences = {{n, n}};
                c.causal = causal;
            });
        }
    }
    for (int group : {1, 5, 8}) {
        add("group " + std::to_string(group), [&](Case& c) {
            c.sequences = {{333, 200}};
            c.group = group;
        });
    }
    for (int n : {47, 48, 49, 96, 97}) {  // 192 rows are 48 tokens of a group of 4
        add("tiles, " + std::to_string(n) + " queries", [&](Case& c) { c.sequences = {{n + 200, n}, {n, n}}; });
    }
    for (int n : {63, 64, 65, 128, 129}) {  // 256 rows are 64
        add("tiles, " + std::to_string(n) + " queries", [&](Case& c) { c.sequences = {{n + 200, n}, {n, n}}; });
    }
    add("tiles, 255 ... 257 rows", [](Case& c) { c.sequences = {{300, 255}, {300, 256}, {300, 257}}, c.group = 1; });
    add("tiles, 191 ... 193 rows", [](Case& c) { c.sequences = {{300, 191}, {300, 192}, {300, 193}}, c.group = 1; });
    add("V outlier in a sink's shadow", [](Case& c) {
        c.sequences = {{1500, 300}}, c.data = DataKind::kOutliers, c.causal = false;
    });
    add("ragged", [](Case& c) { c.sequences = {{700, 700}, {1, 1}, {65, 3}, {512, 130}, {64, 64}, {40, 0}, {900, 33}}; });
    // Resident tiles: all sequences are short. Heads, groups and lengths for which warpgroups get different numbers of rows.
    for (const int d : {128, 64}) {
        const auto add_short = [&](const char* what, auto change) {
            add("short, d" + std::to_string(d) + ", " + what, [&](Case& c) {
                c.sequences = {{512, 512}, {1, 1}, {65, 3}, {511, 130}, {64, 64}, {40, 0}, {129, 129}, {449, 33}};
                c.d = d;
                change(c);
            });
        };
        for (const int group : {1, 3, 5, 8, 16, 64, 128})
            add_short(("group " + std::to_string(group)).c_str(), [&](Case& c) { c.group = group; });
        add_short("full, a prompt", [](Case& c) { c.causal = false, c.pages = Pages::kPrompt; });
        add_short("token scales, bf16", [](Case& c) { c.pages = Pages::kTokenOwnScale, c.q_type = DType::kBf16; });
        add_short("softcap, alibi, sinks", [](Case& c) { c.softcap = 5.0f, c.alibi = c.sinks = true; });
        add_short("sas, outliers", [](Case& c) { c.exp = ExpMode::kSas, c.data = DataKind::kOutliers; });
        add_short("more queries than keys", [](Case& c) { c.sequences = {{100, 300}, {0, 70}, {512, 600}, {0, 5}}; });
        add_short("many queries", [](Case& c) { c.sequences = {{77, 4200}, {300, 5000}}, c.group = 1, c.causal = false; });
        add_short("strided, f16", [](Case& c) { c.row_gap = 24, c.head_gap = 8, c.q_type = c.out_type = DType::kF16; });
    }
    add("short, d64, 16 pages", [](Case& c) { c.sequences = {{1024, 1024}, {1000, 300}, {700, 1}, {900, 900}}, c.d = 64; });
    for (const ExpMode exp : {ExpMode::kPoly, ExpMode::kSas}) {
        add(exp == ExpMode::kSas ? "sas, a prompt" : "a prompt", [&](Case& c) {
            c.sequences = {{1500, 700}, {300, 300}, {1100, 50}, {9000, 60}};
            c.pages = Pages::kPrompt, c.exp = exp;
        });
    }
    add("token scales", [](Case& c) { c.sequences = {{600, 300}, {77, 77}}, c.pages = Pages::kTokenOwnScale; });
    for (const auto& [kb, vb] : {std::pair{4, 4}, {2, 2}, {4, 2}, {kCodes, kCodes}, {8, 4}, {4, 8}, {8, 8}, {kAny, kAny}}) {
        const std::string bits = "k" + std::to_string(kb) + "v" + std::to_string(vb);
        add("prefix " + bits, [&](Case& c) {
            c.sequences = {{1100, 300}, {2048, 100}};
            c.pages = Pages::kPrefix, c.k_bits = kb, c.v_bits = vb, c.kv_heads = kb > 0 ? 2 : kb == kCodes ? 4 : 6;
        });
        add("channel pages, sink, " + bits, [&](Case& c) {
            c.sequences = {{1000, 200}};
            c.pages = Pages::kChannel, c.k_bits = kb, c.v_bits = vb, c.data = DataKind::kSink,
            c.kv_heads = kb > 0         ? 2
                         : kb == kCodes ? 4
                                        : 6;
        });
    }
    add("random pages", [](Case& c) { c.sequences = {{1500, 400}, {130, 130}}, c.pages = Pages::kRandom; });
    for (const DataKind data : {DataKind::kFlat, DataKind::kSink, DataKind::kPeaky, DataKind::kZeros,
                                DataKind::kConstantChannels, DataKind::kOutliers, DataKind::kDenormal, DataKind::kHuge}) {
        add(std::string("data ") + ta::testing::name_of(data), [&](Case& c) {
            c.sequences = {{800, 300}};
            c.data = data;
        });
    }
    for (const float factor : {0.25f, 1.0f, 4.0f}) {
        add("one magnitude, queries times " + std::to_string(factor), [&](Case& c) {
            c.sequences = {{800, 300}, {100, 100}}, c.data = DataKind::kOneMagnitude, c.rotate = false, c.q_factor = factor;
        });
    }
    for (const int d : {128, 64}) {
        const auto add_apart = [&](const char* what, auto change) {
            for (const DataKind data : {DataKind::kPagesApart, DataKind::kZerosAround}) {
                add(std::string(ta::testing::name_of(data)) + ", d" + std::to_string(d) + ", " + what, [&](Case& c) {
                    c.sequences = {{800, 300}, {1000, 40}, {100, 100}}, c.data = data, c.d = d;
                    change(c);
                });
            }
        };
        add_apart("8 bits", [](Case&) {});
        add_apart("random", [](Case& c) { c.pages = Pages::kRandom; });
        add_apart("4 bits", [](Case& c) { c.pages = Pages::kPrefix; });
        add_apart("window, sas", [](Case& c) { c.window = 200, c.exp = ExpMode::kSas; });
        add_apart("sas, ranges", [](Case& c) { c.sequences = {{4500, 100}, {130, 130}}, c.exp = ExpMode::kSas; });
        add_apart("sas, random", [](Case& c) { c.pages = Pages::kRandom, c.exp = ExpMode::kSas; });
        add_apart("softcap, full", [](Case& c) { c.softcap = 5.0f, c.causal = false; });
    }
    for (const int d : {128, 64}) {
        const auto add_loud = [&](const char* what, auto change) {
            add(std::string("loud, d") + std::to_string(d) + ", " + what, [&](Case& c) {
                c.sequences = {{800, 300}, {100, 100}}, c.data = DataKind::kLoud, c.pages = Pages::kTokenOwnScale, c.d = d;
                change(c);
            });
        };
        add_loud("8 bits", [](Case&) {});
        // The loud ones, which are dropped, must not take P's levels, nor what stands for V of 0 beside them.
        add_loud("sas", [](Case& c) { c.exp = ExpMode::kSas; });
        add_loud("sas, full", [](Case& c) { c.exp = ExpMode::kSas, c.causal = false; });
    }
    add("logits of hundreds", [](Case& c) { c.sequences = {{800, 300}}, c.q_factor = 100.0f; });
    add("logits of thousands", [](Case& c) { c.sequences = {{800, 300}}, c.q_factor = 2000.0f, c.lse_tolerance = 1.0; });
    for (const int bits : {4, 2}) {  // a unit of products of codes is a tenth of a nat
        add("logits of thousands, " + std::to_string(bits) + " bits", [&](Case& c) {
            c.sequences = {{800, 300}}, c.pages = Pages::kPrefix, c.k_bits = c.v_bits = bits;
            c.q_factor = 2000.0f, c.rotate = false, c.lse_tolerance = 0.015;
        });
    }
    add("window", [](Case& c) { c.sequences = {{1500, 700}}, c.window = 200; });
    add("window, full", [](Case& c) { c.sequences = {{1500, 1500}}, c.window = 150, c.causal = false; });
    add("softcap, k offset", [](Case& c) { c.sequences = {{500, 300}}, c.softcap = 5.0f, c.k_offset = true; });
    add("k offset, sinks", [](Case& c) { c.sequences = {{500, 300}}, c.sinks = true, c.k_offset = true; });
    add("alibi", [](Case& c) { c.sequences = {{500, 300}}, c.alibi = true; });
    add("more queries than keys", [](Case& c) { c.sequences = {{100, 300}}; });
    add("no keys", [](Case& c) { c.sequences = {{0, 70}, {100, 100}, {0, 5}, {0, 200}}; });
    add("more queries than keys, sinks", [](Case& c) { c.sequences = {{100, 300}}, c.sinks = true; });
    add("f16, strided, unrotated", [](Case& c) {
        c.sequences = {{500, 300}}, c.rotate = false, c.q_type = DType::kF16, c.out_type = DType::kBf16;
        c.head_gap = 3, c.row_gap = 5;
    });
    add("bf16", [](Case& c) { c.sequences = {{500, 300}}, c.q_type = DType::kBf16, c.out_type = DType::kF16; });
    add("exact", [](Case& c) { c.sequences = {{500, 300}}, c.exp = ExpMode::kExact; });
    add("sas", [](Case& c) { c.sequences = {{500, 300}}, c.exp = ExpMode::kSas; });
    add("sas, token scales", [](Case& c) {
        c.sequences = {{500, 300}}, c.exp = ExpMode::kSas, c.pages = Pages::kTokenOwnScale;
    });
    add("sas, ranges", [](Case& c) { c.sequences = {{8400, 100}}, c.exp = ExpMode::kSas; });
    add("sas, ranges, scales of tokens", [](Case& c) {
        c.sequences = {{4500, 100}}, c.exp = ExpMode::kSas, c.pages = Pages::kTokenOwnScale;
    });
    add("sas, few keys", [](Case& c) {
        c.sequences = {{1, 30}, {63, 63}, {64, 64}, {65, 65}, {0, 40}, {127, 40}, {129, 129}}, c.exp = ExpMode::kSas;
    });
    add("sas, full, d64", [](Case& c) {
        c.sequences = {{4200, 100}, {70, 30}}, c.exp = ExpMode::kSas, c.causal = false, c.d = 64;
    });
    for (const DataKind data : {DataKind::kNormal, DataKind::kSink, DataKind::kPeaky}) {
        add("sas, ranges, low pages, " + std::string(ta::testing::name_of(data)), [&](Case& c) {
            c.sequences = {{9000, 60}, {4096, 64}, {4097, 64}}, c.pages = Pages::kRandom, c.low = 30;
            c.exp = ExpMode::kSas, c.data = data;
        });
    }
    add("sas, sink", [](Case& c) { c.sequences = {{900, 300}}, c.exp = ExpMode::kSas, c.data = DataKind::kSink; });
    for (const int levels : {127, 119}) {
        add("P of " + std::to_string(levels) + " levels", [&](Case& c) {
            c.sequences = {{900, 300}}, c.p_levels = levels, c.pages = Pages::kRandom;
        });
        add("sas, " + std::to_string(levels) + " levels", [&](Case& c) {
            c.sequences = {{900, 300}}, c.p_levels = levels, c.exp = ExpMode::kSas;
        });
    }
    for (const DataKind data : {DataKind::kSink, DataKind::kPeaky, DataKind::kOutliers, DataKind::kZeros, DataKind::kHuge}) {
        add("token scales, " + std::string(ta::testing::name_of(data)), [&](Case& c) {
            c.sequences = {{800, 300}}, c.data = data, c.pages = Pages::kTokenOwnScale;
        });
        add("random pages, " + std::string(ta::testing::name_of(data)), [&](Case& c) {
            c.sequences = {{800, 300}}, c.data = data, c.pages = Pages::kRandom;
        });
    }
    add("token scales, window", [](Case& c) { c.sequences = {{900, 700}}, c.window = 150, c.pages = Pages::kTokenOwnScale; });
    add("token scales, logits of hundreds", [](Case& c) {
        c.sequences = {{800, 300}}, c.q_factor = 100.0f, c.pages = Pages::kTokenOwnScale;
    });
    for (const int d : {96, 256}) {
        const auto add_d = [&](const char* what, auto change) {
            add("d" + std::to_string(d) + ", " + what, [&](Case& c) {
                c.sequences = {{700, 500}, {129, 129}, {1, 1}, {300, 33}, {63, 63}}, c.d = d;
                change(c);
            });
        };
        add_d("causal", [](Case&) {});
        add_d("full, f16", [](Case& c) { c.causal = false, c.q_type = c.out_type = DType::kF16; });
        add_d("group 1, token scales",
              [](Case& c) { c.group = 1, c.pages = Pages::kTokenOwnScale, c.out_type = DType::kBf16; });
        add_d("a prompt, group 5", [](Case& c) { c.group = 5, c.pages = Pages::kPrompt; });
        add_d("sas", [](Case& c) { c.exp = ExpMode::kSas; });
        add_d("softcap, window", [](Case& c) { c.softcap = 5.0f, c.window = 150; });
        add_d("split", [](Case& c) { c.sequences = {{9000, 70}, {65, 65}}; });
        add_d("random pages", [](Case& c) { c.pages = Pages::kRandom, c.low = 20; });
        add_d("4 and 2 bits", [](Case& c) { c.pages = Pages::kPrefix, c.k_bits = c.v_bits = kCodes, c.kv_heads = 4; });
        add_d("any bits", [](Case& c) { c.pages = Pages::kRandom, c.k_bits = c.v_bits = kAny, c.kv_heads = 6; });
        add_d("sink, 4 bits", [](Case& c) { c.pages = Pages::kChannel, c.data = DataKind::kSink; });
    }
    add("d64", [](Case& c) { c.sequences = {{700, 500}}, c.d = 64; });
    add("d64 prefix", [](Case& c) {
        c.sequences = {{1100, 300}}, c.d = 64, c.pages = Pages::kPrefix, c.k_bits = c.v_bits = kCodes;
    });
    add("d64, any bits", [](Case& c) {
        c.sequences = {{1100, 300}}, c.d = 64, c.pages = Pages::kRandom, c.k_bits = c.v_bits = kAny, c.kv_heads = 6;
    });
    add("d64 full", [](Case& c) { c.sequences = {{700, 500}}, c.d = 64, c.causal = false; });
    for (const int d : {128, 64}) {
        const auto add_low = [&](const std::string& name, Pages pages, int low, auto change) {
            add("low pages, d" + std::to_string(d) + ", " + name, [&](Case& c) {
                c.d = d, c.pages = pages, c.low = low;
                change(c);
            });
        };
        // Beside the pages of a pool of 4 bits, and beside those of one of 8, some of which fell to 4 only.
        add_low("4 bits", Pages::kPrefix, 50, [](Case& c) { c.sequences = {{1100, 300}, {3000, 100}}; });
        add_low("8 bits", Pages::kRandom, 35, [](Case& c) { c.sequences = {{1500, 400}, {2600, 60}, {130, 130}}; });
        add_low("8 and 2 bits", Pages::kTokenOwnScale, 50, [](Case& c) { c.sequences = {{900, 300}}; });
        add_low("all", Pages::kChannel, 100, [](Case& c) { c.sequences = {{640, 200}, {704, 70}, {65, 65}}; });
        add_low("ends of pages", Pages::kRandom, 50, [](Case& c) {
            c.sequences = {{63, 63}, {64, 64}, {65, 65}, {127, 70}, {128, 70}, {129, 70}, {191, 70}, {192, 70}, {193, 70}};
        });
    }
    add("low pages, window, full", [](Case& c) {
        c.sequences = {{1500, 700}}, c.pages = Pages::kRandom, c.low = 50, c.window = 150, c.causal = false;
    });
    add("low pages, softcap", [](Case& c) {
        c.sequences = {{900, 300}}, c.pages = Pages::kRandom, c.low = 50, c.softcap = 5.0f;
    });
    add("low pages, sink", [](Case& c) {
        c.sequences = {{1000, 200}}, c.pages = Pages::kPrefix, c.low = 50, c.data = DataKind::kSink;
    });
    for (const int ranks : {2, 3, 8}) {
        const auto add_spread = [&](const std::string& name, auto change) {
            add("a rank of " + std::to_string(ranks) + ", " + name, [&](Case& c) {
                c.sequences = {{1500, 700}, {1300, 300}, {1, 1}, {65, 65}, {64 * ranks, 20}, {9000, 60}, {130, 200}};
                c.ranks = ranks;
                change(c);
            });
        };
        add_spread("8 bits", [](Case&) {});
        add_spread("token scales", [](Case& c) { c.pages = Pages::kTokenOwnScale, c.group = 5; });
        add_spread("4 bits", [](Case& c) { c.pages = Pages::kPrefix, c.group = 8; });
        add_spread("low pages, d64", [](Case& c) { c.pages = Pages::kRandom, c.low = 30, c.d = 64, c.group = 1; });
        add_spread("full", [](Case& c) { c.causal = false; });
        add_spread("window", [](Case& c) { c.window = 200, c.pages = Pages::kRandom; });
        add_spread("window of 70, full", [](Case& c) { c.window = 70, c.causal = false; });
        add_spread("softcap, sinks", [](Case& c) { c.softcap = 5.0f, c.sinks = true; });
        add_spread("alibi", [](Case& c) { c.alibi = true, c.pages = Pages::kPrefix; });
        add_spread("sas", [](Case& c) { c.exp = ExpMode::kSas, c.sequences[5].n_keys = 12000; });
        add_spread("pages apart", [](Case& c) { c.data = DataKind::kPagesApart; });
    }
    for (const int d : {128, 64}) {
        add("16-byte rows apart, d" + std::to_string(d), [&](Case& c) {
            c.sequences = {{500, 300}, {77, 77}}, c.d = d, c.q_type = DType::kF16;
            c.out_type = d == 128 ? DType::kF16 : DType::kBf16;
            c.head_gap = 8, c.row_gap = 16;
        });
    }
    return cases;
}

}  // namespace ta::cuda::testing
