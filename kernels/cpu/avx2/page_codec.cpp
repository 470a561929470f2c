#include "kernels/cpu/page_codec_impl.h"

namespace ta::cpu {
const PageCodec& page_codec_avx2() {
    return kPageCodec;
}
}  // namespace ta::cpu
