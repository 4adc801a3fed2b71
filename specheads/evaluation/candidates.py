"""The stopping rules and policies of conf/stopping, and every rule with every value that is to be tried.

A list in a rule's config is a choice of values. Each rule fits the arguments that its config leaves open (null, auto) on the
recording of dev prompts.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specheads.decoding.load_aware import LengthPolicy, LoadAware
from specheads.decoding.step_costs import LoadCosts, SecondsTable, StepCosts
from specheads.decoding.stopping import StoppingRule
from specheads.errors import UserError, is_number
from specheads.evaluation.report import RuleFields
from specheads.evaluation.rule_costs import Tuning
from specheads.heads.head import AcceptanceHead
from specheads.replay.replay import GROUND_TRUTH, Ceiling, RecordedHead, recorded_head

FIXED, CEILING, ORACLE = "fixed_length", "ceiling", "oracle"
TARGET, LOAD_AWARE = "target", "load-aware"  # of batches besides


@dataclass(frozen=True)
class RuleChoice:
    """A class of stopping rules and its arguments; a list holds the values to try."""

    cls: type[StoppingRule]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Candidate(RuleFields):
    """One rule with its numbers.

    `live` is None for a bound that no decoder can reach; `ratio` is None for a rule that suits all ratios.
    """

    family: str
    name: str
    rule: StoppingRule  # as it is replayed
    live: StoppingRule | None  # as it decodes; None for a bound that no decoder can reach
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ratio: str | None = None  # the cost ratio that it was fitted to; None: it suits all

    @property
    def value(self) -> float | None:
        """The first of the parameters that are numbers, for plots."""
        return next((value for value in self.parameters.values() if is_number(value)), None)

    @property
    def kind(self) -> str:
        """The kind of rule that decides its cost: its class, and its head."""
        return kind_of(self.rule, self.head)


def kind_of(rule: StoppingRule | None, head: str | None) -> str:
    """Return the name of a kind of rule; None: of decoding without a draft."""
    return type(rule).__name__ + (f" of {head}" if head else "")


# Acceptable values in place of those that are measured.
MEASURED = {"costs": LoadCosts(SecondsTable((1, 2), (1.0, 1.0)), SecondsTable((1, 2), (1.0, 1.0))), "survival": [1.0]}


@dataclass(frozen=True)
class PolicyChoice:
    """A class of policies and its arguments; `costs` and `survival` are measured."""

    cls: Callable[..., LengthPolicy]
    arguments: Mapping[str, Any] = field(default_factory=dict)


Policies = Mapping[str, PolicyChoice]
DEFAULT: Policies = {"load_aware": PolicyChoice(LoadAware)}  # of batches, if none is named


def check_policies(policies: Policies, concurrency: Sequence[int]) -> None:
    """Raise UserError for arguments that a policy refuses, and for policies where requests are decoded one at a time."""
    for name, choice in policies.items():
        try:
            choice.cls(**MEASURED, **choice.arguments)
        except UserError as error:
            raise UserError(f"stopping.{name}.{error}") from None
        except TypeError as error:
            raise UserError(f"stopping.{name} has arguments that its class does not take ({error}); see --help.") from None
    if policies and not concurrency:
        names = list(policies)
        raise UserError(
            f"stopping names {names[0]}, which decides for requests that are decoded together; say how many, for example "
            "specheads evaluate 'concurrency=[1,4,16,64]', or leave it out of stopping=."
        )


CEILING_THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]


def candidates(rules: Mapping[str, RuleChoice], heads: Mapping[str, AcceptanceHead], tuning: Tuning | None) -> list[Candidate]:
    """Return all rules with all their values, and the ceiling if the recording has the ground truth.

    Args:
        rules: by name.
        heads: by name; a rule that takes a head comes with each of them.
        tuning: None where nothing was recorded: then only rules without open parameters are possible.

    Raises:
        UserError: values that a rule refuses; open parameters without `tuning`.
    """
    tried: list[Candidate] = []
    for name, choice in rules.items():
        for head in list(heads) if takes_head(choice) else [None]:
            tried += _family(name, choice, head, heads, tuning)
    if tuning is not None and GROUND_TRUTH in tuning.recording.features:
        most = min(tuning.recording.max_tokens, max(candidate.rule.max_tokens for candidate in tried))
        tried += [
            Candidate(CEILING, f"ceiling {t:g}", Ceiling(t, most), None, {"threshold": t}, rule_name=CEILING, bound=True)
            for t in CEILING_THRESHOLDS
        ]
    return tried


def _family(
    name: str, choice: RuleChoice, head: str | None, heads: Mapping[str, AcceptanceHead], tuning: Tuning | None
) -> Iterator[Candidate]:
    """Yield a rule of the config, with a head if it takes one, with each combination of its values."""
    cls, live = choice.cls, heads[head] if head is not None else None
    recorded = None if live is None else recorded_head(live)
    title = f"{head} " if head is not None and len(heads) > 1 else ""
    first = next(iter(choice.arguments))
    choices = {key: _listed(value) for key, value in choice.arguments.items() if isinstance(value, list) or key == first}
    for values in _combinations(choices):
        automatic = "auto" in values.values()
        for ratio, arguments in _fitted(cls, {**choice.arguments, **values}, tuning, head, recorded):
            # The values that tell candidates apart, as fitted.
            shown = {key: arguments[key] for key, value in values.items() if len(choices[key]) > 1 or is_number(value)}
            label = (cls.title(name) + title + ", ".join(map(_written, shown.values()))).strip()
            yield Candidate(
                family=f"{name} {title}".strip() + (" auto" if automatic else ""),
                name=f"{label}{' (auto)' if automatic else ''}{f' at ratio {ratio}' if ratio else ''}",
                rule=_made(cls, arguments, recorded),
                live=_made(cls, arguments, live),
                parameters=shown,
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
    """Yield a rule's arguments with everything open fitted, for each ratio of costs if they matter (else for None)."""
    open_names = cls.open_parameters(arguments)
    if not open_names:
        yield None, dict(arguments)
        return
    if tuning is None:
        raise UserError(
            f"{cls.__name__} leaves {', '.join(sorted(open_names))} to be fitted on recorded dev prompts, but nothing is "
            "recorded here; give a value, or leave this rule out of stopping=."
        )
    if not open_names & cls.fitted_to_costs:
        yield None, cls.fit(arguments, tuning, head, None)
        return
    for ratio in tuning.cost_table.costs:
        yield ratio, cls.fit(arguments, tuning, head, tuning.cost_table.of_head(head_name, ratio))


def takes_head(choice: RuleChoice) -> bool:
    """Return whether a rule takes a head."""
    return choice.cls.uses_head


def check_rules(rules: Mapping[str, RuleChoice]) -> None:
    """Raise UserError for values that a rule refuses, before anything long begins; open parameters are assumed to fit."""
    for name, choice in rules.items():
        for key, value in choice.arguments.items():
            if value == []:
                raise UserError(f"stopping.{name}.{key}=[] must name at least one value; or leave the rule out of stopping=.")
        try:
            _sample_rules(choice)
        except UserError as error:
            raise UserError(f"stopping.{name}.{error}") from None
        except TypeError as error:
            raise UserError(f"stopping.{name} has arguments that its class does not take ({error}); see --help.") from None


def longest_draft(rules: Mapping[str, RuleChoice]) -> int:
    """Return the longest draft of any rule."""
    return max(rule.max_tokens for choice in rules.values() for rule in _sample_rules(choice))


class _SampleFit:
    """Acceptable values in place of a fit, while nothing is recorded."""

    mean_acceptance = 0.5

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(names, 0.0)

    def calibration(self, head: Any) -> dict[str, float]:
        return {"slope": 1.0, "intercept": 0.0}

    def auto_threshold(self, head: Any, max_tokens: int, costs: Any) -> tuple[float, float]:
        return 0.5, 0.1

    def costs_at(self, cost_ratio: float) -> StepCosts:
        return StepCosts.at_ratio(10)


def _sample_rules(choice: RuleChoice) -> list[StoppingRule]:
    """Return a rule with each combination of its values, open parameters at acceptable values."""
    cls, fit, rules = choice.cls, _SampleFit(), []
    head = RecordedHead("any", "next_token") if takes_head(choice) else None
    for arguments in _combinations({key: _listed(value) for key, value in choice.arguments.items()}):
        if open_names := cls.open_parameters(arguments):
            costs = fit.costs_at(10) if open_names & cls.fitted_to_costs else None
            arguments = cls.fit(arguments, fit, head, costs)
        rules.append(_made(cls, arguments, head))
    return rules


def _made(cls: type[StoppingRule], arguments: Mapping[str, Any], head: AcceptanceHead | RecordedHead | None) -> StoppingRule:
    return cls(**arguments, **({} if head is None else {"head": head}))


def _combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every choice of one value per name."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value).lower()
