"""The settings of an experiment: the methods that decode, what is measured of them, and the claims
that are checked on that.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, BeforeValidator, SkipValidation, model_validator

from specheads.decoding.drafting import Drafting
from specheads.decoding.records import DecodeStats
from specheads.decoding.verification import Verification
from specheads.errors import UserError
from specheads.evaluation.candidates import RuleChoice
from specheads.evaluation.settings import EngineName
from specheads.pair.sampling import Warp
from specheads.settings import (
    Built,
    Flag,
    Number,
    PositiveCount,
    PositiveNumber,
    Seed,
    Settings,
    Text,
    setting,
)


@dataclass(frozen=True)
class _Metric:
    """A ratio of sums, by the names of two columns of a tally."""

    title: str
    above: str
    below: str
    exponential: bool = False  # whether the metric is e to the power of the ratio
    timed: bool = False  # whether it depends on the machine


METRICS = {
    "tokens_per_round": _Metric("tokens per round", "num_tokens", "num_target_calls"),
    "acceptance_rate": _Metric("accepted / drafted", "num_kept", "num_drafted"),
    "accepted_per_draft_step": _Metric(
        "accepted / draft steps", "num_accepted", "num_draft_calls"
    ),  # GSD's acceptance rate
    "drafted_per_token": _Metric("drafted per token", "num_drafted", "num_tokens"),
    "drafted_per_round": _Metric("drafted per round", "num_drafted", "num_target_calls"),
    "perplexity": _Metric("perplexity", "nats", "num_tokens", exponential=True),
    "discard_rate": _Metric("discard rate", "num_discarded", "num_tokens"),
    "verification_rate": _Metric("verification rate", "num_target_calls", "num_tokens"),
    "copied_rounds": _Metric(
        "rounds with a copy", "copy_rounds", "num_target_calls"
    ),  # GSD, table 1
    "full_drafts": _Metric(
        "full drafts", "full_drafts", "num_target_calls"
    ),  # cut off by drafting.max_nodes
    "later_children": _Metric(
        "accepted later children", "later_children", "num_accepted"
    ),  # GSD, figure 7
    "in_runs": _Metric("drafted in repeated runs", "in_runs", "num_drafted"),  # GSD, figure 3
    "merge_divergence": _Metric("nats between merged", "merge_nats", "merges"),  # GSD, table 5
    "tokens_per_draft_step": _Metric("tokens per draft step", "num_tokens", "steps"),
    "tokens_per_charged_step": _Metric(
        "tokens per draft step, heads charged", "num_tokens", "charged_steps"
    ),
    "divergence": _Metric(
        "divergence of the head", "divergence", "num_predicted"
    ),  # SpecDec++, appendix C.3, in nats
    "auroc": _Metric(
        "AUROC of the head", "num_in_order", "num_pairs"
    ),  # of tokens of the same prompt
    "joules_per_token": _Metric("joules per token", "joules", "num_tokens", timed=True),
    "tokens_per_second": _Metric("tokens per second", "num_tokens", "decode_seconds", timed=True),
}


Tally = Mapping[
    str, np.ndarray
]  # what a method did: by column the numbers of the prompts (P,), NaN where not measured


def tally(entries: Iterable[Sequence[Any]], ratio: float, share: float = 0.0) -> Tally:
    """Return the columns of a method from `entries`, each response's counts, nats under the target
    and joules.

    A pass of the target takes `ratio` steps of the pair's draft. A draft step takes a `share` of
    such a pass; 0: a step of it.
    """
    rows = []
    for counts, nats, joules in entries:
        stats = DecodeStats(**counts)
        more = {
            "decode_seconds": stats.decode_seconds,
            "num_kept": (
                stats.num_drafted - stats.num_discarded
            ),  # accepted, without copies, which cost the draft nothing
            "draft_steps": 0 if share else stats.num_draft_calls,
            "target_passes": stats.num_target_calls + share * stats.num_draft_calls,
            **dict.fromkeys(
                ("head_steps", "divergence", "num_predicted", "num_in_order", "num_pairs"), math.nan
            ),
        }
        rows.append({**counts, **stats.marks, **more, "nats": nats, "joules": joules})
    names = set().union(*rows) - {"marks"}
    return priced(
        {name: np.array([row.get(name, 0) for row in rows], dtype=float) for name in names}, ratio
    )


def priced(tally: Tally, ratio: float) -> Tally:
    """Return a tally with its steps: the draft's, one for a pass however wide, `ratio` for each of
    the target's, and heads'.
    """
    steps = tally["draft_steps"] + ratio * tally["target_passes"]
    return {**tally, "steps": steps, "charged_steps": steps + tally["head_steps"]}


def sums(tally: Tally, metric: str) -> np.ndarray:
    """Return the numbers whose sums a metric divides, (2, P)."""
    unknown = np.full_like(tally["num_tokens"], np.nan)  # what a method does not count
    return np.stack(
        [tally.get(METRICS[metric].above, unknown), tally.get(METRICS[metric].below, unknown)]
    )


def samples(tally: Tally, metric: str, counts: np.ndarray) -> np.ndarray | None:
    """Return a metric (1 + R,) under each row of `counts` (1 + R, P).

    None where it does not apply, as without a draft.
    """
    above, below = sums(tally, metric) @ counts.T
    if not below.all() or np.isnan(above).any() or np.isnan(below).any():
        return None
    return np.exp(above / below) if METRICS[metric].exponential else above / below


def _metric(name: str) -> str:
    if name not in METRICS:
        raise ValueError(f"must be one of {', '.join(METRICS)}")
    return name


MetricName = Annotated[Text, AfterValidator(_metric)]
Names = Annotated[
    tuple[Text, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]


class Method(Settings):
    """How prompts are decoded under one name: the target alone (`baseline`), or drafts that are
    verified.
    """

    name: Text = setting(help="its name in tables and claims")
    baseline: Literal["target", "mjgd", "oracle"] | None = setting(
        None,
        "without a rule: target (token by token), mjgd (the most likely blocks of tokens; lossy),"
        " or if replayed oracle (drafts end before the first rejection)",
    )
    block: PositiveCount = setting(4, "tokens that mjgd decides together")
    beams: PositiveCount = setting(8, "beams of mjgd's search")
    drafting: SkipValidation[Drafting] | None = setting(None, "how tokens are proposed")
    stopping: SkipValidation[RuleChoice] | None = setting(
        None, "when a draft is long enough; null: the verification rule's rule"
    )
    verification: SkipValidation[Verification] | None = setting(
        None,
        "the rule that decides how much of a draft is kept; null: the usual rule for such drafts",
    )
    warp: Built[Warp] | None = setting(
        None, "how logits become probabilities; null: as in the whole experiment"
    )
    head: Text | None = setting(
        None, "the name of its head among those of head=; null: the only one"
    )
    keys: Mapping[str, Any] = setting({}, "the method as the experiment's file has it")

    @property
    def needs_head(self) -> bool:
        """Whether the stopping rule takes a head."""
        return self.stopping is not None and self.stopping.cls.uses_head


class Comparison(Settings):
    """A metric of a method, alone or over that of another method."""

    of: Names = setting(
        help=(
            "a method; several: the best of them, chosen on the half of the prompts that it is not"
            " compared on"
        )
    )
    over: Names = setting(
        (),
        "the method whose metric it is divided by; several: the best of them; none: the value"
        " itself",
    )


class Claim(Comparison):
    """A claim of a paper about the methods of an experiment."""

    claims: tuple[Text, ...] = setting(
        help="ids of the items of benchmarks/papers.yaml that it answers"
    )
    says: Text = setting(help="the claim in a sentence")
    metric: MetricName = setting(help="the metric that is compared")
    expected: Literal["more", "less"] = setting(help="the direction of the claim")
    than: Number | Comparison | None = setting(
        None,
        "what the metric or ratio is compared with: a number, or another ratio; null: 1 for a"
        " ratio, 0 for a value",
    )
    ratio: PositiveNumber | None = setting(
        None, "of tokens_per_draft_step: the ratio, if not that of the whole experiment"
    )
    published: Number | None = setting(
        None, "the published value of the metric or ratio, in the same form; null: none"
    )
    note: Text = setting("", "what else to know about it")

    @property
    def sides(self) -> list[tuple[str, ...]]:
        """The names of the methods on each side of what it compares."""
        return [
            self.of,
            self.over,
            *([self.than.of, self.than.over] if isinstance(self.than, Comparison) else []),
        ]

    @property
    def methods(self) -> Iterable[str]:
        """The names of the methods that it compares."""
        return chain.from_iterable(self.sides)

    @model_validator(mode="after")
    def _best_can_be_chosen(self) -> Self:
        """The best of several is chosen by a ratio of sums of which more is better."""
        if max(map(len, self.sides)) > 1 and (
            not self.over
            or isinstance(self.than, Comparison)
            or self.expected == "less"
            or METRICS[self.metric].exponential
        ):
            raise UserError(
                f"claims: {self.says!r} chooses the best of several methods; that needs a method in"
                " `over`, `expected: more`, a metric that is no perplexity, and a number or null"
                " for `than`."
            )
        return self


class Reproduction(Settings):
    """Settings of `specheads papers reproduce`."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    warp: Built[Warp] = setting(
        Warp(top_k=50), "how draft and target turn logits into probabilities"
    )
    split: Literal["dev", "test", "final"] = setting(
        "dev",
        "which prompts are decoded: dev, test, or final (of data.final_part or data.num_final), to"
        " be read once",
    )
    num_prompts: PositiveCount = setting(
        100, "prompts of that split to decode, each with every method"
    )
    max_new_tokens: PositiveCount = setting(
        512, "longest response, in tokens", config="${data.max_new_tokens}"
    )
    head: Text | None = setting(
        None,
        "for rules with a head: a folder or hub id, latest (the newest of this pair in"
        " paths.outputs), or null for none",
    )
    ratio: PositiveNumber = setting(
        4.8,
        "draft steps that a forward pass of the target takes, for tokens_per_draft_step;"
        " SpecDec++'s pair measured 4.8",
    )
    replay: Flag = setting(
        False,
        "replay chains under token verification from a recording of the prompts in place of"
        " decoding",
    )
    speeds: Flag = setting(
        True,
        "report measured speeds; false: leave them and the claims on them out, on a machine that is"
        " busy",
    )
    engine: EngineName = setting(
        "auto", "how models are run: auto (the fastest here), eager, compiled or cuda_graph"
    )
    methods: tuple[Method, ...] = setting(
        (),
        "the methods that decode; each has a name and baseline, or names of conf/drafting,"
        " conf/stopping, conf/verification",
    )
    claims: tuple[Claim, ...] = setting(
        (), "the claims that are checked, each on a metric of the methods"
    )

    @model_validator(mode="after")
    def _claims_are_about_the_methods(self) -> Self:
        names = [method.name for method in self.methods]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise UserError(f"methods names {repeated[0]!r} twice; give every method another name.")
        for claim in self.claims:
            if unknown := [name for name in claim.methods if name not in names]:
                raise UserError(
                    f"claims: {claim.says!r} names the method {unknown[0]!r}; use some of"
                    f" {', '.join(names)}."
                )
        return self

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, without speed if that is left out."""
        return [name for name, metric in METRICS.items() if self.speeds or not metric.timed]
