// Query rows of steps over sequences with gaps (src/attend/queries.h): turned for what gaps are behind, and their results joined. The
// host side; nothing here needs the CUDA language.
#pragma once

#include "kernels/cuda/common/attend_args.h"
#include "kernels/format/joined_row.h"
#include "kernels/format/rotary.h"

struct CUstream_st;

namespace ta::cuda {

struct TurnedRow {
    int32_t from;  // a row of q
    int32_t back;  // positions
};

// All rows of q as floats, and behind them those that are turned.
struct TurnQueriesArgs {
    int32_t rows, turned, heads, head_dim;
    TensorArgs q;          // [rows, heads, head_dim]
    const TurnedRow* row;  // [turned]
    RotaryPairs pairs;
    int32_t channels;     // that are turned
    const double* turns;  // [channels / 2] of a whole turn, for each position
    bool saturate;        // as AttendArgs has it
    float* to;            // [rows + turned, heads, head_dim]
};
int launch_turn_queries(const TurnQueriesArgs& args, CUstream_st* stream);  // a cudaError_t

// Joins the results of several rows, and the learned sink, for each row that they were made of.
struct JoinRowsArgs {
    int32_t rows, heads, head_dim;
    const JoinedRow* joined;  // [rows]
    const float *o, *lse;     // [all rows, heads, head_dim], [all rows, heads]
    const float* sink;        // [heads] logits, natural units, or nullptr
    TensorArgs out;           // [rows, heads, head_dim]
    float* out_lse;           // [rows, heads], or nullptr
};
int launch_join_rows(const JoinRowsArgs& args, CUstream_st* stream);  // likewise

}  // namespace ta::cuda
