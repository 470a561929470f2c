// Chooses the bits of each head so that the total cost is least within a size: a knapsack problem with one choice for each
// head.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ta {

inline constexpr int kBitChoices[] = {8, 4, 2};  // of K and of V, in the order of their costs

class HeadChoice {
  public:
    static constexpr int kOptions = 9;  // for each head: option 3 i + j is kBitChoices[i] for K, kBitChoices[j] for V

    using Sizes = std::array<uint32_t, kOptions>;  // of one head's options, in units

    // The caller keeps the spans. Costs: [heads, 3]; +Inf is never chosen, and each head has a finite cost of K and of V.
    // Sizes: [heads].
    HeadChoice(std::span<const float> k_costs, std::span<const float> v_costs, std::span<const Sizes> sizes);

    uint64_t least_units() const;
    // An option for each head: the least total cost that fits `units`, which is at least least_units(). Of equal costs it takes
    // the smallest size. Exact but for the rounding of sums in double, with one exception: prices rule options out first, and
    // more than kMostSteps may be left, which takes many heads of equal costs. Then the total is above the least by less than
    // what one head saves by its next option.
    std::vector<uint8_t> within(uint64_t units) const;
    static constexpr uint64_t kMostSteps = uint64_t{1} << 28;

    // How much more the options cost in total than the cheapest option of each head.
    double cost(const std::vector<uint8_t>& options) const;
    uint64_t units(const std::vector<uint8_t>& options) const;

  private:
    struct Costs {
        double of[kOptions];
    };
    struct Open {  // a head for which several options may be the best
        size_t head;
        int count;
        uint8_t option[kOptions];
    };

    size_t heads() const { return k_costs_.size() / 3; }
    Costs costs(size_t head) const;
    uint32_t size(size_t head, int option) const { return sizes_[head][size_t(option)]; }
    double priced(size_t head, const Costs& c, int option, double price) const {
        return c.of[option] + price * size(head, option);
    }
    int best(size_t head, const Costs& c, double price) const;
    uint64_t units_at(double price) const;
    void fill(double price, double share, uint64_t& room, std::vector<uint8_t>& options) const;
    std::vector<Open> rule_out(double price, uint64_t room, std::vector<uint8_t>& options) const;
    void solve(const std::vector<Open>& open, uint64_t room, std::vector<uint8_t>& options) const;

    std::span<const float> k_costs_, v_costs_;
    std::span<const Sizes> sizes_;
};

}  // namespace ta
