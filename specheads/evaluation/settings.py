"""Settings of an evaluation: recording, rules to replay and decode, and costs."""

from collections.abc import Mapping
from typing import Self

from pydantic import SkipValidation, model_validator

from specheads.decoding.drafting import Autoregressive, Drafting, check_pairing
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, HeadThreshold, StoppingRule
from specheads.decoding.verification import TokenVerification, VerificationRule
from specheads.errors import UserError
from specheads.evaluation.candidates import RuleChoice, Rules, check_rules
from specheads.evaluation.keys import FIXED, EvaluationKeys


class Evaluation(EvaluationKeys):
    """Settings of `specheads evaluate`."""

    stopping: SkipValidation[Mapping[str, RuleChoice]] | None = None
    drafting: SkipValidation[Drafting] = Autoregressive()
    verification: SkipValidation[VerificationRule] = TokenVerification()

    @model_validator(mode="after")
    def _something_can_be_compared(self) -> Self:
        if FIXED not in self.rules:
            raise UserError(
                "stopping leaves out fixed_length, over which every gain is stated; add it, for"
                " example 'stopping=[fixed_length,head_threshold]', or use stopping=all."
            )
        check_rules(self.rules)
        check_pairing(self.drafting, self.verification)
        if self.concurrency and (not self.can_replay or self.live == "none"):
            raise UserError(
                f"concurrency={list(self.concurrency)} decodes the best rules of a recording, which"
                " needs drafting=autoregressive, verification=token and live=winners; use these, or"
                " concurrency=[]."
            )
        if not self.can_replay and self.live == "none":
            raise UserError(f"live=none, but {self.method} can only be decoded; use live=winners.")
        if not self.can_replay:
            self._check_decoded()
        return self

    @property
    def rules(self) -> Rules:
        """The stopping rules by name, with all values that are tried."""
        if self.stopping is not None:
            return self.stopping
        threshold = {
            "threshold": list(self.thresholds),
            "min_tokens": None,
            "max_tokens": MAX_TOKENS,
        }
        return {
            FIXED: RuleChoice(FixedLength, {"num_tokens": list(self.fixed_lengths)}),
            "head_threshold": RuleChoice(HeadThreshold, threshold),
        }

    @property
    def can_replay(self) -> bool:
        """Whether a recording predicts these rounds. It does for chains under token verification.

        Others must be decoded.
        """
        return isinstance(self.verification, TokenVerification) and isinstance(
            self.drafting, Autoregressive
        )

    @property
    def method(self) -> str:
        """The drafts and the rule that verifies them, in words."""
        return f"{type(self.drafting).__name__.lower()} drafts under {self.verification.label}"

    @property
    def tries_block(self) -> bool:
        """Whether the chosen rules are decoded under block verification, too: it accepts more of
        sampled drafts than token's.
        """
        return self.warp.temperature > 0 and self.can_replay

    def _check_decoded(self) -> None:
        """Raise UserError if `live_rules` leaves nothing that drafts."""
        rules = list[StoppingRule]()
        for name, choice in self.rules.items():
            if name in self.live_rules and (self.head or not choice.cls.uses_head):
                rules += choice.without_auto().samples()
        if not rules and self.verification.stopping is None:
            raise UserError(
                f"live_rules={list(self.live_rules)} leaves nothing to decode but the target alone:"
                f" {self.method} are only decoded, rule by rule of live_rules; take for example"
                " 'live_rules=[fixed_length]'."
            )
