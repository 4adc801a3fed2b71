"""Draft & Verify (Zhang et al. 2023): the target drafts for itself, without some of its layers."""
