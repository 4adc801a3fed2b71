"""What decoding costs, computed from counts instead of clocks."""
