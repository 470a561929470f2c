"""Tables of accuracy: the library beside other formats and beside the papers that it follows. README.md says how to run them."""
