// How far the model's predictions are from those with exact attention: KL(exact || attention) in bits per byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tinylm {

// Sum over the vocabulary of p * log2(p / q), p and q the softmax of logits [kVocab] each.
double kl_bits(std::span<const float> exact, std::span<const float> logits);

double weighted_mean(const std::vector<double>& values, const std::vector<double>& weights);
// Neighbouring blocks of a text differ alike. So errors and draws treat runs of this many of n blocks as one.
std::size_t run_of(std::size_t n);
// Standard error of the mean over positions, from the means of blocks and their numbers of positions, in the order of the text;
// infinite for fewer than two blocks. docs/numerics.md, section 5.
double standard_error(const std::vector<double>& means, const std::vector<double>& positions);

// The mean over positions, and its standard error, which is computed from the means of blocks. A block never spans two windows.
class Divergence {
  public:
    static constexpr std::size_t kBlock = 256;  // positions

    void add(double kl);
    void end_window() { close(); }
    double mean() const { return weighted_mean(means_, positions_); }
    double standard_error() const { return tinylm::standard_error(means_, positions_); }
    const std::vector<double>& blocks() const { return means_; }  // those of two runs over one text can be compared in pairs
    const std::vector<double>& positions() const { return positions_; }

  private:
    void close();
    std::vector<double> means_, positions_;  // of each block
    double sum_ = 0, count_ = 0;             // of the open one
};

// Logits of exact attention for windows of a text, [windows, window - 1, kVocab]: the last byte of a window predicts nothing.
// They are computed once: `compute` gets the bytes of a window, maybe only its first ones. With a file, logits are read from
// it, or written to it if it does not exist. A file that was written for another model or text is refused.
class ExactLogits {
  public:
    using Compute = std::function<std::vector<float>(std::span<const uint8_t> bytes)>;

    ExactLogits(std::span<const uint8_t> text, std::size_t window, std::filesystem::path file, Compute compute);
    // Valid until the next call.
    std::span<const float> window(std::size_t w);

  private:
    bool read();
    void write();

    std::span<const uint8_t> text_;  // only whole windows
    std::size_t window_;
    std::filesystem::path file_;  // empty: no file, each window is computed when asked for
    Compute compute_;
    std::vector<float> logits_;
};

}  // namespace tinylm
