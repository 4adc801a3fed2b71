"""Rules that decide how much of a draft is accepted: pure batched functions, and thin strategies for the decoder.

A new rule for chains is a module with a function `Block -> AcceptanceDistribution` (chain_distribution.py) and a
ChainVerification (verify_step.py) that calls it; a rule that remembers earlier rounds is a VerificationRule. Its `name` is that
of its config in conf/verification/, whose `_target_` names the module, wherever that is; this list does not have to name it.
"""

from specheads.decoding.verification.block import BlockVerification, block_distribution, block_verification
from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.decoding.verification.synthetic import SyntheticVerification
from specheads.decoding.verification.token import TokenVerification, token_distribution, token_verification
from specheads.decoding.verification.verify_step import ChainVerification, Verification, VerificationRule, VerifyStep

__all__ = [
    "AcceptanceDistribution",
    "Block",
    "BlockVerification",
    "ChainVerification",
    "SyntheticVerification",
    "TokenVerification",
    "Verification",
    "VerificationRule",
    "VerifyStep",
    "block_distribution",
    "block_verification",
    "token_distribution",
    "token_verification",
]
