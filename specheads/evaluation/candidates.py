"""The stopping rules of conf/stopping, and every rule with every value that is to be tried: a list is a choice of values."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from specheads.decoding.step_costs import StepCosts
from specheads.decoding.stopping import FixedLength, StoppingRule
from specheads.decoding.verification import BlockVerification, VerificationRule
from specheads.errors import UserError, is_number
from specheads.evaluation.report import RuleFields
from specheads.evaluation.rule_costs import Tuning
from specheads.heads.head import AcceptanceHead
from specheads.replay.replay import GROUND_TRUTH, Ceiling, RecordedHead, recorded_head

FIXED, CEILING, ORACLE = "fixed_length", "ceiling", "oracle"
TARGET = "target"
OF_VERIFICATION = "of_verification"  # the family of a verification rule's own stopping rule
CEILING_THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]
MADE_UP_FIT = SimpleNamespace(  # acceptable values in place of those that are fitted, while nothing is recorded
    logistic=lambda names: dict.fromkeys(names, 0.0), auto_threshold=lambda head, max_tokens, costs: 0.5
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
        head, rules = RecordedHead("any", "next_token") if cls.uses_head else None, []
        for arguments in _combinations({key: _listed(value) for key, value in self.arguments.items()}):
            if open_names := cls.open_parameters(arguments):
                costs = StepCosts.at_ratio(10) if open_names & cls.fitted_to_costs else None
                arguments = cls.fit(arguments, MADE_UP_FIT, head, costs)
            rules.append(_made(cls, arguments, head))
        return rules


Rules = Mapping[str, RuleChoice]


def check_rules(choices: Rules) -> None:
    """Raise UserError for values that a rule refuses, before anything long begins."""
    for name, choice in choices.items():
        if empty := [key for key, value in choice.arguments.items() if value == []]:
            raise UserError(f"stopping.{name}.{empty[0]}=[] must name at least one value; or leave the rule out of stopping=.")
        try:
            choice.samples()
        except UserError as error:
            raise UserError(f"stopping.{name}.{error}") from None
        except TypeError as error:
            raise UserError(f"stopping.{name} has arguments that its class does not take ({error}); see --help.") from None


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

    @property
    def value(self) -> float | None:
        """The first of the parameters that are numbers, for plots."""
        return next((value for value in self.parameters.values() if is_number(value)), None)

    @property
    def step_kind(self) -> str:
        """The name of what decides the cost of its draft steps: its class, and its head."""
        return type(self.rule or self.live).__name__ + (f" of {self.head}" if self.head else "")

    @property
    def kind(self) -> str:
        """The name of everything that decides its cost: that of its draft steps, and another verification rule."""
        return self.step_kind + (f" under {self.verification.label}" if self.verification else "")


TARGET_ALONE = Candidate(TARGET, "target alone", None, None, {"num_tokens": 0})
ORACLE_BOUND = Candidate(ORACLE, ORACLE, None, None, rule_name=ORACLE, bound=True)  # it knows every outcome


def fixed_length(length: int) -> Candidate:
    """Return a fixed length."""
    rule = FixedLength(length)
    return Candidate(FIXED, f"fixed K={length}", rule, rule, {"num_tokens": length}, rule_name=FIXED)


def sweep_settings(rules: Sequence[Candidate], of_verification: StoppingRule | None = None) -> list[Candidate]:
    """Return the target alone, every candidate that can decode, and the verification rule's own stopping rule."""
    settings = [TARGET_ALONE, *(rule for rule in rules if rule.live is not None)]
    if of_verification is not None:
        name = str(of_verification.compile_key).replace("_", " ")
        settings.append(Candidate(OF_VERIFICATION, name, of_verification, of_verification, {"num_tokens": 0}))
    return settings


def under_block(settings: Sequence[Candidate]) -> list[Candidate]:
    """Return the settings that draft, under block verification."""
    rule = BlockVerification()
    return [
        replace(setting, family=rule.name, name=f"{setting.name}, {rule.label}", verification=rule)
        for setting in settings
        if setting.live is not None
    ]


def candidates(rules: Rules, heads: Mapping[str, AcceptanceHead], tuning: Tuning | None) -> list[Candidate]:
    """Return all rules with all their values and with each head, and the ceiling if the recording has the ground truth.

    Without `tuning` nothing was recorded. Raises UserError for values that a rule refuses, and for open parameters without it.
    """
    tried: list[Candidate] = []
    for name, choice in rules.items():
        for head in list(heads) if choice.cls.uses_head else [None]:
            tried += _family(name, choice, head, heads, tuning)
    if tuning is not None and GROUND_TRUTH in tuning.recording.features:
        most = min(tuning.recording.max_tokens, max(candidate.rule.max_tokens for candidate in tried if candidate.rule))
        tried += [
            Candidate(CEILING, f"ceiling {t:g}", Ceiling(t, most), None, {"threshold": t}, rule_name=CEILING, bound=True)
            for t in CEILING_THRESHOLDS
        ]
    return tried


def _family(
    name: str, choice: RuleChoice, head: str | None, heads: Mapping[str, AcceptanceHead], tuning: Tuning | None
) -> Iterator[Candidate]:
    """Yield a rule with one head, or without one, with all of its values; `auto` ones are a family by themselves."""
    cls = choice.cls
    live = None if head is None else heads[head]
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
    cls: type[StoppingRule], arguments: Mapping[str, Any], tuning: Tuning | None, head_name: str | None, head: RecordedHead | None
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield a rule's arguments with everything open fitted, for each ratio of costs if they matter (else for None)."""
    open_names = cls.open_parameters(arguments)
    if not open_names:
        yield None, dict(arguments)
    elif tuning is None:
        raise UserError(
            f"{cls.__name__} leaves {', '.join(sorted(open_names))} to be fitted on recorded dev prompts, but nothing is "
            "recorded here; give a value, or leave this rule out of stopping=."
        )
    elif open_names & cls.fitted_to_costs:
        for ratio in tuning.cost_table.costs:
            yield ratio, cls.fit(arguments, tuning, head, tuning.cost_table.of_head(head_name, ratio))
    else:
        yield None, cls.fit(arguments, tuning, head, None)


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
