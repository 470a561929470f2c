# The C program in README.md is examples/c/decode.c to the letter. Run as: cmake -DROOT=<repository> -P check_readme.cmake
file(READ "${ROOT}/README.md" readme)
file(READ "${ROOT}/examples/c/decode.c" program)
string(FIND "${readme}" "```c\n${program}```" at)
if(at EQUAL -1)
    message(FATAL_ERROR "README.md does not hold examples/c/decode.c: copy the file between ```c and ``` there")
endif()
