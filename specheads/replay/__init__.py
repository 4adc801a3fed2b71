"""What decoding costs with any stopping rule, from recordings and counts in place of clocks."""
