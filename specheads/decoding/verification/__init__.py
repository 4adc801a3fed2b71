"""Rules that decide how much of a draft is accepted: pure batched functions, and thin strategies for the decoder.

A new rule for chains is a module with a function `Block -> AcceptanceDistribution` and a
ChainVerification (rule.py) that calls it; a rule that remembers earlier rounds is a VerificationRule. Its `name` is that
of its config in conf/verification/, whose `_target_` names the module, wherever that is; this list does not have to name it.
"""

from specheads.decoding.verification.chains import (
    BlockVerification,
    SyntheticVerification,
    TokenVerification,
    block_distribution,
    block_verification,
    token_distribution,
    token_verification,
)
from specheads.decoding.verification.rule import AcceptanceDistribution, Block, ChainVerification, Verification, VerificationRule

__all__ = [
    "AcceptanceDistribution",
    "Block",
    "BlockVerification",
    "ChainVerification",
    "SyntheticVerification",
    "TokenVerification",
    "Verification",
    "VerificationRule",
    "block_distribution",
    "block_verification",
    "token_distribution",
    "token_verification",
]
