"""Training of heads and distillation of drafts."""
