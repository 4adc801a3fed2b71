"""Block verification (Sun et al. 2024): its greedy variant; the rule itself is in the core."""
