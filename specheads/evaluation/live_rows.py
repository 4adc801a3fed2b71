"""What was decoded, as rows of a report."""

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import StepCosts
from specheads.errors import UserError
from specheads.evaluation.candidates import FIXED, TARGET_ALONE, Candidate
from specheads.evaluation.intervals import (
    Groups,
    Interval,
    cross_fitted_gain,
    interval,
    milliseconds,
    numbered,
    resample_counts,
    sums,
)
from specheads.evaluation.report import MEASURED, LiveRow, QualityRow, rule_fields
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import Measured
from specheads.forecast import progress
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS, batches_of_tokens, right_padded, slices
from specheads.pair.sampling import nan_message
from specheads.prompts.prompt import SCORES

logger = logging.getLogger(__name__)


def live_rows(
    measured: Sequence[Measured],
    cost_table: CostTable,
    lossless: bool,
    replayed: Mapping[str, float] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> list[LiveRow]:
    """Return a row for every setting that was decoded; the first setting is the target alone.

    Args:
        cost_table: the costs of rules at every ratio, the measured one among them.
        lossless: whether the sweep's verification rule is lossless.
        replayed: by setting, tokens per second from replayed counts of the same prompts.
        groups: the group of each prompt; None: each prompt is a group by itself.
    """
    resamples = resample_counts(groups or len(measured[0].stats))
    totals = [sums(each.stats, resamples) for each in measured]
    alone = totals[0].tokens_per_second
    plain = {
        id(each.setting.live): total for each, total in zip(measured, totals, strict=True) if each.setting.verification is None
    }
    rows = []
    for each, total in zip(measured, totals, strict=True):
        setting, other, predicted, speedups = each.setting, each.setting.verification, None, {}
        if setting.live is not None:
            halves = cost_table.for_prompts(setting, len(each.stats))
            predicted = float(_predicted_speed(each, halves, resamples)[0])
            for ratio in cost_table.costs:
                speed = _predicted_speed(each, [cost_table.of(setting, ratio)] * len(each.stats), resamples)
                speedups[ratio] = interval(speed / (cost_table.alone if ratio == MEASURED else 1.0))
        expected = [part.num_expected for part in each.stats]
        row = LiveRow(
            name=setting.name,
            family=setting.family,
            value=setting.value,
            tokens_per_second=interval(total.tokens_per_second),
            speedup=interval(total.tokens_per_second / alone),
            **total.rates(),
            milliseconds=milliseconds(each.token_seconds),
            predicted_tokens_per_second=predicted,
            replayed_tokens_per_second=(replayed or {}).get(setting.name),
            predicted_speedup=speedups,
            lossless=setting.is_lossless(lossless),
            efficiency_gain=interval(plain[id(setting.live)].verification_rate / total.verification_rate) if other else None,
            verification=other.name if other else None,
            **rule_fields(setting),
            accepted_over_expected=_ratio([part.num_accepted for part in each.stats], expected, resamples)
            if DecodeStats.total(each.stats).num_expected
            else None,
        )
        rows.append(row)
    return rows


def _predicted_speed(measured: Measured, costs: Sequence[StepCosts], resamples: np.ndarray) -> np.ndarray:
    """Return the tokens per second (1 + R,) that costs, one for each prompt, predict from a decoded setting's counts."""
    seconds = {cost: measured.predicted_seconds(cost) for cost in dict.fromkeys(costs)}
    by_prompt = np.array([seconds[cost][prompt] for prompt, cost in enumerate(costs)])
    return (resamples @ np.array([part.num_tokens for part in measured.stats], dtype=float)) / (resamples @ by_prompt)


def gain_over_fixed(
    measured: Sequence[Measured], costs_of: Callable[[Candidate], StepCosts], groups: Groups | None = None
) -> Interval | None:
    """Return the head's predicted throughput over that of the best fixed length, as a ratio; None without settings of both kinds.

    `costs_of` returns the costs of a setting's rule; `groups` are those of the prompts; None: each prompt is a group by itself.
    """
    groups = len(measured[0].stats) if groups is None else groups
    families: list[list[Any]] = [[], []]  # of fixed lengths and of heads, the tokens and seconds of each prompt
    for each in measured:
        setting = each.setting
        if setting.verification is None and (setting.rule_name == FIXED or setting.head is not None):
            numbers = [part.num_tokens for part in each.stats], each.predicted_seconds(costs_of(setting))
            families[setting.head is not None].append(numbers)
    if not all(families) or len(set(numbered(groups))) < 4:
        return None
    fixed, head = (np.array(family, dtype=float) for family in families)
    return cross_fitted_gain(head, fixed, groups)


@dataclass(frozen=True)
class ResponseQuality:
    """The responses of one setting, by prompt and repeat (P, R)."""

    nats: np.ndarray  # the negative log-likelihood of each response under the target
    lengths: np.ndarray  # in tokens
    scores: Mapping[int, float] = field(default_factory=dict)  # the mean of each prompt with a response in the data set

    @property
    def mean_log_likelihood(self) -> np.ndarray:
        """The mean log-likelihood per token of each response (P, R), in nats."""
        return -self.nats / self.lengths

    def win_rate(self, other: "ResponseQuality", resamples: np.ndarray) -> Interval:
        """Return the share of prompts on which these responses have the larger mean log-likelihood; ties count half.

        The repeats of a prompt are compared one by one, and share its weight. Yin et al. 2024 compare lossy rules by win rates,
        too, but a reward model decides who wins; here it is the likelihood under the target.
        """
        one_by_one = np.sign(self.mean_log_likelihood - other.mean_log_likelihood)
        return _ratio((1 + one_by_one.mean(axis=1)) / 2, np.ones(len(one_by_one)), resamples)


def response_quality(setup: Setup, measured: Sequence[Measured]) -> dict[str, ResponseQuality]:
    """Return the quality of every setting's responses, by its name: one more forward pass of the target over each response."""
    prompts, pair = setup.prompts.decoded.prompts, setup.pair
    score = SCORES[setup.prompt_data.score] if setup.prompt_data.score else None
    nats = []  # by prompt (settings, R)
    logger.info("quality: the target reads the responses to %d prompts once more", len(prompts))
    with progress("reading responses", len(prompts)) as advance:
        for number, (_, ids) in enumerate(prompts):
            responses = [response for decoded in measured for response in decoded.responses[number]]
            nats.append(np.reshape(response_nats(pair.target_lm, ids, responses), (len(measured), -1)))
            advance(1)
    quality = {}
    for setting, decoded in enumerate(measured):
        scores = {
            number: float(np.mean([score(pair.decode(response), prompt.response) for response in decoded.responses[number]]))
            for number, (prompt, _) in enumerate(prompts)
            if score is not None and prompt.response is not None
        }
        lengths = np.array([[len(response) for response in of_prompt] for of_prompt in decoded.responses])
        quality[decoded.setting.name] = ResponseQuality(np.stack([each[setting] for each in nats]), lengths, scores)
    return quality


@torch.no_grad()
def response_nats(lm: LanguageModel, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[float]:
    """Return the negative log-likelihood of each response to a prompt, in nats; equal responses have equal ones."""
    known: dict[tuple[int, ...], float] = {}
    different = list(dict.fromkeys(map(tuple, responses)))
    texts = [[*prompt, *response] for response in different]
    for batch in batches_of_tokens([len(text) for text in texts], BATCH_TOKENS):
        # The last token is read by nobody.
        hidden = lm.hidden_states(right_padded([texts[row][:-1] for row in batch]).to(lm.device), use_cache=False)
        for states, row in zip(hidden, batch, strict=True):
            tokens = torch.tensor(different[row], device=lm.device)
            after = states[len(prompt) - 1 :][: len(tokens)]
            known[different[row]] = sum(
                cross_entropy(lm.logits(after[piece]), tokens[piece], reduction="sum").item()
                for piece in slices(len(tokens), lm.vocab_size, SLICE_ELEMENTS)
            )
    if any(map(math.isnan, known.values())):
        raise UserError(nan_message(lm.name))
    return [known[tuple(response)] for response in responses]


def with_quality(
    rows: Sequence[LiveRow],
    measured: Sequence[Measured],
    responses: Mapping[str, ResponseQuality],
    groups: Sequence[Hashable],
) -> list[LiveRow]:
    """Return the rows with the quality of their responses, where it was measured.

    Every setting is compared with the target alone, and a lossy one also with the lossy ones before it that stop drafting by the
    same rule.
    """
    if not responses:
        return list(rows)
    resamples = resample_counts(groups)
    new: list[LiveRow] = []
    for row, decoded in zip(rows, measured, strict=True):
        setting, ours = decoded.setting, responses[row.name]
        rivals = [
            earlier.name
            for earlier, other in zip(new, measured, strict=False)
            if not row.lossless and not earlier.lossless and other.setting.live is setting.live is not None
        ]
        references = [] if setting == TARGET_ALONE else [TARGET_ALONE.name, *rivals]
        tokens = np.array([stats.num_tokens for stats in decoded.stats])
        rejections = np.array([stats.num_rejections for stats in decoded.stats])
        numbers, scores = list(ours.scores), list(ours.scores.values())
        quality = QualityRow(
            perplexity=interval(np.exp((resamples @ ours.nats.sum(axis=1)) / (resamples @ tokens))),
            rejections_per_token=None if setting.live is None else _ratio(rejections, tokens, resamples),
            win_rates={name: ours.win_rate(responses[name], resamples) for name in references},
            score=_ratio(scores, np.ones(len(scores)), resamples[:, numbers]) if scores else None,
        )
        new.append(replace(row, quality=quality))
    return new


def _ratio(over: Sequence[float] | np.ndarray, under: Any, resamples: np.ndarray) -> Interval:
    """Return a ratio of sums over prompts, of columns (P,); 0 in resamples where both are 0."""
    return interval((resamples @ np.asarray(over)) / np.maximum(resamples @ np.asarray(under), 1e-12))
