"""The quality of decoded responses, and the acceptance of several candidates: measured, and as rows of a report."""

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from specheads.evaluation.intervals import Interval, interval, resample_counts
from specheads.evaluation.report import LiveRow, QualityRow
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import TARGET_ALONE, Measured
from specheads.forecast import progress
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS, batches_of_tokens, right_padded, slices
from specheads.pair.pair import Pair
from specheads.pair.sampling import check_no_nan
from specheads.prompts.encoding import EncodedPrompt
from specheads.prompts.scores import SCORES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResponseQuality:
    """The responses of one setting, by prompt and repeat (P, R)."""

    nats: np.ndarray  # the negative log-likelihood of each response under the target
    lengths: np.ndarray  # in tokens
    scores: np.ndarray | None = None  # of prompts (Q, R) with a response in the data set; None where responses are not scored
    scored: np.ndarray | None = None  # (P,) bool, which prompts these are

    @property
    def mean_log_likelihood(self) -> np.ndarray:
        """The mean log-likelihood per token of each response (P, R), in nats."""
        return -self.nats / self.lengths


def response_quality(setup: Setup[Evaluation], measured: Sequence[Measured]) -> dict[str, ResponseQuality]:
    """Return the quality of every setting's responses, by its name: one more forward pass of the target over each response."""
    prompts = setup.prompts.decoded(setup.settings.num_live_prompts).prompts
    nats = []  # by prompt (settings, R)
    logger.info("quality: the target reads the responses to %d prompts once more", len(prompts))
    with progress("reading responses", len(prompts)) as advance:
        for number, (_, ids) in enumerate(prompts):
            responses = [response for decoded in measured for response in decoded.responses[number]]
            nats.append(np.reshape(response_nats(setup.pair.target_lm, ids, responses), (len(measured), -1)))
            advance(1)
    scores = [response_scores(setup.pair, prompts, decoded, setup.prompt_data.score) for decoded in measured]
    return {
        decoded.setting.name: ResponseQuality(
            np.stack([of_prompt[number] for of_prompt in nats]),
            np.array([[len(response) for response in of_prompt] for of_prompt in decoded.responses]),
            **scores[number],
        )
        for number, decoded in enumerate(measured)
    }


def response_scores(
    pair: Pair, prompts: Sequence[EncodedPrompt], decoded: Measured, score: str | None
) -> Mapping[str, np.ndarray]:
    """Return `scores` and `scored` of one setting's responses by the score of this name; nothing without one."""
    scored = np.array([prompt.response is not None for prompt, _ in prompts])
    if score is None or not scored.any():  # of all prompts some have a reference, but maybe none of the decoded ones
        return {}
    rows = [
        [SCORES[score](pair.decode(response), prompt.response) for response in responses]
        for (prompt, _), responses in zip(prompts, decoded.responses, strict=True)
        if prompt.response is not None
    ]
    return {"scores": np.array(rows), "scored": scored}


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
    check_no_nan(lm.name, any(map(math.isnan, known.values())))
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
