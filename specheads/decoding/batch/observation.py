"""The stopping rule of rows whose drafts a policy ends: it keeps what the policy reads about the last token."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping import StoppingRule
from specheads.errors import UserError
from specheads.features import FEATURES, ROUND_INPUTS
from specheads.heads.head import AcceptanceHead
from specheads.pair import Pair

ACCEPTANCE, OVERLAP = "head_acceptance", "head_overlap"  # the logits of a head's two read-outs, as features of a token


class Observation(NamedTuple):
    """The state of the rule."""

    num_drafted: Tensor  # (B,) long, in this round so far
    values: Tensor  # (B, F) float64, the features of the last drafted token
    rule: Any = ()  # the state of the rule that stops rows, too


class Observing(StoppingRule):
    """Keeps features of the last drafted token; stops where another rule does, or never.

    Args:
        names: features that are single numbers, ACCEPTANCE and OVERLAP.
        max_tokens: tokens per row and round at most.
        head: of ACCEPTANCE and OVERLAP; it may not read the round.
        rule: that stops rows, bound to the pair already; None: only the policy ends drafts.

    Raises:
        UserError: a name that is not known, a head that is missing or reads something else.
    """

    def __init__(
        self, names: Sequence[str], max_tokens: int, head: AcceptanceHead | None = None, rule: StoppingRule | None = None
    ) -> None:
        self.names, self.max_tokens, self.head, self.rule = tuple(sorted(names)), max_tokens, head, rule
        self._predicted = [name for name in self.names if name in (ACCEPTANCE, OVERLAP)]
        plain = [name for name in self.names if name not in self._predicted]
        for name in plain:
            if name not in FEATURES or FEATURES[name].size is not None or FEATURES[name].of_round:
                raise UserError(f"a policy needs {name}, which is not a number that every drafted token has.")
        inputs = self._inputs(head)
        self.needs, rule_key = frozenset(plain) | inputs, None
        if rule is not None:
            self.needs, rule_key, self.reads_target = self.needs | rule.needs, rule.compile_key, rule.reads_target
        self.compile_key = ("observing", self.names, head if self._predicted else None, rule_key)

    def _inputs(self, head: AcceptanceHead | None) -> frozenset[str]:
        """Return what the head reads, if it is needed."""
        if not self._predicted:
            return frozenset()
        if head is None:
            raise UserError(f"a policy needs {self._predicted[0]}, but there is no head; give head=.")
        inputs = frozenset(head.config.inputs)
        if of_round := sorted(inputs & set(ROUND_INPUTS)) or sorted(inputs & {"target_hidden"}):
            raise UserError(f"the head reads {of_round[0]}, which a policy on the load does not have; train one without it.")
        if OVERLAP in self._predicted and not head.config.overlap:
            raise UserError("the head does not predict the expected acceptance before a token is sampled; train it again.")
        return inputs

    def bind(self, pair: Pair, device: torch.device) -> None:
        if self.head is not None:
            self.head.check_fits(pair)
            self.head.to(device)

    def start_prompt(self, batch: int, device: torch.device) -> Observation:
        values = torch.zeros(batch, len(self.names), dtype=torch.float64, device=device)
        of_rule = () if self.rule is None else self.rule.start_prompt(batch, device)
        return Observation(torch.zeros(batch, dtype=torch.long, device=device), values, of_rule)

    def start_round(self, state: Observation, target_hidden: Tensor | None = None) -> Observation:
        new = super().start_round(state, target_hidden)
        return new if self.rule is None else new._replace(rule=self.rule.start_round(state.rule, target_hidden))

    def step(self, state: Observation, features: Mapping[str, Tensor]) -> tuple[Observation, Tensor]:
        known: dict[str, Any] = dict(features)
        if self.head is not None and self._predicted:
            known[ACCEPTANCE] = self.head(known)
            if OVERLAP in self._predicted:
                known[OVERLAP] = self.head.overlap_logit(known)
        values = state.values
        if self.names:
            values = torch.stack([known[name].double() for name in self.names], dim=1)
        new = Observation(state.num_drafted + 1, values, state.rule)
        if self.rule is None:
            return new, torch.zeros_like(state.num_drafted, dtype=torch.bool)
        of_rule, stop = self.rule.step(state.rule, features)
        return new._replace(rule=of_rule), stop

    def end_round(self, state: Observation, num_drafted: Tensor, num_accepted: Tensor) -> Observation:
        if self.rule is None:
            return state
        return state._replace(rule=self.rule.end_round(state.rule, num_drafted, num_accepted))
