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

HeadChoice::HeadChoice(std::span<const float> k_costs, std::span<const float> v_costs, std::span<const Sizes> sizes)
    : k_costs_(k_costs), v_costs_(v_costs), sizes_(sizes) {}

// Costs relative to the head's cheapest option. Otherwise a large common cost would swamp the differences in sums.
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
    for (size_t head = 0; head < heads(); ++head) sum += size(head, options[head]);
    return sum;
}

// The option of least cost at this price of a unit; of equal ones the smallest.
int HeadChoice::best(size_t head, const Costs& c, double price) const {
    int found = -1;
    double least = kInfinity;
    for (int option = 0; option < kOptions; ++option) {
        const double p = priced(head, c, option, price);
        if (p < least || (p == least && p < kInfinity && size(head, option) < size(head, found))) {
            least = p;
            found = option;
        }
    }
    return found;
}

uint64_t HeadChoice::units_at(double price) const {
    uint64_t sum = 0;
    for (size_t head = 0; head < heads(); ++head) sum += size(head, best(head, costs(head), price));
    return sum;
}

namespace {

// At this price per unit the smallest options are best: the costs of a head's options never differ by so much.
constexpr double kHighestPrice = 0x1p131;

}  // namespace

uint64_t HeadChoice::least_units() const {
    return units_at(kHighestPrice);
}

// Gives heads larger options while there is room, if each added unit loses at most `share` of the price.
void HeadChoice::fill(double price, double share, uint64_t& room, std::vector<uint8_t>& options) const {
    for (size_t head = 0; head < heads() && room > 0; ++head) {
        const Costs c = costs(head);
        const int now = options[head];
        int found = now;
        for (int option = 0; option < kOptions; ++option) {
            if (size(head, option) <= size(head, now) || c.of[option] >= c.of[found]) continue;
            const uint64_t more = size(head, option) - size(head, now);
            const double lost = priced(head, c, option, price) - priced(head, c, now, price);
            if (more <= room && lost <= share * price * double(more)) found = option;
        }
        room -= size(head, found) - size(head, now);
        options[head] = uint8_t(found);
    }
}

// At a price per unit each head has a best option, and loses something with any other. A choice exceeds the price's lower bound
// by the losses of all heads and the price of the room that stays empty. So an option that alone loses more than the present
// choice loses in all is in no better choice. Returns the heads that keep several options; the other heads get theirs.
std::vector<HeadChoice::Open> HeadChoice::rule_out(double price, uint64_t room, std::vector<uint8_t>& options) const {
    double most = price * double(room);
    for (size_t head = 0; head < heads(); ++head) {
        const Costs c = costs(head);
        most += priced(head, c, options[head], price) - priced(head, c, best(head, c, price), price);
    }
    std::vector<Open> open;
    for (size_t head = 0; head < heads(); ++head) {
        const Costs c = costs(head);
        const double least = priced(head, c, best(head, c, price), price);
        Open left{head, 0, {}};
        for (int option = 0; option < kOptions; ++option) {
            const double p = priced(head, c, option, price), rounding = 0x1p-48 * p;
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

// Chooses exactly for the open heads, which share `room`, by dynamic programming: for head after head the least cost of each
// size. Keeps every stride-th row, and recomputes the others on the way back.
void HeadChoice::solve(const std::vector<Open>& open, uint64_t room, std::vector<uint8_t>& options) const {
    struct Step {  // relative to the head's smallest option
        uint64_t units;
        double cost;
        uint8_t option;
    };
    const auto least_of = [&](const Open& o) {
        uint32_t least = size(o.head, o.option[0]);
        for (int j = 1; j < o.count; ++j) least = std::min(least, size(o.head, o.option[j]));
        return least;
    };
    uint64_t most = 0, unit = 0;
    for (const Open& o : open) {
        const uint32_t least = least_of(o);
        uint32_t largest = 0;
        for (int j = 0; j < o.count; ++j) {
            largest = std::max(largest, size(o.head, o.option[j]) - least);
            unit = std::gcd(unit, uint64_t(size(o.head, o.option[j]) - least));
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
            each(Step{(size(o.head, option) - least) / unit, c.of[option], option});
        }
    };

    const size_t n = open.size(), stride = size_t(std::ceil(std::sqrt(double(n))));
    std::vector<double> kept((n / stride + 2) * width, kInfinity), rows((stride + 1) * width);
    kept[0] = 0.0;
    const auto compute = [&](size_t first) {  // computes the rows of heads first, ..., from the row kept before them
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
        for (size_t head = 0; head < heads(); ++head) options[head] = uint8_t(best(head, costs(head), price));
        return options;
    };
    if (units_at(0.0) <= units) return at(0.0);
    // Finds the least price at which the best options fit, by bisection over all doubles: positive doubles order like their
    // bits.
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
    for (const Open& o : open) room += size(o.head, options[o.head]);
    if (!open.empty()) solve(open, room, options);
    return options;
}

}  // namespace ta
