"""The rules that a head's config recommends: what `evaluate.py` stored there."""

from specheads.decoding.stopping import MAX_TOKENS, HeadThreshold
from specheads.decoding.verification import BlockVerification, TokenVerification, VerificationRule
from specheads.heads.head import AcceptanceHead

VERIFICATIONS: dict[str, type[VerificationRule]] = {rule.name: rule for rule in (TokenVerification, BlockVerification)}


def recommended_rules(head: AcceptanceHead) -> tuple[HeadThreshold, VerificationRule]:
    """Return the stopping rule and the verification that a head recommends. Raises UserError if it recommends nothing."""
    values = head.config.recommended or {}
    rule = HeadThreshold(head, "auto", values.get("min_tokens"), values.get("max_tokens", MAX_TOKENS))
    return rule, VERIFICATIONS[values.get("verification", TokenVerification.name)]()
