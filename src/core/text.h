// Texts for callers: of errors, of the log, of a tier's state.
#pragma once

namespace ta {

// Makes one line of valid UTF-8 of a text that may hold anything that a caller gave, such as a file's name: '?' for each byte of
// a character that ends lines or is another control character, and for each byte that is none. A text that was cut may end
// inside a character.
void make_plain(char* text);

}  // namespace ta
