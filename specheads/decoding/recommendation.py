"""The rules that a head's config recommends: what `specheads evaluate` stored there."""

from specheads.decoding.stopping import MAX_TOKENS, HeadThreshold
from specheads.decoding.verification import BlockVerification, TokenVerification, VerificationRule
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead

VERIFICATIONS: dict[str, type[VerificationRule]] = {rule.name: rule for rule in (TokenVerification, BlockVerification)}


def recommended_rules(head: AcceptanceHead) -> tuple[HeadThreshold, VerificationRule]:
    """Return the stopping rule and the verification that a head recommends.

    Raises:
        UserError: the head recommends nothing, or a verification that is not known.
    """
    values = head.config.recommended or {}
    if "threshold" not in values:
        raise UserError(
            "the head recommends no setting: specheads evaluate head=<folder> stores one, unless something else was faster; "
            "choose one yourself, for example stopping=HeadThreshold(head, 0.5)."
        )
    verification = values.get("verification", TokenVerification.name)
    if verification not in VERIFICATIONS:
        raise UserError(f"the head recommends verification={verification!r}; expected one of {', '.join(VERIFICATIONS)}.")
    rule = HeadThreshold(head, values["threshold"], values.get("min_tokens"), values.get("max_tokens", MAX_TOKENS))
    return rule, VERIFICATIONS[verification]()
