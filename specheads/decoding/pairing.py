"""Which verification rules may judge which drafts."""

from specheads.decoding.drafting import Drafting
from specheads.decoding.records import DraftKind
from specheads.decoding.verification import (
    BiasedVerification,
    BigLittle,
    BlockVerification,
    GreedyBlockVerification,
    JointVerification,
    MultiRound,
    SpecTr,
    SyntheticVerification,
    TokenVerification,
    TreeMatch,
    TreeVerification,
    VerificationRule,
)
from specheads.errors import UserError

# By the names of their configs; of those that take a kind of draft the first is the default.
RULES = {
    "token": TokenVerification,
    "block": BlockVerification,
    "greedy_block": GreedyBlockVerification,
    "multi_round": MultiRound,
    "spectr": SpecTr,
    "tree_match": TreeMatch,
    "joint": JointVerification,
    "biased": BiasedVerification,
    "big_little": BigLittle,
    "synthetic": SyntheticVerification,
}
DEFAULTS = {DraftKind.BEAM: JointVerification}  # what the method is made for; others get a lossless rule


def default_verification(drafting: Drafting) -> VerificationRule | TreeVerification:
    """Return the rule that judges such drafts unless another is chosen."""
    return DEFAULTS.get(drafting.kind, next(rule for rule in RULES.values() if drafting.kind in rule.takes))()


def check_pairing(drafting: Drafting, verification: VerificationRule | TreeVerification) -> None:
    """Raise UserError for a rule that cannot judge such drafts."""
    if drafting.kind not in verification.takes:
        allowed = [name for name, rule in RULES.items() if drafting.kind in rule.takes]
        raise UserError(
            f"{verification.label} does not take what {type(drafting).__name__} drafts, {drafting.kind}; use verification="
            f"{' or '.join(allowed)}."
        )
