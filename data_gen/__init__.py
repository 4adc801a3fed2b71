"""Stage 1 of the pipeline: prompts -> target responses -> drafted tokens with their acceptance
probabilities.
"""
