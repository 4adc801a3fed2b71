"""Which verification rules take which drafts, and the usual rule of each drafting method."""

from specheads.decoding.drafting import Drafting
from specheads.decoding.verification import TokenVerification, Verification
from specheads.errors import UserError


def default_verification(drafting: Drafting) -> Verification:
    """Return the rule that verifies such drafts unless another one is chosen."""
    return drafting.usual_verification() or TokenVerification()


def check_pairing(drafting: Drafting, rule: Verification) -> None:
    """Raise UserError for a rule that cannot verify such drafts."""
    if drafting.kind not in rule.takes:
        raise UserError(
            f"{rule.label} does not take what {type(drafting).__name__} drafts, {drafting.kind}; use for example verification="
            f"{default_verification(drafting).name}."
        )
