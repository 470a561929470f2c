#include "kernels/cpu/merge_states.h"

namespace ta::cpu {

void merge_avx512(const MergeArgs& args, int64_t first, int64_t last) {
    merge_rows(args, page_codec_avx512(), first, last);
}

}  // namespace ta::cpu
