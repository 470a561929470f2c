#include "src/kv/head_choice.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

namespace ta {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

HeadChoice::HeadChoice(std::span<const float> k_costs, std::span<const float> v_costs,
                       const std::array<uint32_t, kOptions>& units)
    : k_costs_(k_costs), v_costs_(v_costs), units_(units) {
    std::iota(by_size_.begin(), by_size_.end(), uint8_t{0});
    std::stable_sort(by_size_.begin(), by_size_.end(), [&](uint8_t a, uint8_t b) { return units_[a] < units_[b]; });
}

// Above the cheapest option's, so that what all options of a head cost is not lost in sums.
HeadChoice::Costs HeadChoice::costs(size_t head) const {
    const float *k = &k_costs_[3 * head], *v = &v_costs_[3 * head];
    const double k_least = *std::min_element(k, k + 3), v_least = *std::min_element(v, v + 3);
    Costs c;
    for (int i = 0; i < 3; ++i) {
        for (int j = 0; j < 3; ++j) c.of[3 * i + j] = (k[i] - k_least) + (v[j] - v_least);
    }
    return c;
}

double HeadChoice::cost(const std::vector<uint8_t>& options) const {
    double sum = 0.0;
    for (size_t head = 0; head < heads(); ++head) sum += costs(head).of[options[head]];
    return sum;
}

uint64_t HeadChoice::units(const std::vector<uint8_t>& options) const {
    uint64_t sum = 0;
    for (const uint8_t option : options) sum += units_[option];
    return sum;
}

// The option of least cost when each unit has this price; of equal options the smallest.
int HeadChoice::best(const Costs& c, double price) const {
    int found = -1;
    double least = kInfinity;
    for (const uint8_t option : by_size_) {
        if (const double p = priced(c, option, price); p < least) {
            least = p;
            found = option;
        }
    }
    return found;
}

uint64_t HeadChoice::units_at(double price) const {
    uint64_t sum = 0;
    for (size_t head = 0; head < heads(); ++head) sum += units_[size_t(best(costs(head), price))];
    return sum;
}

namespace {

// At this price of a unit the smallest options are best: two options of a head never differ by as much in cost.
constexpr double kHighestPrice = 0x1p131;

}  // namespace

uint64_t HeadChoice::least_units() const {
    return units_at(kHighestPrice);
}

// Gives heads larger options where there is room, if a unit loses no more than a share of the price.
void HeadChoice::fill(double price, double share, uint64_t& room, std::vector<uint8_t>& options) const {
    for (size_t head = 0; head < heads() && room > 0; ++head) {
        const Costs c = costs(head);
        const int now = options[head];
        int found = now;
        for (int option = 0; option < kOptions; ++option) {
            if (units_[size_t(option)] <= units_[size_t(now)] || c.of[option] >= c.of[found]) continue;
            const uint64_t more = units_[size_t(option)] - units_[size_t(now)];
            const double lost = priced(c, option, price) - priced(c, now, price);
            if (more <= room && lost <= share * price * double(more)) found = option;
        }
        room -= units_[size_t(found)] - units_[size_t(now)];
        options[head] = uint8_t(found);
    }
}

// With a price for units, each head has an option that is best, and others lose something against it. All heads' losses, and the
// price of the room that stays empty, are the distance of a choice from the lower bound of the price. So no option that alone loses
// more than the choice at hand does in all is in a better one. Returns the heads that keep several options; others get theirs.
std::vector<HeadChoice::Open> HeadChoice::rule_out(double price, uint64_t room, std::vector<uint8_t>& options) const {
    double most = price * double(room);
    for (size_t head = 0; head < heads(); ++head) {
        const Costs c = costs(head);
        most += priced(c, options[head], price) - priced(c, best(c, price), price);
    }
    std::vector<Open> open;
    for (size_t head = 0; head < heads(); ++head) {
        const Costs c = costs(head);
        const double least = priced(c, best(c, price), price);
        Open left{head, 0, {}};
        for (int option = 0; option < kOptions; ++option) {
            const double p = priced(c, option, price), rounding = 0x1p-48 * p;
            if (p < kInfinity && p - least <= most * (1.0 + 0x1p-30) + rounding) left.option[left.count++] = uint8_t(option);
        }
        if (left.count > 1) {
            open.push_back(left);
        } else {
            options[head] = left.option[0];
        }
    }
    return open;
}

// The exact choice for the open heads, which share `room`, by dynamic programming: head after head the least cost of each size.
// Of these rows every stride-th is kept; the others are computed again on the way back.
void HeadChoice::solve(const std::vector<Open>& open, uint64_t room, std::vector<uint8_t>& options) const {
    struct Step {  // from the head's smallest option
        uint64_t units;
        double cost;
        uint8_t option;
    };
    const auto least_of = [&](const Open& o) {
        uint32_t least = units_[o.option[0]];
        for (int j = 1; j < o.count; ++j) least = std::min(least, units_[o.option[j]]);
        return least;
    };
    uint64_t most = 0, unit = 0;
    for (const Open& o : open) {
        const uint32_t least = least_of(o);
        uint32_t largest = 0;
        for (int j = 0; j < o.count; ++j) {
            largest = std::max(largest, units_[o.option[j]] - least);
            unit = std::gcd(unit, uint64_t(units_[o.option[j]] - least));
        }
        room -= least;
        most += largest;
    }
    unit = std::max(unit, uint64_t{1});
    const size_t width = size_t(std::min(room, most) / unit + 1);
    if (open.size() > kMostSteps / width) return;
    const auto steps = [&](const Open& o, auto&& each) {
        const Costs c = costs(o.head);
        const uint32_t least = least_of(o);
        for (int j = 0; j < o.count; ++j) {
            const uint8_t option = o.option[j];
            each(Step{(units_[option] - least) / unit, c.of[option], option});
        }
    };

    const size_t n = open.size(), stride = size_t(std::ceil(std::sqrt(double(n))));
    std::vector<double> kept((n / stride + 2) * width, kInfinity), rows((stride + 1) * width);
    kept[0] = 0.0;
    const auto compute = [&](size_t first) {  // rows of heads first, ..., from the one kept before them
        const double* from = &kept[first / stride * width];
        std::copy(from, from + width, rows.begin());
        const size_t count = std::min(stride, n - first);
        for (size_t i = 0; i < count; ++i) {
            const double* before = &rows[i * width];
            double* row = &rows[(i + 1) * width];
            std::fill(row, row + width, kInfinity);
            steps(open[first + i], [&](const Step& step) {
                for (size_t w = step.units; w < width; ++w) row[w] = std::min(row[w], before[w - step.units] + step.cost);
            });
        }
        return count;
    };
    for (size_t first = 0; first < n; first += stride) {
        const double* last = &rows[compute(first) * width];
        std::copy(last, last + width, &kept[(first / stride + 1) * width]);
    }
    const double* end = &kept[((n - 1) / stride + 1) * width];
    size_t w = size_t(std::min_element(end, end + width) - end);  // of equal costs the smallest size
    for (size_t first = (n - 1) / stride * stride;; first -= stride) {
        for (size_t i = compute(first); i-- > 0;) {
            const Open& o = open[first + i];
            const size_t at = w;
            steps(o, [&](const Step& step) {
                if (step.units > at || rows[i * width + at - step.units] + step.cost != rows[(i + 1) * width + at]) return;
                w = at - step.units;
                options[o.head] = step.option;
            });
        }
        if (first == 0) break;
    }
}

std::vector<uint8_t> HeadChoice::within(uint64_t units) const {
    const auto at = [&](double price) {
        std::vector<uint8_t> options(heads());
        for (size_t head = 0; head < heads(); ++head) options[head] = uint8_t(best(costs(head), price));
        return options;
    };
    if (units_at(0.0) <= units) return at(0.0);
    // The least price at which the best options have room: of all doubles, whose order is that of their bits.
    uint64_t low = std::bit_cast<uint64_t>(0.0), high = std::bit_cast<uint64_t>(kHighestPrice);
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        (units_at(std::bit_cast<double>(middle)) <= units ? high : low) = middle;
    }
    const double price = std::bit_cast<double>(high);
    std::vector<uint8_t> options = at(price);
    uint64_t room = units - this->units(options);
    for (const int power : {-40, -20, -14, -10, -7, -5, -3, -1, 0}) fill(price, std::ldexp(1.0, power), room, options);
    const std::vector<Open> open = rule_out(price, room, options);
    for (const Open& o : open) room += units_[options[o.head]];
    if (!open.empty()) solve(open, room, options);
    return options;
}

}  // namespace ta
