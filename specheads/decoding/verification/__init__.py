"""Rules that decide how much of a draft stands: pure batched functions, and thin strategies for the decoder."""

from specheads.decoding.verification.step import VerificationRule, VerifyStep
from specheads.decoding.verification.synthetic import SyntheticVerification
from specheads.decoding.verification.token import TokenLaw, TokenVerification, token_law, token_verdict, token_verification

__all__ = [
    "SyntheticVerification",
    "TokenLaw",
    "TokenVerification",
    "VerificationRule",
    "VerifyStep",
    "token_law",
    "token_verdict",
    "token_verification",
]
