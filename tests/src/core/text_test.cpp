#include "src/core/text.h"

#include <gtest/gtest.h>

#include <string>

#include "src/core/status.h"

namespace ta {
namespace {

std::string plain(std::string text) {
    make_plain(text.data());
    return text;
}

TEST(Text, IsOneLineOfUtf8) {
    EXPECT_EQ(plain("a plain name, \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"),
              "a plain name, \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    for (const char* bad : {"\n", "\r", "\t", "\x01", "\x1b", "\x7f", "\xff", "\x80", "\xc3"})
        EXPECT_EQ(plain("a" + std::string(bad) + "b"), "a?b");
    EXPECT_EQ(plain("\xc2\x85\xc2\x9f"), "????") << "C1";
    EXPECT_EQ(plain("\xc2\xa0"), "\xc2\xa0");
    EXPECT_EQ(plain("\xe2\x80\xa8\xe2\x80\xa9\xe2\x80\xaa"), "??????\xe2\x80\xaa") << "separators of lines and paragraphs";
    EXPECT_EQ(plain("\xc0\x8a\xe0\x80\x8a\xed\xa0\x80\xf4\x90\x80\x80"), std::string(12, '?'))
        << "overlong, surrogates, too high";
    EXPECT_EQ(plain("cut \xf0\x9f\x98"), "cut ???");
}

TEST(Text, OfEveryError) {
    EXPECT_STREQ(fail(TA_E_IO, "opening %s", "a\nb").detail()->message, "opening a?b");
    EXPECT_STREQ(fail(TA_E_IO, "opening").because("a\nb").detail()->message, "opening; a?b");
    const std::string message = fail(TA_E_IO, "%s", ("x" + std::string(3000, '\xe2')).c_str()).detail()->message;
    EXPECT_EQ(message, "x" + std::string(sizeof ta_error::message - 2, '?'));
}

}  // namespace
}  // namespace ta
