// The bits of each head that cost least in total within a size: a knapsack problem with one choice for each head.
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
    static constexpr int kOptions = 9;  // of a head: option 3 i + j is kBitChoices[i] for K, kBitChoices[j] for V

    // Costs [heads, 3], kept by the caller: +Inf is never chosen, and each head has a finite cost of K and of V. `units`: sizes of a
    // head's options.
    HeadChoice(std::span<const float> k_costs, std::span<const float> v_costs, const std::array<uint32_t, kOptions>& units);

    uint64_t least_units() const;
    // An option for each head, the least cost that `units` >= least_units() have room for; of equal costs the smallest size. Exact but
    // for the rounding of sums in double, unless more than kMostSteps are left once prices have ruled options out. That takes many
    // heads of equal costs; the total is then above the least by less than what one head saves by its next option.
    std::vector<uint8_t> within(uint64_t units) const;
    static constexpr uint64_t kMostSteps = uint64_t{1} << 28;

    // Above what the cheapest options of all heads cost.
    double cost(const std::vector<uint8_t>& options) const;
    uint64_t units(const std::vector<uint8_t>& options) const;

  private:
    struct Costs {
        double of[kOptions];
    };
    struct Open {  // a head with several options that may be best
        size_t head;
        int count;
        uint8_t option[kOptions];
    };

    size_t heads() const { return k_costs_.size() / 3; }
    Costs costs(size_t head) const;
    double priced(const Costs& c, int option, double price) const { return c.of[option] + price * units_[size_t(option)]; }
    int best(const Costs& c, double price) const;
    uint64_t units_at(double price) const;
    void fill(double price, double share, uint64_t& room, std::vector<uint8_t>& options) const;
    std::vector<Open> rule_out(double price, uint64_t room, std::vector<uint8_t>& options) const;
    void solve(const std::vector<Open>& open, uint64_t room, std::vector<uint8_t>& options) const;

    std::span<const float> k_costs_, v_costs_;
    std::array<uint32_t, kOptions> units_;
    std::array<uint8_t, kOptions> by_size_;  // options, the smallest first
};

}  // namespace ta
