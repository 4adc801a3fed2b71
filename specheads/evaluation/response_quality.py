"""Decoded responses one by one: their likelihood under the target, and their scores by the responses in the data set."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specheads.evaluation.likelihood import response_nats
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import Measured
from specheads.forecast import progress
from specheads.pair import Pair
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
