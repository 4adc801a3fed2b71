"""What was decoded, as rows of a report."""

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from specheads.decoding.step_costs import StepCosts
from specheads.errors import UserError
from specheads.evaluation.candidates import FIXED, Candidate
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
        known = None not in expected and any(expected)
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
            lossless=setting.live is None or (other.lossless if other else lossless),
            efficiency_gain=interval(plain[id(setting.live)].verification_rate / total.verification_rate) if other else None,
            verification=other.name if other else None,
            **rule_fields(setting),
            accepted_over_expected=_ratio([part.num_accepted for part in each.stats], expected, resamples) if known else None,
        )
        rows.append(row)
    return rows


def _predicted_speed(measured: Measured, costs: Sequence[StepCosts], resamples: np.ndarray) -> np.ndarray:
    """Return the tokens per second (1 + R,) that costs, one for each prompt, predict from a decoded setting's counts."""
    seconds = {cost: measured.predicted_seconds(cost) for cost in dict.fromkeys(costs)}
    by_prompt = np.array([seconds[cost][prompt] for prompt, cost in enumerate(costs)])
    return (resamples @ np.array([part.num_tokens for part in measured.stats], dtype=float)) / (resamples @ by_prompt)


def gain_over_fixed(measured: Sequence[Measured], costs_of: Callable[[Candidate], StepCosts], groups: Groups) -> Interval | None:
    """Return the head's predicted throughput over that of the best fixed length, as a ratio; None without settings of both kinds.

    `costs_of` returns the costs of a setting's rule.
    """
    families: list[list[Any]] = [[], []]  # fixed lengths and heads: the tokens and seconds of each prompt
    for each in measured:
        setting = each.setting
        if setting.verification is None and (setting.rule_name == FIXED or setting.head is not None):
            numbers = [part.num_tokens for part in each.stats], each.predicted_seconds(costs_of(setting))
            families[setting.head is not None].append(numbers)
    if not all(families) or len(set(numbered(groups))) < 4:
        return None
    fixed, head = (np.array(family, dtype=float) for family in families)
    return cross_fitted_gain(head, fixed, groups)


def qualities(setup: Setup, measured: Sequence[Measured]) -> list[QualityRow]:
    """Return the quality of every setting's responses: the target reads each once more, in one forward pass."""
    decoded, pair = setup.prompts.decoded, setup.pair
    score = SCORES[setup.prompt_data.score] if setup.prompt_data.score else None
    nats = np.zeros((len(measured), len(decoded.prompts)))
    logger.info("quality: the target reads the responses to %d prompts once more", len(decoded.prompts))
    with progress("reading responses", len(decoded.prompts)) as advance:
        for number, (_, ids) in enumerate(decoded.prompts):
            responses = [response for each in measured for response in each.responses[number]]
            nats[:, number] = np.reshape(response_nats(pair.target_lm, ids, responses), (len(measured), -1)).sum(axis=1)
            advance(1)
    references = {number: prompt.response for number, (prompt, _) in enumerate(decoded.prompts) if prompt.response is not None}
    resamples, rows = resample_counts(decoded.groups), list[QualityRow]()
    for each, of_setting in zip(measured, nats, strict=True):
        tokens = np.array([stats.num_tokens for stats in each.stats])
        rejections = np.array([stats.num_rejections for stats in each.stats])
        row = QualityRow(
            perplexity=interval(np.exp((resamples @ of_setting) / (resamples @ tokens))),
            rejections_per_token=None if each.setting.live is None else _ratio(rejections, tokens, resamples),
            score=None,
        )
        if score is not None and references:
            scores = [
                float(np.mean([score(pair.decode(response), reference) for response in each.responses[number]]))
                for number, reference in references.items()
            ]
            row = replace(row, score=_ratio(scores, np.ones(len(scores)), resamples[:, list(references)]))
        rows.append(row)
    return rows


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


def _ratio(over: Sequence[float] | np.ndarray, under: Any, resamples: np.ndarray) -> Interval:
    """Return a ratio of sums over prompts, of columns (P,); 0 in resamples where both are 0."""
    return interval((resamples @ np.asarray(over)) / np.maximum(resamples @ np.asarray(under), 1e-12))
