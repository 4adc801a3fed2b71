"""Which verification rules take which drafts, and the default rule of each kind of draft."""

import importlib
import pkgutil

from specheads.decoding import verification
from specheads.decoding.drafting import Drafting
from specheads.decoding.records import DraftKind
from specheads.decoding.verification import (
    JointVerification,
    MultiRound,
    TokenVerification,
    TreeMatch,
    TreeVerification,
    VerificationRule,
)
from specheads.errors import UserError

DEFAULTS: dict[DraftKind, type[VerificationRule] | type[TreeVerification]] = {
    DraftKind.CHAIN: TokenVerification,
    DraftKind.IID: MultiRound,
    DraftKind.DISTINCT: MultiRound,
    DraftKind.CHOSEN: TreeMatch,
    DraftKind.BEAM: JointVerification,  # the rule that the method was made for; all others are lossless
}


def default_verification(drafting: Drafting) -> VerificationRule | TreeVerification:
    """Return the rule that verifies such drafts unless another one is chosen."""
    return DEFAULTS[drafting.kind]()


def check_pairing(drafting: Drafting, rule: VerificationRule | TreeVerification) -> None:
    """Raise UserError for a rule that cannot verify such drafts."""
    if drafting.kind not in rule.takes:
        allowed = [name for name, other in named_rules().items() if drafting.kind in other.takes]
        raise UserError(
            f"{rule.label} does not take what {type(drafting).__name__} drafts, {drafting.kind}; use verification="
            f"{' or '.join(allowed)}."
        )


def named_rules() -> dict[str, type[VerificationRule] | type[TreeVerification]]:
    """Return the rules in the modules of the verification package, by the names of their configs."""
    modules = (
        importlib.import_module(f"{verification.__name__}.{info.name}") for info in pkgutil.iter_modules(verification.__path__)
    )
    classes = (value for module in modules for value in vars(module).values() if isinstance(value, type))
    rules = [value for value in classes if issubclass(value, VerificationRule | TreeVerification) and hasattr(value, "name")]
    return {rule.name: rule for rule in sorted(rules, key=lambda rule: rule.name)}
