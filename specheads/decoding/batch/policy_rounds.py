"""The drafts of rows whose lengths a policy decides for the whole batch, by the load."""

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specheads.decoding.batch.drafter import RowsDrafter
from specheads.decoding.batch.observation import Observing
from specheads.decoding.batch.reader import PromptReader
from specheads.decoding.batch.rows import Row
from specheads.decoding.drafting.autoregressive import ChainState, ChainStep
from specheads.decoding.engine import Engine
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.policy import LoadPolicy

STEP_TOKENS = 8  # of a row that a draft step reads; more are read before it, without logits


class PolicyDrafter(RowsDrafter):
    """Drafts as a policy says, and submits what it admits.

    A row's `drafted` then has the submitted tokens, `num_drafted` counts all.
    """

    policy: LoadPolicy  # set before the first round

    def __init__(self, engine: Engine, step: ChainStep, num_rows: int, reader: PromptReader) -> None:
        """`reader`: of the draft's engine."""
        super().__init__(engine, step, num_rows)
        assert isinstance(step.rule, Observing)
        self._names, self._reader = step.rule.names, reader

    def warm_up(self, ends: Tensor) -> None:
        super().warm_up(ends)
        self._reader.warm_up()

    def rests(self, rows: Sequence[Row]) -> bool:
        if not self.policy.rests(len(rows), sum(len(row.session.committed) for row in rows)):
            return False
        for row in rows:
            row.begin_round()
        return True

    def draft(self, rows: Sequence[Row], ends: Tensor) -> None:
        self._began = time.perf_counter()
        state = ChainState(self._going, self.state)
        for row in rows:
            row.begin_round()
        unread = np.array([len(row.session.committed) - row.num_read for row in rows])
        observed = np.zeros((len(rows), self.policy.max_tokens, len(self._names)))
        features = {name: observed[..., place] for place, name in enumerate(self._names)}
        self._drafts = self._seen(rows, unread, features)
        most = self.policy.begin_round(self._drafts)
        able = [number for number, row in enumerate(rows) if row.limit > 0]
        for step in range(most):
            if step and able and self.policy.follows_drafts:
                goes_on = self.policy.goes_on(self._seen(rows, unread, features))
                able = [number for number in able if goes_on[number]]
            if not able:
                break
            drafting = [rows[number] for number in able]
            self._catch_up(drafting)
            drawn, state = self._step_rows(drafting, ends, state)
            observed[able, step] = state.rule.values.cpu().numpy()[[row.row for row in drafting]]
            for row, (token, _) in zip(drafting, drawn, strict=True):
                row.drafted.append(token)
                row.num_drafted += 1
            able = [number for number, (_, ended) in zip(able, drawn, strict=True) if not ended and rows[number].limit > step + 1]
        self._drafts = self._seen(rows, unread, features)
        for row, count in zip(rows, self.policy.admit(self._drafts).tolist(), strict=True):
            del row.drafted[count:]
        self.state = state.rule

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Read what a draft step would have to read beyond a few tokens: a prompt, or tokens of rounds without drafts."""
        late = [row for row in rows if len(row.session.committed) - row.num_read > STEP_TOKENS]
        if not late:
            return
        starts = [row.num_read if self._reader.continues else 0 for row in late]
        texts = [row.session.committed[start:-1] for row, start in zip(late, starts, strict=True)]
        self._reader.read([row.row for row in late], texts, starts)
        for row in late:
            row.num_read = len(row.session.committed) - 1

    def _seen(self, rows: Sequence[Row], unread: np.ndarray, features: dict[str, np.ndarray]) -> Drafts:
        """Return the drafts so far, as the policy sees them."""
        return Drafts(
            requests=np.array([row.number for row in rows]),
            lengths=np.array([len(row.drafted) for row in rows]),
            capacity=np.array([max(0, row.limit) for row in rows]),
            unread=unread,
            features=features,
            positions=sum(len(row.session.committed) for row in rows),
        )

    def learn(self, rows: Sequence[Row], num_accepted: Sequence[int]) -> None:
        """Let the policy take in the outcome of the last round."""
        submitted = np.array([len(row.drafted) for row in rows])
        self.policy.learn(self._drafts, submitted, np.array(num_accepted), time.perf_counter() - self._began)
