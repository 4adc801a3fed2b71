"""The quality of responses as rows of a report, with intervals over prompts."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from specheads.evaluation.intervals import Interval, interval, resample_counts
from specheads.evaluation.report import LiveRow, QualityRow
from specheads.evaluation.response_quality import ResponseQuality
from specheads.evaluation.sweep import TARGET_ALONE, Measured


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
            if not row.lossless and not earlier.lossless and other.setting.rule is setting.rule is not None
        ]
        references = [] if setting == TARGET_ALONE else [TARGET_ALONE.name, *rivals]
        tokens = np.array([stats.num_tokens for stats in decoded.stats])
        rejections = np.array([stats.num_rejections for stats in decoded.stats])
        quality = QualityRow(
            perplexity=perplexity(ours.nats.sum(axis=1), tokens, resamples),
            rejections_per_token=None if setting.rule is None else ratio(rejections, tokens, resamples),
            win_rates={name: win_rate(ours, responses[name], resamples) for name in references},
            score=score(ours, resamples),
        )
        new.append(replace(row, quality=quality))
    return new


def perplexity(nats: np.ndarray, num_tokens: np.ndarray, resamples: np.ndarray) -> Interval:
    """Return the perplexity of all tokens, from the nats (P,) and the tokens (P,) of each prompt."""
    return interval(np.exp((resamples @ nats) / (resamples @ num_tokens)))


def win_rate(ours: ResponseQuality, theirs: ResponseQuality, resamples: np.ndarray) -> Interval:
    """Return the share of prompts on which our response has the larger mean log-likelihood; ties count half.

    The repeats of a prompt are compared one by one, and share its weight. Yin et al. 2024 compare lossy rules by win rates, too,
    but a reward model decides who wins; here it is the likelihood under the target.
    """
    one_by_one = np.sign(ours.mean_log_likelihood - theirs.mean_log_likelihood)
    return ratio((1 + one_by_one.mean(axis=1)) / 2, np.ones(len(one_by_one)), resamples)


def score(responses: ResponseQuality, resamples: np.ndarray) -> Interval | None:
    """Return the mean score over prompts, None where responses are not scored."""
    if responses.scores is None:
        return None
    means = responses.scores.mean(axis=1)
    return ratio(means, np.ones(len(means)), resamples[:, responses.scored])


def ratio(over: np.ndarray, under: np.ndarray, resamples: np.ndarray) -> Interval:
    """Return a ratio of sums over prompts, of columns (P,); 0 in resamples where both are 0."""
    return interval((resamples @ over) / np.maximum(resamples @ under, 1e-12))
