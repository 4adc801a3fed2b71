"""The report of an evaluation as frozen records: the content of `report.json` (its schema is in
report.schema.json).

Speed-ups are over the target alone. A *ratio* is the cost of the target's forward pass in draft
steps: `measured` on this machine, or a number such as `10`. At `10` a forward pass of the target
costs 1, a draft step 1/10, a head its share of a draft step, and the verification of more drafted
tokens nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.evaluation.keys import Kind
from specheads.replay.information import Information
from specheads.replay.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class RuleFields:
    """What kind of rule a candidate or a result is of: families and names are titles for readers,
    and decide nothing.
    """

    rule_name: str = ""  # the name of its config; empty for what has none
    head: str | None = None  # the name of its head
    automatic: bool = False  # whether a value was chosen as `auto`
    bound: bool = False  # whether it uses knowledge that no decoder has
    parameters: Mapping[str, object] = field(default_factory=dict)  # those that are swept


def rule_fields(rule: RuleFields) -> dict[str, Any]:
    """Return the values of RuleFields, to make another one with them."""
    return {each.name: getattr(rule, each.name) for each in fields(RuleFields)}


@dataclass(frozen=True)
class LiveRow(RuleFields):
    """One setting that was decoded.

    Speeds are in tokens per second and leave out reading the prompts; latencies are in milliseconds
    per token.
    """

    name: str
    family: str
    tokens_per_second: Interval
    speedup: Interval
    discard_rate: Interval
    verification_rate: Interval
    block_efficiency: float
    acceptance_rate: float | None
    milliseconds: Mapping[str, float]  # p50, p90, p99
    # From replayed counts and the measured costs of steps; None where it was not replayed.
    replayed_tokens_per_second: float | None
    lossless: bool  # whether the output follows the target's distribution
    verification: str | None = None  # the name of its verification rule; None: that of the sweep
    # Accepted tokens over those that the rule expected, 1 if its predictions hold here; None where
    # it expects no number.
    accepted_over_expected: Interval | None = None
    # Speed over that of the best fixed length, a ratio; None where none was decoded
    gain: Interval | None = None
    # The same over the best setting without a head; None without a head
    over_headless: Interval | None = None
    # Under another verification, the name of the same rule under that of the evaluation, and the
    # ratio of their speeds by the counts of decoded rounds at the measured costs of steps
    same_rule: str | None = None
    over_same_rule: Interval | None = None


@dataclass(frozen=True)
class BatchRow(RuleFields):
    """One setting that decoded requests in batches of one size.

    Milliseconds are percentiles by level (p50, p90, p99): `token_ms` of each emitted token, with
    those of a round shared equally among its tokens; `first_token_ms` from the moment that a
    request gets a row to its first tokens.
    """

    name: str
    family: str
    lossless: bool
    # All requests together, in a whole run with the reading of prompts; the median over repeats
    tokens_per_second: float
    over_alone: (
        float  # the same over that of the target alone in the same repeat, the median over repeats
    )
    request_tokens_per_second: (
        float  # a request's from the moment that it gets a row, the median over requests
    )
    speedup: Interval  # tokens per second in a row over those of the target alone
    token_ms: Mapping[str, float]
    first_token_ms: Mapping[str, float]
    tokens_per_round: float  # a request's


@dataclass(frozen=True)
class BatchTable:
    """All settings that decoded requests in batches of one size."""

    concurrency: int  # rows
    num_requests: int  # prompts, those that were repeated with other seeds too
    rows: Sequence[BatchRow]


@dataclass(frozen=True)
class RuleRow(RuleFields):
    """One stopping rule with one set of parameters, replayed on one data set."""

    # The best of a family is chosen; named like a file in conf/stopping, and the head where there
    # are several
    family: str
    name: str
    discard_rate: Interval
    verification_rate: Interval
    block_efficiency: float
    acceptance_rate: float | None
    speedup: Mapping[str, Interval]  # the key is the ratio; only those that the rule is meant for


@dataclass(frozen=True)
class Winner(RuleFields):
    """The best rule of a family at one ratio, chosen on dev prompts, and its speed-up on a data
    set.
    """

    family: str
    name: str
    ratio: str
    speedup: Interval
    gain: Interval  # speed-up over that of the best fixed length, a ratio
    # Share of the way from the best fixed length to the informed ceiling
    gap_ceiling: Interval | None
    dev_speedup: float = 0.0  # the speed-up on dev prompts, by which families are compared
    head_share: float | None = (
        None  # the cost of its head as a share of a draft step; the speed-up counts it
    )
    gain_uncharged: Interval | None = None  # excluding head overhead; None without a head
    over_headless: Interval | None = (
        None  # speed-up over that of the best rule without a head; None without a head
    )


@dataclass(frozen=True)
class Reliability:
    """How often tokens were accepted, by their predicted probability: per bin its share of tokens,
    mean prediction, mean outcome.

    A token counts once for every index that it can have in a round.
    """

    predictor: str  # a head, or one of the draft's own probabilities
    share: Sequence[float]
    predicted: Sequence[float]
    observed: Sequence[float]
    ece: float
    auroc: float


@dataclass(frozen=True)
class TextSample:
    """A response in pieces, as one rule's rounds made it, each with its outcome.

    Kinds: `accepted` (drafted and kept), `rejected` (drafted and thrown away; not part of the
    response), `target` (emitted by the target).
    """

    rule: str
    prompt: str
    pieces: Sequence[tuple[str, str]]  # (kind, text)


@dataclass(frozen=True)
class DataSet:
    """The replayed rules on one set of prompts."""

    name: str
    role: str  # dev: rules were tuned on it; test: they were not
    num_prompts: int
    num_tokens: int  # tokens of recorded responses
    num_samples: int  # acceptance samples per response
    rules: Sequence[RuleRow]
    winners: Sequence[Winner]
    reliability: Sequence[Reliability] = field(default_factory=list)
    information: Information | None = (
        None  # None where the true acceptance probabilities are not recorded
    )


@dataclass(frozen=True)
class ComparedSetting:
    """One setting to compare, on the reported prompts."""

    name: str
    speedup: Interval
    gain: Interval | None  # over the best fixed length, a ratio; None where there is none
    parameters: Mapping[str, object] = field(default_factory=dict)  # those that are swept


@dataclass(frozen=True)
class Comparison:
    """What to use at one cost ratio, next to the fastest setting of each kind on dev prompts."""

    ratio: str
    use: Kind
    choices: Mapping[Kind, ComparedSetting]
    fastest: Kind  # on dev prompts
    # Of the fastest over what is used, on the reported prompts; None where they are the same
    over_used: Interval | None = None

    @property
    def setting(self) -> ComparedSetting:
        """The setting to use."""
        return self.choices[self.use]

    @property
    def is_tie(self) -> bool:
        """Whether another setting was faster on dev prompts, but not clearly, and needs more."""
        return self.fastest != self.use


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an answer rests on."""

    method: Literal["replay", "decoding"]
    prompts: str  # the name of their set
    split: str | None
    num_prompts: int
    num_dev_prompts: int  # on which the setting was chosen; 0: on the reported prompts themselves
    machine: str  # the device, with its threads and instruction set
    costs: Literal["timed", "counted"]  # how seconds of steps are known
    ratio: Interval | None  # draft steps that a forward pass of the target costs, as timed


@dataclass(frozen=True)
class Answer:
    """The answer of an evaluation: every place that names a setting to use reads it."""

    setting: str  # the name of the setting to use
    kind: Kind
    speedup: Interval
    gain: Interval | None  # over the best fixed length, a ratio
    is_tie: bool  # whether it is the simplest of those that are not clearly slower than the fastest
    comparison: Comparison
    evidence: Evidence
    others: Sequence[Comparison] = ()  # at the other cost ratios, by replay
    # The setting as it was decoded, and as it was under another verification rule that is clearly
    # faster; None where it was not
    decoded: LiveRow | None = None
    under_verification: LiveRow | None = None
    # Where decoded and predicted speeds differ by more than their intervals
    disagreements: Sequence[str] = ()
    doubts: Sequence[str] = ()  # why timing was unreliable
    command: str | None = None  # decodes with the setting; None for the target alone
    python: str | None = None  # decodes with it

    @property
    def changes(self) -> list[Comparison]:
        """Those at other cost ratios at which another kind of setting is to be used."""
        return [other for other in self.others if other.use != self.kind]


@dataclass(frozen=True)
class Report:
    """A whole evaluation."""

    context: Mapping[str, object]
    steps: StepTimes | None  # what steps cost here; None where they were not timed
    # Why live figures are unreliable; empty if they are not
    doubts: Sequence[str] = field(default_factory=list)
    live: Sequence[LiveRow] = field(default_factory=list)
    data_sets: Sequence[DataSet] = field(default_factory=list)
    # Empty unless numbers of rows were asked for
    batches: Sequence[BatchTable] = field(default_factory=list)
    # Texts of the first set of test prompts
    texts: Sequence[TextSample] = field(default_factory=list)
    answer: Answer | None = None  # None where nothing was replayed or decoded
    # What the reader should know, such as that a simple rule beats the head
    notes: Sequence[str] = field(default_factory=list)
    # Draft steps that a forward pass of the target costs here; None where steps were not timed
    ratio: Interval | None = None
    # Where decoded and predicted speeds differ by more than their intervals
    disagreements: Sequence[str] = field(default_factory=list)

    @property
    def is_unreliable(self) -> bool:
        """Whether decoded speeds are those of a busy machine, or not what a recording predicts."""
        return bool(self.doubts or self.disagreements)

    @property
    def costs(self) -> StepCosts | None:
        """The measured costs that are common to all rules."""
        return None if self.steps is None else self.steps.costs
