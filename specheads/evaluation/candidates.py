"""Every rule with every value that is to be tried, from conf/stopping: as it decodes, and as it is replayed.

A list in a rule's config is a choice of values. What a rule leaves open (null) is fitted here, on the recording of dev prompts: the
weights of a logistic, the calibration of a head, the costs that a rule reckons with.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from specheads.decoding.stopping import ExpectedThroughput, Logistic
from specheads.errors import UserError, is_number
from specheads.evaluation.candidate import CEILING, Candidate, RuleChoice
from specheads.evaluation.tuning import Tuning
from specheads.heads.head import AcceptanceHead
from specheads.replay.cost import Costs
from specheads.replay.replay import GROUND_TRUTH, Ceiling, RecordedHead, recorded_head

CEILING_THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]
TITLES = {"fixed_length": "fixed K=", "head_threshold": "head "}  # others go by their file's name


def candidates(
    stopping: Mapping[str, RuleChoice], heads: Mapping[str, AcceptanceHead], tuning: Tuning | None
) -> list[Candidate]:
    """Return all rules with all of their values, and the ceiling where it was recorded.

    Args:
        stopping: the rules by name.
        heads: by name; rules that take a head come with each of them.
        tuning: None where nothing was recorded: then only rules that leave nothing open.

    Raises:
        UserError: values that a rule refuses; open parameters without `tuning`.
    """
    found = []
    for name, choice in stopping.items():
        if not takes_head(choice):
            found += _variants(name, choice.cls, choice.arguments, tuning)
        for head_name, head in heads.items() if takes_head(choice) else ():
            found += _variants(name, choice.cls, choice.arguments, tuning, head_name, head, several=len(heads) > 1)
    if tuning is not None and GROUND_TRUTH in tuning.recording.features:
        most = min(tuning.recording.max_tokens, max(one.rule.max_tokens for one in found))
        found += [Candidate(CEILING, f"ceiling {t:g}", Ceiling(t, most), None, {"threshold": t}) for t in CEILING_THRESHOLDS]
    return found


def _variants(
    name: str,
    cls: type,
    arguments: Mapping[str, Any],
    tuning: Tuning | None,
    head_name: str | None = None,
    head: AcceptanceHead | None = None,
    several: bool = False,
) -> Iterator[Candidate]:
    """Yield a rule with each combination of its values."""
    first = next(iter(arguments))
    choices = {
        key: value if isinstance(value, list) else [value]
        for key, value in arguments.items()
        if isinstance(value, list) or key == first
    }
    family = f"{name} {head_name}" if several else name
    title = TITLES.get(name, f"{name.replace('_', ' ')} ") + (f"{head_name} " if several else "")
    for values in itertools.product(*choices.values()):
        swept = dict(zip(choices, values, strict=True))
        for ratio, own in _settled(cls, {**arguments, **swept}, tuning, head_name, recorded_head(head) if head else None):
            shown = {key: value for key, value in swept.items() if len(choices[key]) > 1 or is_number(value)}
            automatic = swept.get("threshold") == "auto"
            label = title + ", ".join(
                _shown(own.get(key, value) if key == "threshold" else value) for key, value in shown.items()
            )
            label = f"{label.strip()}{' (auto)' if automatic else ''}{f' at ratio {ratio}' if ratio else ''}"
            given = [{"head": each} for each in (recorded_head(head), head)] if head else [{}, {}]
            rule, live = (cls(**own, **more) for more in given)
            parameters = {key: own.get(key, value) for key, value in shown.items()}
            yield Candidate(f"{family} auto" if automatic else family, label, rule, live, parameters, ratio, head_name)


def _settled(
    cls: type, arguments: dict[str, Any], tuning: Tuning | None, head_name: str | None, head: RecordedHead | None
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield a rule's arguments with everything open fitted, for each ratio of costs where they matter (else for None)."""
    if issubclass(cls, Logistic) and None in (arguments.get("weights") or {"": None}).values():
        _need(tuning, cls, "weights")
        arguments = arguments | {"weights": tuning.logistic(list(arguments["weights"]))}
    depends = [key for key in ("cost_ratio",) if key in arguments and arguments[key] is None]
    if arguments.get("threshold") == "auto":
        depends.append("threshold")
    if not depends:
        if issubclass(cls, ExpectedThroughput) and None in arguments.values():
            _need(tuning, cls, "what is null")
            arguments = arguments | _expectations(arguments, tuning, head, Costs.at_ratio(arguments["cost_ratio"]))
        yield None, arguments
        return
    _need(tuning, cls, depends[0])
    for ratio in tuning.cost_table.costs:
        own, costs = dict(arguments), tuning.cost_table.of_head(head_name, ratio)
        if "cost_ratio" in depends:
            own["cost_ratio"] = costs.target_seconds / (costs.draft_seconds + costs.verified_seconds)
        if "threshold" in depends:
            own["threshold"], _ = tuning.auto_threshold(head, own["max_tokens"], costs)
        if issubclass(cls, ExpectedThroughput):
            own |= _expectations(own, tuning, head, costs)
        yield ratio, own


def _expectations(own: Mapping[str, Any], tuning: Tuning, head: RecordedHead, costs: Costs) -> dict[str, float]:
    """Return what ExpectedThroughput leaves open."""
    fitted = tuning.calibration(head) | {"mean_acceptance": tuning.mean_acceptance}
    _, fitted["throughput"] = tuning.auto_threshold(head, own["max_tokens"], costs)
    return {key: value for key, value in fitted.items() if own.get(key) is None}


def _need(tuning: Tuning | None, cls: type, key: str) -> None:
    if tuning is None:
        raise UserError(
            f"{cls.__name__} leaves {key} to be fitted on recorded dev prompts, but nothing is recorded here; give it a value, "
            "or leave this rule out of stopping=."
        )


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value).lower()


def check_rules(stopping: Mapping[str, RuleChoice]) -> None:
    """Raise UserError for values that a rule refuses, before anything long begins; what is open is taken to fit."""
    for name, choice in stopping.items():
        arguments = {key: value if isinstance(value, list) else [value] for key, value in choice.arguments.items()}
        if empty := [key for key, values in arguments.items() if not values]:
            raise UserError(f"stopping.{name}.{empty[0]}=[] names no value; give some, or leave the rule out of stopping=.")
        for values in itertools.product(*arguments.values()):
            given = {key: value for key, value in zip(arguments, values, strict=True) if value is not None and value != "auto"}
            if isinstance(given.get("weights"), Mapping):
                given["weights"] = {key: 0.0 if weight is None else weight for key, weight in given["weights"].items()}
            head = {"head": RecordedHead("any", "next_token")} if takes_head(choice) else {}
            try:
                choice.cls(**given, **head)
            except UserError as error:
                raise UserError(f"stopping.{name}: {error}") from None
            except TypeError as error:
                raise UserError(f"stopping.{name} has arguments that its class does not take ({error}); see --help.") from None


def takes_head(choice: RuleChoice) -> bool:
    """Whether a rule's class wants a head."""
    return "head" in inspect.signature(choice.cls).parameters


def longest_draft(stopping: Mapping[str, RuleChoice]) -> int:
    """Return the longest draft of any rule."""
    values = [choice.arguments.get(key) for choice in stopping.values() for key in ("max_tokens", "num_tokens", "arms")]
    return max(_numbers(values))


def _numbers(value: Any) -> Iterator[int]:
    """Yield the numbers in lists of lists."""
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif value is not None:
        yield value
