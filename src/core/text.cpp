#include "src/core/text.h"

#include <cstddef>

namespace ta {
namespace {

struct Character {
    size_t bytes;  // 0: not a character, or an incomplete one
    char32_t code;
};

Character character_at(const unsigned char* text) {
    const unsigned char lead = text[0];
    const size_t n = lead < 0x80 ? 1 : lead >> 5 == 0x6 && lead > 0xc1 ? 2 : lead >> 4 == 0xe ? 3 : lead >> 3 == 0x1e ? 4 : 0;
    char32_t code = n == 1 ? lead : lead & (0x7f >> n);
    for (size_t i = 1; i < n; ++i) {
        if (text[i] >> 6 != 0x2) return {0, 0};
        code = code << 6 | (text[i] & 0x3f);
    }
    const bool is_good =
        n < 3 || (n == 3 ? code >= 0x800 && (code < 0xd800 || code > 0xdfff) : code >= 0x10000 && code < 0x110000);
    return {is_good ? n : 0, code};
}

// C0, DEL and C1, which include line breaks, and Unicode's separators of lines and paragraphs.
bool is_control(char32_t code) {
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 || code == 0x2029;
}

}  // namespace

void make_plain(char* text) {
    auto* p = reinterpret_cast<unsigned char*>(text);
    while (*p) {
        const Character c = character_at(p);
        size_t n = c.bytes == 0 ? 1 : c.bytes;
        const bool replace = c.bytes == 0 || is_control(c.code);
        for (; n > 0; --n, ++p) {
            if (replace) *p = '?';
        }
    }
}

}  // namespace ta
