"""The smallest embedded pair."""

from specheads.embedded import corpus as corpus  # the prompts of `data=nano`; callers name them by this pair
