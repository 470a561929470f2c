#include "divergence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>

#include "model.h"

namespace tinylm {
namespace {

double log_sum_exp(std::span<const float> x) {
    const double max = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (const float v : x) sum += std::exp(v - max);
    return max + std::log(sum);
}

struct Header {
    char magic[8] = {'T', 'A', 'L', 'O', 'G', 'I', 'T', '1'};
    uint64_t window = 0, windows = 0;  // then the windows' bytes, then their logits
};

}  // namespace

double kl_bits(std::span<const float> exact, std::span<const float> logits) {
    const double of_exact = log_sum_exp(exact), offset = of_exact - log_sum_exp(logits);
    double sum = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        sum += std::exp(exact[i] - of_exact) * (static_cast<double>(exact[i]) - logits[i] - offset);
    }
    return sum / std::log(2.0);
}

double weighted_mean(const std::vector<double>& values, const std::vector<double>& weights) {
    double sum = 0, all = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        sum += weights[i] * values[i];
        all += weights[i];
    }
    return sum / all;
}

std::size_t run_of(std::size_t n) {
    return static_cast<std::size_t>(std::sqrt(static_cast<double>(n)));
}

// A block weighs as many positions as it has: only the last one of a window has fewer than the others.
double standard_error(const std::vector<double>& means, const std::vector<double>& positions) {
    const std::size_t n = means.size(), run = run_of(n);
    if (n < 2) return std::numeric_limits<double>::infinity();
    const double centre = weighted_mean(means, positions);
    double squares = 0, count = 0;
    for (std::size_t first = 0; first < n; ++first) {
        double sum = 0;
        for (std::size_t i = first; i < first + run; ++i) sum += positions[i % n] * (means[i % n] - centre);
        squares += sum * sum;
        count += positions[first];
    }
    return std::sqrt(squares / static_cast<double>(run) * static_cast<double>(n) / static_cast<double>(n - run)) / count;
}

void Divergence::add(double kl) {
    sum_ += kl;
    if (++count_ == kBlock) close();
}

void Divergence::close() {
    if (count_ == 0) return;
    means_.push_back(sum_ / count_);
    positions_.push_back(count_);
    sum_ = count_ = 0;
}

ExactLogits::ExactLogits(std::span<const uint8_t> text, std::size_t window, std::filesystem::path file, Compute compute)
    : text_(text), window_(window), file_(std::move(file)), compute_(std::move(compute)) {
    if (!file_.empty() && !read()) write();
}

std::span<const float> ExactLogits::window(std::size_t w) {
    const std::size_t size = (window_ - 1) * kVocab;
    if (!file_.empty()) return std::span<const float>(logits_).subspan(w * size, size);
    logits_ = compute_(text_.subspan(w * window_, window_));
    return logits_;
}

// A file with more windows serves, too.
bool ExactLogits::read() {
    std::ifstream file(file_, std::ios::binary);
    if (!file) return false;
    const auto refuse = [&](const char* why) { throw std::runtime_error(file_.string() + ": " + why); };
    Header header;
    const Header expected;
    std::vector<uint8_t> text(text_.size());
    file.read(reinterpret_cast<char*>(&header), sizeof header);
    if (!file || std::memcmp(header.magic, expected.magic, sizeof header.magic) != 0) refuse("not a file of logits");
    if (header.window != window_ || header.windows < text_.size() / window_ || header.windows > (uint64_t{1} << 40) / window_) {
        refuse("the logits are of other windows, or of fewer");
    }
    file.read(reinterpret_cast<char*>(text.data()), static_cast<std::streamsize>(text.size()));
    file.seekg(static_cast<std::streamoff>(sizeof header + header.windows * header.window));
    logits_.resize(text_.size() / window_ * (window_ - 1) * kVocab);
    file.read(reinterpret_cast<char*>(logits_.data()), static_cast<std::streamsize>(logits_.size() * sizeof(float)));
    if (!file) refuse("too short");
    if (!std::equal(text.begin(), text.end(), text_.begin())) refuse("the logits are of another text");
    const std::vector<float> again = compute_(text_.first(std::min<std::size_t>(window_, 64)));
    for (std::size_t i = 0; i < again.size(); ++i) {
        if (!(std::abs(again[i] - logits_[i]) < 0.01f)) refuse("the logits are of another model");
    }
    return true;
}

void ExactLogits::write() {
    for (std::size_t at = 0; at < text_.size(); at += window_) {
        const std::vector<float> logits = compute_(text_.subspan(at, window_));
        logits_.insert(logits_.end(), logits.begin(), logits.end());
    }
    Header header;
    header.window = window_;
    header.windows = text_.size() / window_;
    const std::filesystem::path part = file_.string() + ".part";
    std::ofstream file(part, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&header), sizeof header);
    file.write(reinterpret_cast<const char*>(text_.data()), static_cast<std::streamsize>(text_.size()));
    file.write(reinterpret_cast<const char*>(logits_.data()), static_cast<std::streamsize>(logits_.size() * sizeof(float)));
    file.close();
    if (!file) throw std::runtime_error(part.string() + ": cannot be written");
    std::filesystem::rename(part, file_);
}

}  // namespace tinylm
