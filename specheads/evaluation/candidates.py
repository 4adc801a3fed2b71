"""The stopping rules of conf/stopping with every value that is to be tried (a list is a choice),
and what each of them costs.
"""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import TimedSteps
from specheads.decoding.stopping import Fitting, FixedLength, StoppingRule, logistic_inputs
from specheads.decoding.verification import VerificationRule
from specheads.errors import UserError, is_number
from specheads.evaluation.keys import FIXED, MEASURED
from specheads.evaluation.report import RuleFields
from specheads.heads.head import AcceptanceHead
from specheads.heads.metrics import fit_logistic
from specheads.replay.recording import Recording
from specheads.replay.replay import (
    GROUND_TRUTH,
    Ceiling,
    Counts,
    RecordedHead,
    recorded_head,
    recorded_threshold,
    replay,
)

CEILING = "ceiling"
ORACLE = "oracle"
TARGET = "target"
OF_VERIFICATION = "of_verification"  # the family of a verification rule's own stopping rule
CEILING_THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]


class _MadeUp(Fitting):
    """Acceptable values in place of those that are fitted, while nothing is recorded."""

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(names, 0.0)

    def auto_threshold(self, max_tokens: int) -> float:
        return 0.5


@dataclass(frozen=True)
class RuleChoice:
    """A class of stopping rules with its arguments, in which a list holds the values to try."""

    cls: type[StoppingRule]
    arguments: Mapping[str, object] = field(default_factory=dict)

    def without_auto(self) -> "RuleChoice":
        """Return the choice without the value `auto`, which needs a recording."""
        known = dict(self.arguments)
        for key, value in self.arguments.items():
            if isinstance(value, list):
                known[key] = [each for each in value if each != "auto"]
        return replace(self, arguments=known)

    def samples(self, head: AcceptanceHead | None = None) -> list[StoppingRule]:
        """Return the rule with each combination of its values; what is fitted is made up, and the
        head too, if none is given.
        """
        cls = self.cls
        its_head: AcceptanceHead | RecordedHead | None = head
        if its_head is None and cls.uses_head:
            its_head = RecordedHead("any", "next_token")
        rules = []
        for arguments in _combinations(self.arguments):
            if cls.open_parameters(arguments):
                arguments = cls.fit(arguments, _MadeUp())
            rules.append(_made(cls, arguments, its_head))
        return rules


Rules = Mapping[str, RuleChoice]


def check_rules(choices: Rules) -> None:
    """Raise UserError for values that a rule refuses, before anything long begins."""
    for name, choice in choices.items():
        for key, value in choice.arguments.items():
            if value == []:
                raise UserError(
                    f"stopping.{name}.{key}=[] must name at least one value; or leave the rule out"
                    " of stopping=."
                )
        try:
            choice.samples()
        except UserError as error:
            raise UserError(f"stopping.{name}.{error}") from None
        except TypeError as error:
            raise UserError(
                f"stopping.{name} has arguments that its class does not take ({error}); see --help."
            ) from None


@dataclass(frozen=True)
class Candidate(RuleFields):
    """One way to decode: a stopping rule with its numbers, or the target alone, which has none."""

    family: str  # a rule's name, TARGET, OF_VERIFICATION, or the name of another verification rule
    name: str
    rule: StoppingRule | None  # the rule that is replayed
    live: StoppingRule | None  # the rule that decodes; None for a bound that no decoder can reach
    ratio: str | None = None  # the cost ratio that it was fitted to; None: it suits all
    verification: VerificationRule | None = None  # None: that of the evaluation
    # With another verification, the name of the same rule under that of the evaluation
    same_rule: str | None = None
    # Those of its class, as fitted, without a head
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def step_kind(self) -> str:
        """The name of what decides the cost of its draft steps: its class, and its head."""
        return step_kind(type(self.rule or self.live), self.head)

    @property
    def max_tokens(self) -> int:
        """The longest draft of the rule; 0 without one."""
        return 0 if self.rule is None else self.rule.max_tokens


def step_kind(cls: type, head: str | None) -> str:
    """Return the name of what decides the cost of a rule's draft steps: its class and its head."""
    return cls.__name__ if head is None else f"{cls.__name__} of {head}"


TARGET_ALONE = Candidate(TARGET, "target alone", None, None, parameters={"num_tokens": 0})
# It knows every outcome
ORACLE_BOUND = Candidate(ORACLE, ORACLE, None, None, rule_name=ORACLE, bound=True)


def fixed_length(length: int) -> Candidate:
    """Return a fixed length."""
    rule = FixedLength(length)
    lengths = {"num_tokens": length}
    return Candidate(
        FIXED,
        typed(FIXED, lengths),
        rule,
        rule,
        parameters=lengths,
        arguments=lengths,
        rule_name=FIXED,
    )


def typed(name: str, values: Mapping[str, object]) -> str:
    """Return a rule as it could be typed: the name of its config with values, such as
    `fixed_length(num_tokens=4)`.
    """
    words = [f"{key}={written(value)}" for key, value in values.items()]
    return f"{name}({', '.join(words)})"


class SecondsTable(NamedTuple):
    """Seconds of one kind of draft steps: the estimate, then those from resampled steps, C in
    all.
    """

    draft: np.ndarray  # (C,), of a draft step
    rounds: np.ndarray  # (C, n + 1), of rounds that verify 0 to n tokens, besides draft steps
    whole: np.ndarray  # (C,), more of a round after a draft that was accepted whole
    alone: np.ndarray  # (C,), of a token of the target alone


@dataclass(frozen=True)
class CostTable:
    """StepCosts by the name of their ratio, and what heads and rules add to a draft step.

    Bounds pay nothing for their knowledge.
    """

    costs: Mapping[str, StepCosts]
    # Each head's cost as a share of a draft step, counted from its weights, at the given ratios
    head_shares: Mapping[str, float] = field(default_factory=dict)
    steps: TimedSteps | None = None  # the steps that were timed here, for MEASURED
    _tables: dict[Hashable, SecondsTable] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of_kind(self, step_kind: str, head: str | None, ratio: str) -> list[StepCosts]:
        """Return the costs at a ratio of rules of one kind, see `Candidate.step_kind`, with a head
        given by name, or without one: the estimate, then as they would be from resampled steps.
        """
        if ratio == MEASURED and self.steps is not None:
            timed = (self.steps.estimate, *self.steps.resamples)
            return [each.costs.with_rule(each.rules.get(step_kind, 0.0)) for each in timed]
        costs = self.costs[ratio]
        share = 0.0 if head is None else self.head_shares.get(head, 0.0)
        return [costs.with_rule(share * costs.draft_seconds)]

    def of(self, rule: Candidate, ratio: str) -> StepCosts:
        """Return the costs of a rule at a ratio."""
        return self._all_of(rule, ratio)[0]

    def _all_of(self, rule: Candidate, ratio: str, free_head: bool = False) -> list[StepCosts]:
        return self.of_kind(*_paid_kind(rule, free_head), ratio)

    def _table(self, rule: Candidate, ratio: str, free_head: bool, longest: int) -> SecondsTable:
        key = (*_paid_kind(rule, free_head), ratio, longest)
        if key not in self._tables:  # rules of a kind share it
            costs = self._all_of(rule, ratio, free_head)
            self._tables[key] = SecondsTable(
                draft=np.array([each.draft_seconds for each in costs]),
                rounds=np.array([each.seconds_of_rounds(longest) for each in costs]),
                whole=np.array([each.whole_seconds for each in costs]),
                alone=np.array([each.alone_seconds for each in costs]),
            )
        return self._tables[key]

    def head_share(self, rule: Candidate, ratio: str) -> float | None:
        """Return a head's cost at a ratio, as a share of a draft step; None without a head."""
        if rule.head is None:
            return None
        return self.of(rule, ratio).draft_seconds / self.costs[ratio].draft_seconds - 1

    def speedup(
        self,
        counts: Counts,
        resamples: np.ndarray,
        rule: Candidate,
        ratio: str,
        free_head: bool = False,
    ) -> np.ndarray:
        """Return the speed-up over the target alone (R,) by `resamples` (R, P) of prompts.

        Timed steps are resampled along with the prompts: after the first row, which is the prompts
        themselves, each row has the costs of one resample of the steps.

        Args:
            free_head: exclude what the head adds to a draft step.
        """
        seconds = self._table(rule, ratio, free_head, counts.rounds.shape[-1])
        places = np.zeros(len(resamples), dtype=int)
        num_costs = len(seconds.draft)
        if num_costs > 1:
            places[1:] = 1 + np.arange(len(resamples) - 1) % (num_costs - 1)
        drafting = (resamples @ counts.drafted) * seconds.draft[places]
        verifying = ((resamples @ counts.rounds) * seconds.rounds[places]).sum(axis=1)
        reading = (resamples @ counts.whole) * seconds.whole[places]
        taken = drafting + verifying + reading
        return (resamples @ counts.tokens) * seconds.alone[places] / taken


def _paid_kind(rule: Candidate, free_head: bool) -> tuple[str, str | None]:
    """Return the kind of draft steps that a rule pays for, and its head: bounds pay for none."""
    return ("", None) if rule.bound or free_head else (rule.step_kind, rule.head)


# Thresholds between which the automatic one of a head is interpolated
GRID = np.linspace(0.02, 0.98, 25)


@dataclass(frozen=True)
class Tuning:
    """The fits of rules' open parameters to a recording of dev prompts, with the costs at each
    ratio; what several values of a rule ask for is computed once.
    """

    recording: Recording
    cost_table: CostTable
    _curves: dict[tuple[RecordedHead, int], list[Counts]] = field(default_factory=dict)
    _weights: dict[tuple[str, ...], dict[str, float]] = field(default_factory=dict)

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        """Return the weights of a logistic of the draft's confidence; see `Fitting`."""
        key = tuple(names)
        if key not in self._weights:
            tokens = self.recording.labels()
            features = dict[str, Tensor]()
            for name in ("draft_prob", "max_prob", "entropy"):
                features[name] = self.recording.features[name][tokens.node]
            inputs = [name for name in names if name != "bias"]
            labels = tokens.accepted.double()
            weights = fit_logistic(logistic_inputs(inputs, features), labels).tolist()
            self._weights[key] = dict(zip([*inputs, "bias"], weights, strict=True))
        return self._weights[key]

    @cached_property
    def mean_acceptance(self) -> float:
        """The share of proposed tokens that are accepted."""
        return self.recording.labels().accepted.double().mean().item()

    def auto_threshold(self, head: RecordedHead, max_tokens: int, costs: StepCosts) -> float:
        """Return the threshold at which one more draft step yields no more than the throughput.

        It is `1 - lambda t_d / m`, a fixed point (SpecDec++, theorem 3.1, in renewal-reward form):
        m is the mean acceptance of the tokens without a prediction, and lambda t_d the throughput
        at this threshold.
        """
        if (head, max_tokens) not in self._curves:
            rules = [recorded_threshold(head, float(threshold), max_tokens) for threshold in GRID]
            counts = list[Counts]()
            for rounds in replay(self.recording, rules):
                counts.append(rounds.per_prompt(self.recording.num_prompts))
            self._curves[head, max_tokens] = counts
        curve = self._curves[head, max_tokens]
        tokens = np.array([each.tokens.sum() for each in curve])
        seconds = np.array(
            [costs.seconds(each.drafted, each.rounds, each.whole).sum() for each in curve]
        )
        step_seconds = costs.draft_seconds + costs.verified_seconds
        throughputs = tokens * step_seconds / seconds  # at GRID, per draft step
        worth = self.mean_acceptance ** (2 if head.config.predicts == "input_token" else 1)
        excess = worth * (1 - GRID) - throughputs  # positive where going on would pay
        if not (excess > 0).any():
            return float(GRID[0])
        last = int(np.flatnonzero(excess > 0)[-1])
        part = excess[last] / (excess[last] - excess[last + 1]) if last + 1 < len(GRID) else 0.0
        return round(float(GRID[last] + part * (GRID[1] - GRID[0])), 3)


@dataclass(frozen=True)
class RuleFitting(Fitting):
    """The fitting of one rule, with its recorded head, at the costs of its steps."""

    tuning: Tuning
    head: RecordedHead | None
    costs: StepCosts

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        return self.tuning.logistic(names)

    def auto_threshold(self, max_tokens: int) -> float:
        assert self.head is not None
        return self.tuning.auto_threshold(self.head, max_tokens, self.costs)


def candidates(
    rules: Rules, heads: Mapping[str, AcceptanceHead], tuning: Tuning | None
) -> list[Candidate]:
    """Return all rules with all values and each head, and the ceiling if it is recorded.

    Raises UserError for refused values.
    """
    tried: list[Candidate] = []
    for name, choice in rules.items():
        for head in list(heads) if choice.cls.uses_head else [None]:
            tried += _family(name, choice, head, heads, tuning)
    if tuning is not None and GROUND_TRUTH in tuning.recording.features:
        longest = max(candidate.max_tokens for candidate in tried)
        most = min(tuning.recording.max_tokens, longest)
        for threshold in CEILING_THRESHOLDS:
            ceiling = Candidate(
                CEILING,
                f"ceiling {threshold:g}",
                Ceiling(threshold, most),
                None,
                parameters={"threshold": threshold},
                rule_name=CEILING,
                bound=True,
            )
            tried.append(ceiling)
    return tried


def _family(
    name: str,
    choice: RuleChoice,
    head: str | None,
    heads: Mapping[str, AcceptanceHead],
    tuning: Tuning | None,
) -> Iterator[Candidate]:
    """Yield a rule with one head, or without one, with all of its values.

    `auto` ones are a family by themselves.
    """
    cls = choice.cls
    live = None if head is None else heads[head]
    recorded = None if live is None else recorded_head(live)
    title = f"{head} " if head is not None and len(heads) > 1 else ""
    first = next(iter(choice.arguments))
    several = set[str]()  # arguments with more than one value
    choices = dict[str, object]()
    for key, value in choice.arguments.items():
        if isinstance(value, list) or key == first:
            choices[key] = value
        if isinstance(value, list) and len(value) > 1:
            several.add(key)
    for values in _combinations(choices):
        automatic = "auto" in values.values()
        given = {**choice.arguments, **values}
        for ratio, arguments in _fitted(cls, given, tuning, head, recorded):
            # The values that tell candidates apart, as fitted.
            shown = dict[str, object]()
            for key, value in values.items():
                if key in several or is_number(value):
                    shown[key] = arguments[key]
            named = {"head": head, **shown} if title else dict(shown)
            most = arguments.get("max_tokens")
            if is_number(most):
                named["max_tokens"] = most
            yield Candidate(
                family=f"{name} {title}".strip() + (" auto" if automatic else ""),
                name=typed(name, named),
                rule=_made(cls, arguments, recorded),
                live=_made(cls, arguments, live),
                parameters=shown,
                arguments=arguments,
                ratio=ratio,
                rule_name=name,
                head=head,
                automatic=automatic,
            )


def _fitted(
    cls: type[StoppingRule],
    arguments: Mapping[str, object],
    tuning: Tuning | None,
    head_name: str | None,
    head: RecordedHead | None,
) -> Iterator[tuple[str | None, dict[str, object]]]:
    """Yield a rule's arguments with everything open fitted, for each ratio of costs if they matter
    (else for None).
    """
    open_names = cls.open_parameters(arguments)
    if not open_names:
        yield None, dict(arguments)
        return
    if tuning is None:
        raise UserError(
            f"{cls.__name__} leaves {', '.join(sorted(open_names))} to be fitted on recorded dev"
            " prompts, but nothing is recorded here; give a value, or leave this rule out of"
            " stopping=."
        )
    table = tuning.cost_table
    for ratio in table.costs:
        costs, *_ = table.of_kind(step_kind(cls, head_name), head_name, ratio)
        fitted = cls.fit(arguments, RuleFitting(tuning, head, costs))
        if not open_names & cls.fitted_to_costs:
            yield None, fitted
            return
        yield ratio, fitted


def _made(
    cls: type[StoppingRule],
    arguments: Mapping[str, object],
    head: AcceptanceHead | RecordedHead | None,
) -> StoppingRule:
    given = dict(arguments)
    if head is not None:
        given["head"] = head
    return cls(**given)


def _combinations(choices: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield each combination of values; a list is a choice, anything else the only value."""
    listed = [value if isinstance(value, list) else [value] for value in choices.values()]
    for values in itertools.product(*listed):
        yield dict(zip(choices, values, strict=True))


def written(value: object) -> str:
    """Return a value of a rule's argument as a command line takes it."""
    if isinstance(value, Mapping):
        parts = [f"{key}: {written(part)}" for key, part in value.items()]
        return f"{{{', '.join(parts)}}}"
    if is_number(value):
        return f"{value:g}"
    return "null" if value is None else str(value).lower()
