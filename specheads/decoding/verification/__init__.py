"""Rules that decide how much of a draft stands: pure batched functions, and thin strategies for the decoder."""

from specheads.decoding.verification.token import TokenLaw, TokenVerification, token_law, token_verification

__all__ = ["TokenLaw", "TokenVerification", "token_law", "token_verification"]
