"""Where prompts come from, and how a pair encodes them."""
