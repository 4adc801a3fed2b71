"""Rules that decide how much of a draft is accepted: pure batched functions, and thin strategies for the decoder.

A new rule for chains is a module with a function `Block -> AcceptanceDistribution` (chain_distribution.py) and a
ChainVerification (verify_step.py) that calls it; a rule that remembers earlier rounds is a VerificationRule (greedy_block.py); a
rule for trees is a TreeVerification (tree_distribution.py). Its `name` is that of its config in conf/verification/, whose
`_target_` names the module; this list does not have to name it.
"""

from specheads.decoding.verification.biased import BiasedVerification
from specheads.decoding.verification.big_little import BigLittle
from specheads.decoding.verification.block import (
    BlockVerification,
    block_distribution,
    block_verification,
    greedy_block_distribution,
)
from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.decoding.verification.greedy_block import (
    GreedyBlockVerification,
    Levels,
    NestedDistribution,
    greedy_block_verification,
)
from specheads.decoding.verification.joint import JointVerification, joint_distribution
from specheads.decoding.verification.multi_round import MultiRound, multi_round_distribution
from specheads.decoding.verification.spectr import SpecTr, spectr_distribution
from specheads.decoding.verification.synthetic import SyntheticVerification
from specheads.decoding.verification.token import TokenVerification, token_distribution, token_verification
from specheads.decoding.verification.tree_distribution import TreeBlock, TreeDistribution, TreeVerification
from specheads.decoding.verification.tree_match import TreeMatch, tree_match_distribution
from specheads.decoding.verification.verify_step import ChainVerification, VerificationRule, VerifyStep

__all__ = [
    "AcceptanceDistribution",
    "BiasedVerification",
    "BigLittle",
    "Block",
    "BlockVerification",
    "ChainVerification",
    "GreedyBlockVerification",
    "JointVerification",
    "Levels",
    "MultiRound",
    "NestedDistribution",
    "SpecTr",
    "SyntheticVerification",
    "TokenVerification",
    "TreeBlock",
    "TreeDistribution",
    "TreeMatch",
    "TreeVerification",
    "VerificationRule",
    "VerifyStep",
    "block_distribution",
    "block_verification",
    "greedy_block_distribution",
    "greedy_block_verification",
    "joint_distribution",
    "multi_round_distribution",
    "spectr_distribution",
    "token_distribution",
    "token_verification",
    "tree_match_distribution",
]
