"""Many prompts at once: rows of one memory draft in lockstep, are verified together, and take the next prompt when they end."""
