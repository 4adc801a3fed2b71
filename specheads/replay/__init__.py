"""The cost of decoding with any stopping rule, from recordings and counts instead of clocks."""
