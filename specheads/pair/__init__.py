"""Pairs of a draft and a target: loading, checks, and what both are asked for: texts to logits to
probabilities to tokens.
"""
