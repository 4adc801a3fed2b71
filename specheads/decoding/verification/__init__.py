"""Rules that decide how much of a draft stands: pure batched functions, and thin strategies for the decoder.

A new rule for chains is a module with a function `Block -> AcceptanceLaw` (law.py) and a ChainVerification (step.py) that calls it; one
that remembers earlier rounds is a VerificationRule of its own (greedy_block.py). Its config goes to conf/verification/, and
tests/decoding/verification/ holds it to its law.
"""

from specheads.decoding.verification.biased import BiasedVerification
from specheads.decoding.verification.big_little import BigLittle
from specheads.decoding.verification.block import BlockVerification, block_law, block_verification, greedy_block_law
from specheads.decoding.verification.greedy_block import GreedyBlockVerification, Levels, NestedLaw, greedy_block_verification
from specheads.decoding.verification.joint import JointVerification, joint_law
from specheads.decoding.verification.law import AcceptanceLaw, Block
from specheads.decoding.verification.multi_round import MultiRound, multi_round_law
from specheads.decoding.verification.spectr import SpecTr, spectr_law
from specheads.decoding.verification.step import NUM_FACTS, ChainVerification, VerificationRule, VerifyStep
from specheads.decoding.verification.synthetic import SyntheticVerification
from specheads.decoding.verification.token import TokenVerification, token_law, token_verification
from specheads.decoding.verification.tree import TreeBlock, TreeLaw, TreeVerification
from specheads.decoding.verification.tree_match import TreeMatch, tree_match_law

__all__ = [
    "NUM_FACTS",
    "AcceptanceLaw",
    "BiasedVerification",
    "BigLittle",
    "Block",
    "BlockVerification",
    "ChainVerification",
    "GreedyBlockVerification",
    "JointVerification",
    "Levels",
    "MultiRound",
    "NestedLaw",
    "SpecTr",
    "SyntheticVerification",
    "TokenVerification",
    "TreeBlock",
    "TreeLaw",
    "TreeMatch",
    "TreeVerification",
    "VerificationRule",
    "VerifyStep",
    "block_law",
    "block_verification",
    "greedy_block_law",
    "greedy_block_verification",
    "joint_law",
    "multi_round_law",
    "spectr_law",
    "token_law",
    "token_verification",
    "tree_match_law",
]
