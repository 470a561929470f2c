// Texts for callers: of errors, of the log, of the state of a tier.
#pragma once

namespace ta {

// Turns a text into one line of valid UTF-8. The text may contain anything that a caller passed, such as a file's name. Each
// byte of a control character, which includes those that end lines, becomes '?', and so does each byte that belongs to no valid
// character. A text that was cut may end within a character.
void make_plain(char* text);

}  // namespace ta
