"""Rules that decide how much of a draft is accepted: pure batched functions, and thin strategies for the decoder.

A new rule for chains is a module with a function `Block -> AcceptanceDistribution` and a VerificationRule (chains.py) that
calls it. Its `name` is that of its config in conf/verification/, whose `_target_` names the module, wherever that is; this list
does not have to name it.
"""

from specheads.decoding.verification.chains import (
    AcceptanceDistribution,
    Block,
    BlockVerification,
    SyntheticVerification,
    TokenVerification,
    Verification,
    VerificationRule,
    block_distribution,
    token_distribution,
)

__all__ = [
    "AcceptanceDistribution",
    "Block",
    "BlockVerification",
    "SyntheticVerification",
    "TokenVerification",
    "Verification",
    "VerificationRule",
    "block_distribution",
    "token_distribution",
]
