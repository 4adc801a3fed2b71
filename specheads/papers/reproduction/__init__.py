"""Experiments of papers, repeated: methods decode the same prompts, and the papers' claims are
checked on what they did.
"""
