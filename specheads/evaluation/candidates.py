"""The stopping rules of conf/stopping with every value that is to be tried (a list is a choice),
and what each of them costs.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.stopping import FixedLength, StoppingRule, logistic_inputs
from specheads.decoding.verification import VerificationRule
from specheads.errors import UserError, is_number
from specheads.evaluation.report import MEASURED, RuleFields
from specheads.heads.head import AcceptanceHead
from specheads.heads.metrics import fit_logistic
from specheads.replay.cost import CostFit
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

FIXED = "fixed_length"
CEILING = "ceiling"
ORACLE = "oracle"
TARGET = "target"
OF_VERIFICATION = "of_verification"  # the family of a verification rule's own stopping rule
CEILING_THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]
# Acceptable values in place of those that are fitted, while nothing is recorded
MADE_UP_FIT = SimpleNamespace(
    logistic=lambda names: dict.fromkeys(names, 0.0),
    auto_threshold=lambda head, max_tokens, costs: 0.5,
)


@dataclass(frozen=True)
class RuleChoice:
    """A class of stopping rules with its arguments, in which a list holds the values to try."""

    cls: type[StoppingRule]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def without_auto(self) -> "RuleChoice":
        """Return the choice without the value `auto`, which needs a recording."""
        known = {
            key: [each for each in value if each != "auto"] if isinstance(value, list) else value
            for key, value in self.arguments.items()
        }
        return replace(self, arguments=known)

    def samples(self) -> list[StoppingRule]:
        """Return the rule with each combination of its values; what is fitted is made up."""
        cls = self.cls
        head = RecordedHead("any", "next_token") if cls.uses_head else None
        rules = []
        for arguments in _combinations(
            {key: _listed(value) for key, value in self.arguments.items()}
        ):
            if cls.open_parameters(arguments):
                arguments = cls.fit(arguments, MADE_UP_FIT, head, StepCosts.at_ratio(10))
            rules.append(_made(cls, arguments, head))
        return rules


Rules = Mapping[str, RuleChoice]


def check_rules(choices: Rules) -> None:
    """Raise UserError for values that a rule refuses, before anything long begins."""
    for name, choice in choices.items():
        if empty := [key for key, value in choice.arguments.items() if value == []]:
            raise UserError(
                f"stopping.{name}.{empty[0]}=[] must name at least one value; or leave the rule out"
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
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ratio: str | None = None  # the cost ratio that it was fitted to; None: it suits all
    verification: VerificationRule | None = None  # None: that of the evaluation
    arguments: Mapping[str, Any] = field(
        default_factory=dict
    )  # those of its class, as fitted, without a head

    @property
    def step_kind(self) -> str:
        """The name of what decides the cost of its draft steps: its class, and its head."""
        return type(self.rule or self.live).__name__ + (f" of {self.head}" if self.head else "")

    @property
    def kind(self) -> str:
        """The name of everything that decides its cost: that of its draft steps, and another
        verification rule.
        """
        return self.step_kind + (f" under {self.verification.label}" if self.verification else "")


TARGET_ALONE = Candidate(TARGET, "target alone", None, None, {"num_tokens": 0})
ORACLE_BOUND = Candidate(
    ORACLE, ORACLE, None, None, rule_name=ORACLE, bound=True
)  # it knows every outcome


def fixed_length(length: int) -> Candidate:
    """Return a fixed length."""
    rule = FixedLength(length)
    lengths = {"num_tokens": length}
    return Candidate(
        FIXED, typed(FIXED, lengths), rule, rule, lengths, arguments=lengths, rule_name=FIXED
    )


def typed(name: str, values: Mapping[str, Any]) -> str:
    """Return a rule as it could be typed: the name of its config with values, such as
    `fixed_length(num_tokens=4)`.
    """
    return f"{name}({', '.join(f'{key}={written(value)}' for key, value in values.items())})"


@dataclass(frozen=True)
class CostTable:
    """StepCosts by the name of their ratio, and the costs that heads and rules add.

    Bounds pay nothing for their knowledge.
    """

    costs: Mapping[str, StepCosts]
    head_shares: Mapping[str, float] = field(
        default_factory=dict
    )  # each head's cost as a share of a draft step, at the ratios
    fit: CostFit | None = None  # what was fitted to decoded rounds
    measured_heads: Mapping[str, float] = field(
        default_factory=dict
    )  # the seconds that each head adds to a draft step here
    # The costs that kinds of rules without timed rounds add, by whether they have a head: the
    # median of those of timed kinds. If they were taken to add nothing, rules without timed rounds
    # would look best.
    untimed: Mapping[bool, RuleCosts] = field(default_factory=dict)
    alone: float | None = None  # tokens per second of the target alone, by the median of its steps
    halves: Sequence[
        "CostTable"
    ] = ()  # measured costs for the even and the odd prompts, each from the rounds of the others
    ends: Sequence[
        "CostTable"
        # Where steps were timed by themselves: the low end of their range, the middle, the high end
    ] = ()

    def of_head(self, head: str | None, ratio: str) -> StepCosts:
        """Return the costs at a ratio of a rule with a head, given by name, or without one."""
        costs = self.costs[ratio]
        if head is None:
            return costs
        step = self.head_shares.get(head, 0.0) * costs.draft_seconds
        if ratio == MEASURED:
            step = self.measured_heads.get(head, step)
        return costs.with_rule(RuleCosts(step_seconds=step))

    def of(self, rule: Candidate, ratio: str) -> StepCosts:
        """Return the costs of a rule at a ratio."""
        if rule.rule is None:  # the oracle
            return self.costs[ratio]
        if ratio == MEASURED and self.fit is not None and rule.kind in self.fit.rules:
            return self.costs[ratio].with_rule(self.fit.rules[rule.kind])
        costs = self.of_head(rule.head, ratio)
        return (
            costs.with_rule(self.untimed.get(rule.head is not None, RuleCosts()))
            if ratio == MEASURED
            else costs
        )

    def head_share(self, rule: Candidate, ratio: str) -> float | None:
        """Return a head's cost at a ratio, as a share of a draft step.

        None without a head or a draft step.
        """
        if rule.head is None or not self.costs[ratio].draft_seconds:
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
        """Return the speed-up over the target alone (R,) by `resamples` (R, P).

        `free_head`: as if it cost nothing.
        """
        costs = self.of(rule, ratio)
        if free_head:
            costs = replace(self.costs[ratio], round_seconds=costs.round_seconds)
        seconds = resamples @ costs.seconds(counts.drafted, counts.rounds)
        return (resamples @ counts.tokens) / seconds / (self.alone if ratio == MEASURED else 1.0)

    def for_prompts(self, rule: Candidate, num_prompts: int) -> list[StepCosts]:
        """Return the measured costs of a rule on each of the first prompts, from rounds of other
        prompts if there are enough.
        """
        halves = self.halves or (self, self)
        return [halves[number % 2].of(rule, MEASURED) for number in range(num_prompts)]


GRID = np.linspace(
    0.02, 0.98, 25
)  # thresholds between which the automatic one of a head is interpolated


@dataclass(frozen=True)
class Tuning:
    """The fits (see `StoppingRule.fit`) of rules' open parameters to a recording of dev prompts,
    with the costs at each ratio.
    """

    recording: Recording
    cost_table: CostTable
    _curves: dict[tuple[RecordedHead, int], list[Counts]] = field(default_factory=dict)
    _fits: dict[Any, dict[str, float]] = field(
        default_factory=dict
    )  # kept, because every value of a rule asks for them again

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        """Return the weights of a logistic of the draft's confidence.

        For `names` see `logistic_inputs`.
        """
        if tuple(names) not in self._fits:
            node, _, accepted, _ = self.recording.labels()
            features = {
                name: self.recording.features[name][node]
                for name in ("draft_prob", "max_prob", "entropy")
            }
            inputs = [name for name in names if name != "bias"]
            weights = fit_logistic(logistic_inputs(inputs, features), accepted.double()).tolist()
            self._fits[tuple(names)] = dict(zip([*inputs, "bias"], weights, strict=True))
        return self._fits[tuple(names)]

    @cached_property
    def mean_acceptance(self) -> float:
        """The share of proposed tokens that are accepted."""
        return self.recording.labels()[2].double().mean().item()

    def auto_threshold(self, head: RecordedHead, max_tokens: int, costs: StepCosts) -> float:
        """Return the threshold at which one more draft step yields no more than the throughput.

        It is `1 - lambda t_d / m`, a fixed point (SpecDec++, theorem 3.1, in renewal-reward form):
        m is the mean acceptance of the tokens without a prediction, and lambda t_d the throughput
        at this threshold.
        """
        if (head, max_tokens) not in self._curves:
            rules = [recorded_threshold(head, float(threshold), max_tokens) for threshold in GRID]
            rounds = replay(self.recording, rules)
            self._curves[head, max_tokens] = [
                replayed.per_prompt(self.recording.num_prompts) for replayed in rounds
            ]
        curve = self._curves[head, max_tokens]
        tokens, seconds = np.array(
            [(each.tokens.sum(), costs.seconds(each.drafted, each.rounds).sum()) for each in curve]
        ).T
        throughputs = (
            tokens * (costs.draft_seconds + costs.verified_seconds) / seconds
        )  # at GRID, per draft step
        worth = self.mean_acceptance ** (2 if head.config.predicts == "input_token" else 1)
        excess = worth * (1 - GRID) - throughputs  # positive where going on would pay
        if not (excess > 0).any():
            return float(GRID[0])
        last = int(np.flatnonzero(excess > 0)[-1])
        part = excess[last] / (excess[last] - excess[last + 1]) if last + 1 < len(GRID) else 0.0
        return round(float(GRID[last] + part * (GRID[1] - GRID[0])), 3)


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
        most = min(
            tuning.recording.max_tokens,
            max(candidate.rule.max_tokens for candidate in tried if candidate.rule),
        )
        tried += [
            Candidate(
                CEILING,
                f"ceiling {t:g}",
                Ceiling(t, most),
                None,
                {"threshold": t},
                rule_name=CEILING,
                bound=True,
            )
            for t in CEILING_THRESHOLDS
        ]
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
    choices = {
        key: _listed(value)
        for key, value in choice.arguments.items()
        if isinstance(value, list) or key == first
    }
    for values in _combinations(choices):
        automatic = "auto" in values.values()
        for ratio, arguments in _fitted(
            cls, {**choice.arguments, **values}, tuning, head, recorded
        ):
            # The values that tell candidates apart, as fitted.
            shown = {
                key: arguments[key]
                for key, value in values.items()
                if len(choices[key]) > 1 or is_number(value)
            }
            named = ({"head": head} if title else {}) | shown
            if is_number(most := arguments.get("max_tokens")):
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
    arguments: Mapping[str, Any],
    tuning: Tuning | None,
    head_name: str | None,
    head: RecordedHead | None,
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield a rule's arguments with everything open fitted, for each ratio of costs if they matter
    (else for None).
    """
    open_names = cls.open_parameters(arguments)
    if not open_names:
        yield None, dict(arguments)
    elif tuning is None:
        raise UserError(
            f"{cls.__name__} leaves {', '.join(sorted(open_names))} to be fitted on recorded dev"
            " prompts, but nothing is recorded here; give a value, or leave this rule out of"
            " stopping=."
        )
    elif open_names & cls.fitted_to_costs:
        for ratio in tuning.cost_table.costs:
            yield (
                ratio,
                cls.fit(arguments, tuning, head, tuning.cost_table.of_head(head_name, ratio)),
            )
    else:
        yield None, cls.fit(arguments, tuning, head, None)


def _made(
    cls: type[StoppingRule],
    arguments: Mapping[str, Any],
    head: AcceptanceHead | RecordedHead | None,
) -> StoppingRule:
    return cls(**arguments, **({} if head is None else {"head": head}))


def _combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def written(value: Any) -> str:
    """Return a value of a rule's argument as a command line takes it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {written(part)}' for key, part in value.items())}}}"
    return f"{value:g}" if is_number(value) else "null" if value is None else str(value).lower()
