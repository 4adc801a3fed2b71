"""Training of acceptance heads: many at once on one pass over the draft."""
