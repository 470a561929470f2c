#include "src/attend/cpu/turning.h"

#include <algorithm>
#include <iterator>

namespace ta {
namespace {

TurningSeries series_of_rows(const float* k, int n, int d, int first, int second) {
    TurningSeries s{};
    s.n = n;
    for (int t = 0; t < n; ++t) {
        s.x[t] = k[t * d + first];
        s.y[t] = k[t * d + second];
    }
    return s;
}

void add_turning(const TurningPairs& pairs, int first, int n, int d, float sign, float* k) {
    for (int i = 0; i < kTurningPairs && pairs.code[i]; ++i) {
        const TurningPair p = unpack_turning(pairs.code[i]);
        for (int t = 0; t < n; ++t) {
            const TurningValues at = turning_values(p, first + t);
            float* row = k + t * d;
            row[p.first] += sign * at.first;
            row[p.second] += sign * at.second;
        }
    }
}

}  // namespace

TurningPairs find_turning(const float* k, int n, int d) {
    float square[kMaxHeadDim] = {};
    for (int i = 0; i < turning_samples(n); ++i) {
        const float* row = k + turning_sample(n, i) * d;
        for (int c = 0; c < d; ++c) square[c] += row[c] * row[c];
    }
    TurningSearch search(square, d, n);
    TurningChoice choice{};
    int first, second;
    while (!choice.is_full() && search.next(choice.used, first, second)) {
        const TurningSeries s = series_of_rows(k, n, d, first, second);
        const float all = sum_of_squares(s);
        const TurningPair p = fit_turning(s, first, second, all);
        if (!is_turning(p, n, all, search.limits)) continue;
        const uint64_t code = pack_turning(p);
        const float rest = turning_rest(p, n, all);
        if (rest <= search.limits.rest) {
            choice.take(code);
        } else if (turning_helps(s, unpack_turning(code))) {
            choice.leave(code, rest);
        }
    }
    choice.take_left();
    TurningPairs found;
    std::copy(std::begin(choice.taken), std::end(choice.taken), found.code);
    return found;
}

TurningPairs carry_turning(const TurningPairs& before, const float* k, int n, int d) {
    TurningPairs found;
    int pairs = 0;
    for (int i = 0; i < kTurningPairs && before.code[i]; ++i) {
        TurningPair p = unpack_turning(before.code[i]);
        const TurningSeries s = series_of_rows(k, n, d, p.first, p.second);
        if (!carry(p, turned_back(s, p.turn, 0, n), n)) continue;
        const uint64_t code = pack_turning(p);
        if (n < kTurningRows || turning_helps(s, unpack_turning(code))) found.code[pairs++] = code;
    }
    return found;
}

bool all_turning_helps(const TurningPairs& pairs, const float* k, int n, int d) {
    for (int i = 0; i < kTurningPairs && pairs.code[i]; ++i) {
        const TurningPair p = unpack_turning(pairs.code[i]);
        if (!turning_helps(series_of_rows(k, n, d, p.first, p.second), p)) return false;
    }
    return true;
}

void take_out_turning(const TurningPairs& pairs, int first, int n, int d, float* k) {
    add_turning(pairs, first, n, d, -1.0f, k);
}

void put_back_turning(const TurningPairs& pairs, int first, int n, int d, float* k) {
    add_turning(pairs, first, n, d, 1.0f, k);
}

}  // namespace ta
