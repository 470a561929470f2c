#include "src/attend/queries.h"

#include <algorithm>

namespace ta {
namespace {

// Splits a member's positions into runs of consecutive ones.
Status list_positions(Step& step, size_t i, const int64_t* positions) {
    StepMember& m = step.members[i];
    const int64_t total = m.length + m.n_new, first_block = m.sequence->behind_gaps() / kPageTokens;
    const int64_t* const of_member = positions + m.query_row;
    for (int64_t begin = 0, end = 0; begin < m.n_query; begin = end) {
        do {
            const int64_t p = of_member[end];
            if (p >= 0 && p < total) continue;
            return fail(TA_E_INVALID, "options.query_positions[%lld] is %lld; the sequence will have %lld tokens",
                        (long long)(m.query_row + end), (long long)p, (long long)total)
                .argument(5)
                .sequence(int64_t(i))
                .token(m.query_row + end);
        } while (++end < m.n_query && of_member[end] == of_member[end - 1] + 1);
        m.first_query = std::min(m.first_query, of_member[begin]);
        const int64_t n_keys = of_member[end - 1] + 1 - first_block * kPageTokens;
        step.queries.push_back({i, first_block, n_keys, end - begin, m.query_row + begin});
    }
    if (m.n_query == 0) step.queries.push_back({i, first_block, total - first_block * kPageTokens, 0, m.query_row});
    return {};
}

// `row`: of the query with the lowest position if the caller gave positions; else -1.
Status check_gaps(const StepMember& m, size_t i, int64_t row) {
    const int64_t behind = m.sequence->behind_gaps();
    if (behind == 0 || m.n_query == 0 || m.first_query >= behind) return {};
    return fail(TA_E_STATE, "a query of sequence %zu stands at %lld; behind the sequence's gaps is %lld", i,
                (long long)m.first_query, (long long)behind)
        .argument(row < 0 ? 4 : 5)
        .sequence(int64_t(i))
        .token(row);
}

// Adds the member's queries again for each run of blocks that ends at a gap. A turned row gets a position inside the gap, where
// all blocks are missing, so that a causal mask shows it the whole run. If there are more rows than the gap has tokens, adds
// them in parts.
void list_turned(Step& step, size_t i) {
    const StepMember& m = step.members[i];
    int64_t back = 0, begin = 0;
    for (const Gap& gap : m.sequence->gaps) back += gap.tokens();
    for (const Gap& gap : m.sequence->gaps) {
        const int64_t first_row = step.total_query + step.turned_rows, keys = (gap.first - begin) * kPageTokens;
        for (int64_t done = 0, n = 0; done < m.n_query; done += n) {
            n = std::min(m.n_query - done, gap.tokens());
            step.queries.push_back({i, begin, keys + n, n, first_row + done});
            if (step.tree.empty()) continue;
            for (int32_t t = 0; t < n; ++t)
                step.tree.push_back({t < kTreeTokens ? (uint64_t{2} << t) - 1 : ~uint64_t{0}, t, t});
        }
        step.turned.push_back({m.query_row, m.n_query, first_row, back});
        step.turned_rows += m.n_query;
        back -= gap.tokens();
        begin = gap.end;
    }
}

}  // namespace

Status list_queries(Step& step, const int64_t* positions) {
    for (size_t i = 0; i < step.members.size(); ++i) {
        StepMember& m = step.members[i];
        const int64_t total = m.length + m.n_new, first_block = m.sequence->behind_gaps() / kPageTokens;
        m.first_query = total - m.n_query;
        if (positions) {
            m.first_query = total;
            TA_RETURN_IF_ERROR(list_positions(step, i, positions));
        } else {
            step.queries.push_back({i, first_block, total - first_block * kPageTokens, m.n_query, m.query_row});
        }
        const int64_t* const first = positions ? positions + m.query_row : nullptr;
        TA_RETURN_IF_ERROR(check_gaps(m, i, first ? std::min_element(first, first + m.n_query) - positions : -1));
        // Next to the member's own queries: backends split the work in this order, and runs before gaps are mostly short.
        if (m.n_query > 0) list_turned(step, i);
    }
    return {};
}

// A member's runs follow one another.
std::vector<JoinedRow> list_joined(const Step& step) {
    std::vector<JoinedRow> rows(size_t(step.total_query), JoinedRow{0, 0, 0});
    for (const TurnedQueries& t : step.turned) {
        for (int64_t i = 0; i < t.n_query; ++i) {
            JoinedRow& row = rows[size_t(t.from_row + i)];
            if (row.count++ == 0) row = {int32_t(t.row + i), int32_t(t.n_query), 1};
        }
    }
    return rows;
}

TensorView float_rows(const Step& step, const TensorView& like, uint8_t* data) {
    TensorView view = like;
    view.data = data;
    view.dtype = DType::kF32;
    view.tokens = step.all_rows();
    view.stride_head = like.head_dim;
    view.stride_token = like.heads * like.head_dim;
    return view;
}

}  // namespace ta
