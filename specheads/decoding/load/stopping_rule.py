"""Stopping rules for single requests as policies of a batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.policy import LoadPolicy
from specheads.decoding.stopping.rule import StoppingRule


class UntilStopped(LoadPolicy):
    """Every row drafts until the decoder's stopping rule ends its draft; all that it drafts is submitted.

    Unlike `EachByRule` it knows no rule, so the rule may read all that a draft step has, for example hidden states.
    """

    keeps_rule = True


class EachByRule(LoadPolicy):
    """Every request drafts as a stopping rule says for it alone; all that it drafts is submitted.

    A request keeps its state from round to round; it is forgotten once the request is not in the batch any more.
    """

    follows_drafts = True

    def __init__(self, rule: StoppingRule, max_tokens: int | None = None) -> None:
        super().__init__(min(rule.max_tokens, max_tokens or rule.max_tokens))
        self.rule, self.needs = rule, rule.needs
        self.states: dict[int, Any] = {}  # of one row each, by request
        self.round: Any = None  # the state of all rows in this round
        self.stopped = np.zeros(0, dtype=bool)

    def begin_round(self, drafts: Drafts) -> int:
        self.round = self.rule.start_round(self._gathered(drafts.requests.tolist()))
        self.stopped = np.zeros(drafts.num_requests, dtype=bool)
        return self.max_tokens

    def goes_on(self, drafts: Drafts) -> np.ndarray:
        step = drafts.longest
        self._step(np.flatnonzero(drafts.lengths == step), step - 1, drafts.features)
        return ~self.stopped

    def _gathered(self, requests: list[int]) -> Any:
        """Return the states of requests as one batch."""
        parts = [self.states.get(request) for request in requests]
        new = self.rule.start_prompt(1, torch.device("cpu"))
        filled = [new if part is None else part for part in parts]
        return tree_map(lambda *values: torch.cat(values), *filled)

    def _step(self, rows: np.ndarray, place: int, features: Mapping[str, np.ndarray]) -> None:
        """Let the rule take in the tokens at `place` of the rows that have just drafted one."""
        index = torch.from_numpy(rows)
        values = {name: torch.from_numpy(features[name][rows, place]) for name in self.needs}
        state, stop = self.rule.step(tree_map(lambda value: value[index], self.round), values)
        self.round = tree_map(lambda value, part: value.index_copy(0, index, part.to(value.dtype)), self.round, state)
        self.stopped[rows] = stop.numpy()

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        after = self.rule.end_round(self.round, torch.from_numpy(num_submitted), torch.from_numpy(num_accepted))
        requests = drafts.requests.tolist()
        self.states = {
            request: tree_map(lambda value, row=row: value[row : row + 1], after) for row, request in enumerate(requests)
        }
