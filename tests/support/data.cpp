#include "support/data.h"

#include <algorithm>
#include <cmath>

#include "support/numbers.h"

namespace ta::testing {
namespace {

// One kv head at a time, as models show them: four channels of K have means of 10 to 40, V has a mean in each channel and heavy
// tails. Queries of all heads and tokens share a direction that keys have no part in; only a sink's key lies along it.
class LlmHead {
  public:
    LlmHead(AttentionData& data, int64_t kv_head, Random& random)
        : data_(data), s_(data.shape), head_(kv_head), random_(random) {}

    void fill(double deviation, bool sink) {
        make_keys();
        make_queries(deviation);
        make_values();
        if (sink) make_sink();
    }

  private:
    float* key(int64_t t) { return data_.k.data() + (t * s_.kv_heads + head_) * s_.head_dim; }
    float* value(int64_t t) { return data_.v.data() + (t * s_.kv_heads + head_) * s_.head_dim; }
    float* query(int64_t i, int64_t in_group) {
        return data_.q.data() + (i * s_.q_heads + head_ * s_.group() + in_group) * s_.head_dim;
    }

    void make_keys() {
        const auto d = size_t(s_.head_dim);
        mean_.assign(d, 0.0f);
        deviation_.assign(d, 1.0f);
        for (float& m : mean_) m = 0.5f * random_.normal();
        outlier_.assign(d, false);
        for (int n = 0; n < 4; ++n) {
            const auto c = size_t(random_.below(s_.head_dim));
            outlier_[c] = true;
            mean_[c] = float(random_.uniform(10.0, 40.0) * (random_.chance(50) ? 1.0 : -1.0));
            deviation_[c] = 3.0f;
        }
        direction_.resize(d);
        double norm = 0.0;
        for (size_t c = 0; c < d; ++c) {
            direction_[c] = outlier_[c] ? 0.0 : random_.normal();
            norm += direction_[c] * direction_[c];
        }
        for (double& x : direction_) x /= std::sqrt(norm);
        for (int64_t t = 0; t < s_.n_keys; ++t) {
            float* k = key(t);
            for (size_t c = 0; c < d; ++c) k[c] = mean_[c] + deviation_[c] * random_.normal();
            double along = 0.0;
            for (size_t c = 0; c < d; ++c) along += direction_[c] * k[c];
            for (size_t c = 0; c < d; ++c) k[c] = float(k[c] - along * direction_[c]);
        }
    }

    // Scaled so that the scores of each query have the deviation asked for.
    void make_queries(double deviation) {
        const auto d = size_t(s_.head_dim);
        for (int64_t i = 0; i < s_.n_query; ++i) {
            for (int64_t g = 0; g < s_.group(); ++g) {
                float* q = query(i, g);
                for (size_t c = 0; c < d; ++c) q[c] = random_.normal() * (outlier_[c] ? 0.2f : 1.0f);
                double variance = 0.0;
                for (size_t c = 0; c < d; ++c) variance += std::pow(double(q[c]) * deviation_[c], 2);
                const double factor = deviation / std::sqrt(variance / s_.head_dim);
                for (size_t c = 0; c < d; ++c) q[c] = float(q[c] * factor);
                double along = 0.0;
                for (size_t c = 0; c < d; ++c) along += direction_[c] * q[c];
                for (size_t c = 0; c < d; ++c) q[c] += float((kAlong - along) * direction_[c]);
            }
        }
    }

    void make_values() {
        const auto d = size_t(s_.head_dim);
        std::vector<float> mean(d);
        for (float& m : mean) m = 0.5f * random_.normal();
        for (int64_t t = 0; t < s_.n_keys; ++t) {
            for (size_t c = 0; c < d; ++c) value(t)[c] = mean[c] + random_.student4();
        }
    }

    // The first token's score is such that it takes 70% of the mass of the last query.
    void make_sink() {
        if (s_.n_keys < 2 || s_.n_query < 1) return;
        const double scale = 1.0 / std::sqrt(double(s_.head_dim));
        const auto dot = [&](const float* q, int64_t t) {
            double x = 0.0;
            for (int64_t c = 0; c < s_.head_dim; ++c) x += double(q[c]) * double(key(t)[c]);
            return x * scale;
        };
        const float* q = query(s_.n_query - 1, 0);
        double others = 0.0;
        for (int64_t t = 1; t < s_.n_keys; ++t) others += std::exp(dot(q, t));
        const double wanted = std::log(0.7 / 0.3 * others), has = dot(q, 0);
        const double step = (wanted - has) / scale / kAlong;
        for (int64_t c = 0; c < s_.head_dim; ++c) {
            key(0)[c] += float(step * direction_[size_t(c)]);
            value(0)[c] = 0.02f * random_.normal();
        }
    }

    static constexpr double kAlong = 6.0;
    AttentionData& data_;
    const AttentionShape& s_;
    const int64_t head_;
    Random& random_;
    std::vector<float> mean_, deviation_;
    std::vector<bool> outlier_;
    std::vector<double> direction_;
};

}  // namespace

const char* name_of(DataKind kind) {
    switch (kind) {
        case DataKind::kNormal:
            return "normal";
        case DataKind::kFlat:
            return "flat";
        case DataKind::kSink:
            return "sink";
        case DataKind::kPeaky:
            return "peaky";
        case DataKind::kZeros:
            return "zeros";
        case DataKind::kConstantChannels:
            return "constant channels";
        case DataKind::kPagesApart:
            return "pages apart";
        case DataKind::kZerosAround:
            return "zeros around";
        case DataKind::kOneMagnitude:
            return "one magnitude";
        case DataKind::kLoud:
            return "loud";
        case DataKind::kOutliers:
            return "outliers 1e4";
        case DataKind::kDenormal:
            return "denormal";
        case DataKind::kHuge:
            return "huge";
    }
    return "?";
}

AttentionData make_data(DataKind kind, const AttentionShape& shape, uint64_t seed) {
    Random random(seed);
    AttentionData data;
    data.shape = shape;
    data.q = random.normals(shape.n_query * shape.q_heads * shape.head_dim);
    data.k = random.normals(shape.n_keys * shape.kv_heads * shape.head_dim);
    data.v = random.normals(shape.n_keys * shape.kv_heads * shape.head_dim);
    const auto scale_by = [](std::vector<float>& x, float factor) {
        for (float& value : x) value *= factor;
    };
    switch (kind) {
        case DataKind::kNormal:
            break;
        case DataKind::kFlat:
        case DataKind::kSink:
        case DataKind::kPeaky:
            for (int64_t h = 0; h < shape.kv_heads; ++h) {
                LlmHead(data, h, random).fill(kind == DataKind::kPeaky ? 3.0 : 0.5, kind == DataKind::kSink);
            }
            break;
        case DataKind::kZeros:
            scale_by(data.q, 0.0f);
            scale_by(data.k, 0.0f);
            scale_by(data.v, 0.0f);
            break;
        case DataKind::kConstantChannels: {
            const auto row = size_t(shape.kv_heads * shape.head_dim);
            for (size_t i = row; i < data.k.size(); ++i) {
                data.k[i] = data.k[i % row];
                data.v[i] = data.v[i % row];
            }
            break;
        }
        case DataKind::kPagesApart: {
            std::fill(data.k.begin(), data.k.end(), 0.0f);
            const auto row = size_t(shape.kv_heads) * size_t(shape.head_dim);
            for (size_t t = 64; t * row < data.v.size(); t += t % 64 == 0 ? 1 : 127) {
                const float x = t % 2 == 0 ? 1e4f : -1e4f;
                for (size_t h = 0; h < row; h += size_t(shape.head_dim)) data.v[t * row + h + 5] = x;
            }
            break;
        }
        case DataKind::kZerosAround: {
            std::fill(data.k.begin(), data.k.end(), 0.0f);
            const auto d = size_t(shape.head_dim), row = size_t(shape.kv_heads) * d;
            for (size_t i = 0; i < data.v.size(); ++i) {
                const size_t t = i / row;
                if (t < 128 || t >= 192) data.v[i] = 0.0f;
                if (t >= 160 && t < 192 && i % d == 5) data.v[i] = 1e4f;
            }
            break;
        }
        case DataKind::kLoud: {
            const auto d = size_t(shape.head_dim), row = size_t(shape.kv_heads) * d;
            const float along = std::sqrt(12.0f * std::sqrt(float(d)));  // along^2 is 12 in a score
            for (size_t i = 7; i < data.q.size(); i += d) data.q[i] = along;
            for (size_t i = 0; i < data.v.size(); ++i) {
                const size_t t = i / row;
                const bool loud = t % 64 >= 48;
                if (i % d == 7) data.k[i] = loud ? -along : 0.0f;
                data.v[i] *= loud ? 0x1p40f : t % 5 == 0 ? 0.0f : 1.0f;
            }
            break;
        }
        case DataKind::kOneMagnitude: {
            const auto d = size_t(shape.head_dim);
            std::fill(data.q.begin(), data.q.end(), 0.7f);
            for (size_t i = 0; i < data.k.size(); i += d) {
                const auto x = float(random.uniform(-0.7, 0.7));
                std::fill_n(data.k.begin() + int64_t(i), d, x);
            }
            break;
        }
        case DataKind::kOutliers:
            for (size_t i = 0; i < data.k.size(); ++i) {
                if (random.below(3000) == 0) data.k[i] *= 1e4f;
                if (random.below(3000) == 0) data.v[i] *= 1e4f;
            }
            break;
        case DataKind::kDenormal:
            scale_by(data.q, 0x1p-130f);
            scale_by(data.k, 0x1p-130f);
            scale_by(data.v, 0x1p-130f);
            break;
        case DataKind::kHuge:
            scale_by(data.q, 0x1p-50f);
            scale_by(data.k, 0x1p50f);
            scale_by(data.v, 0x1p50f);
            break;
    }
    return data;
}

}  // namespace ta::testing
