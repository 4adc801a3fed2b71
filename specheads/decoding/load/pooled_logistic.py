"""A policy without a head: a logistic of the draft's confidence, learned from the verifications of all requests."""

import numpy as np

from specheads.decoding.arguments import check_positive, check_probability
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.policy import MAX_TOKENS, LoadPolicy, decided
from specheads.decoding.stopping.logistic import LOGISTIC_INPUTS


class PooledLogistic(LoadPolicy):
    """Stop a row once its survival by `sigmoid(a + b logit(max d))` is below `1 - threshold`; the token there is not submitted.

    One logistic serves all requests. After every verification its two weights move by an online Newton step over the tokens whose
    outcome became known.

    Args:
        threshold: in [0, 1], of the probability that some token of the row is rejected; 1 never stops.
        prior: the weight of the initial a = 0 and b = 1.

    Source: the pooled logistic is that of a proposal for vLLM (pull request 52228); online Newton steps are those of Hazan et al.
    2007. The largest probability is known before the token is sampled, so leaving that token out keeps the output the target's.
    """

    needs = frozenset({"max_prob"})
    follows_drafts = admits = True

    def __init__(self, threshold: float = 0.6, prior: float = 10.0, max_tokens: int = MAX_TOKENS) -> None:
        check_probability("threshold", threshold, "a probability of rejection, for example 0.6")
        check_positive("prior", prior, "the weight of the initial logistic, for example 10")
        super().__init__(max_tokens)
        self.threshold = threshold
        self.weights, self.information = np.array([0.0, 1.0]), prior * np.eye(2)

    def goes_on(self, drafts: Drafts) -> np.ndarray:
        return self._kept(drafts)[:, -1]

    def admit(self, drafts: Drafts) -> np.ndarray:
        return (self._kept(drafts) & drafts.places).sum(axis=1)

    def _kept(self, drafts: Drafts) -> np.ndarray:
        """Return which places have enough survival, (R, K) bool."""
        return self._acceptance(drafts).cumprod(axis=1) >= 1 - self.threshold

    def _inputs(self, drafts: Drafts) -> np.ndarray:
        source, logit = LOGISTIC_INPUTS["logit_max_prob"]
        logits = logit(drafts.features[source][:, : drafts.longest], np.log)
        return np.stack([np.ones_like(logits), logits], axis=-1)

    def _acceptance(self, drafts: Drafts) -> np.ndarray:
        return 1 / (1 + np.exp(-(self._inputs(drafts) @ self.weights)))

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        accepted, known = decided(drafts, num_submitted, num_accepted)
        inputs, probs, outcomes = self._inputs(drafts)[known], self._acceptance(drafts)[known], accepted[known]
        self.information += (inputs * (probs * (1 - probs))[:, None]).T @ inputs
        self.weights = self.weights + np.linalg.solve(self.information, inputs.T @ (outcomes - probs))
