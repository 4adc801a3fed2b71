"""A discrete-event simulation of continuous batching: rounds of draft steps and one step of the target, with their costs.

A round drafts in lockstep, submits what the policy admits, and verifies it in one step of the target. That step also reads the
prompts of new requests (chunked prefill without a limit on the chunk); where costs have a table of steps that read prompts, they
are read before the round. The draft reads in its first step of a round what it has not read: a prompt, tokens of rounds in which
it did not draft. Exact for chains under token verification, like replay, for
policies that keep the output exact; for others the tokens are the target's and not theirs. A head's seconds are left out:
at the sizes for which costs are given it is a small part of a draft step. Memory is taken to be sufficient.
"""

from dataclasses import dataclass, field

import numpy as np

from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.policy import LoadPolicy, drafting_rows
from specheads.errors import UserError
from specheads.evaluation.serving.recorded_drafts import RecordedDrafts, Rows
from specheads.evaluation.serving.traffic import Traffic


@dataclass(frozen=True)
class ServedRound:
    """The counts of a round over all requests that decode in it."""

    end: float  # seconds since the start
    seconds: float
    requests: int
    steps: int  # of the draft
    drafted: int
    submitted: int
    accepted: int
    tokens: int  # emitted


@dataclass
class Served:
    """What happened: seconds of each request (n,), NaN where it did not come to that, and all rounds."""

    arrived: np.ndarray
    admitted: np.ndarray
    first_token: np.ndarray
    finished: np.ndarray
    target_steps: np.ndarray  # (n,) long, rounds that each request decoded in
    rounds: list[ServedRound] = field(default_factory=list)

    @classmethod
    def nothing(cls, num_requests: int) -> "Served":
        """Return the state before anything has happened."""
        arrived, admitted, first_token, finished = np.full((4, num_requests), np.nan)
        return cls(arrived, admitted, first_token, finished, np.zeros(num_requests, dtype=np.int64))


class Simulation:
    """One policy on one traffic; `run` may be called once, because policies learn."""

    def __init__(self, recorded: RecordedDrafts, traffic: Traffic, costs: LoadCosts, policy: LoadPolicy) -> None:
        if policy.max_tokens > recorded.max_tokens:
            raise UserError(f"a policy drafts up to {policy.max_tokens} tokens, but {recorded.max_tokens} are recorded.")
        self.recorded, self.traffic, self.costs, self.policy = recorded, traffic, costs, policy
        self.served = Served.nothing(len(traffic.prompts))
        self.position = traffic.starts.copy()
        # Tokens that the draft has not read: at first all of the prompt.
        self.unread = np.where(traffic.starts > 0, 1, recorded.prompt_lengths[traffic.prompts])
        self.waiting = 0  # the next request to admit
        self.active = np.zeros(0, dtype=np.int64)
        self.now = 0.0

    def run(self) -> Served:
        """Serve all requests."""
        num_requests = len(self.traffic.prompts)
        while self.waiting < num_requests or len(self.active):
            new = self._admit()
            if not len(new) and not len(self.active):
                assert self.traffic.arrivals is not None  # of a loop that is not closed
                self.now = float(self.traffic.arrivals[self.waiting])
                continue
            # Requests that were under way before the simulation began have read their prompts.
            unread = new[self.traffic.starts[new] == 0]
            # All of a prompt but its last token, which the first round verifies from.
            prompt_tokens = int((self.recorded.prompt_lengths[self.traffic.prompts[unread]] - 1).sum())
            if self.costs.prompts is not None:
                self.now += float(self.costs.prompts(prompt_tokens)) if prompt_tokens else 0.0
                prompt_tokens, unread = 0, unread[:0]
            self.active = np.concatenate([self.active, np.setdiff1d(new, unread)])
            self._round(prompt_tokens)
            self.active = np.concatenate([self.active, unread])
        return self.served

    def _admit(self) -> np.ndarray:
        """Return the requests (m,) that join the batch."""
        free, arrivals = self.traffic.max_batch - len(self.active), self.traffic.arrivals
        here = len(self.traffic.prompts) if arrivals is None else int(np.searchsorted(arrivals, self.now, side="right"))
        new = np.arange(self.waiting, min(here, self.waiting + free))
        self.waiting += len(new)
        self.served.admitted[new] = self.now
        self.served.arrived[new] = self.now if arrivals is None else arrivals[new]
        return new

    def _round(self, prompt_tokens: int) -> None:
        """Draft, verify and emit for the active requests, while the target also reads `prompt_tokens`."""
        active, costs, seconds = self.active, self.costs, 0.0
        in_flight, submitted, accepted, tokens, steps, drafts = prompt_tokens, *[np.zeros(0, dtype=np.int64)] * 3, 0, None
        # As live, where prompts are read in steps of their own; while others are read here, a policy sees the drafts' load.
        memory = self.recorded.prompt_lengths[self.traffic.prompts[active]] + self.position[active]
        positions, attended = int(memory.sum()), 0
        rests = len(active) > 0 and not prompt_tokens and self.policy.rests(len(active), positions)
        if len(active):
            prompts, samples = self.traffic.prompts[active], self.traffic.samples[active]
            rows = Rows.at(prompts, samples, self.position[active])
            drafts = self._undrafted(rows, prompt_tokens, positions)
            seconds = 0.0 if rests else self._draft(rows, drafts)
            steps, submitted = drafts.longest, drafts.lengths if rests else self._submitted(drafts)
            accepted = np.minimum(self._accepted(rows, drafts), submitted)
            tokens = np.minimum(accepted + 1, self.recorded.left(rows))
            in_flight += len(active) + int(submitted.sum())
            attended = int((memory * (1 + submitted)).sum())
        table = costs.target if costs.alone is None or steps else costs.alone
        seconds += float(table(in_flight)) if in_flight else 0.0
        seconds += positions * costs.target_position + attended * costs.target_attention
        self.now += seconds
        counts = (int(values.sum()) for values in (submitted, accepted, tokens))
        drafted = int(drafts.lengths.sum()) if drafts else 0
        self.served.rounds.append(ServedRound(self.now, seconds, len(active), steps, drafted, *counts))
        if drafts is not None:
            self._emit(drafts, accepted, tokens)
            if not rests:
                self.policy.learn(drafts, submitted, accepted, seconds)

    def _undrafted(self, rows: Rows, prompt_tokens: int, positions: int) -> Drafts:
        """Return the drafts of a round before its first draft step."""
        active, width = self.active, max(self.policy.max_tokens, 1)
        features = {name: np.ones((len(active), width)) for name in self.recorded.needs}
        lengths = np.zeros(len(active), dtype=np.int64)
        return Drafts(active, lengths, self.recorded.capacity(rows), self.unread[active], features, prompt_tokens, positions)

    def _draft(self, rows: Rows, drafts: Drafts) -> float:
        """Draft all tokens of a round; return the seconds that it takes."""
        active, lengths, ended, seconds = self.active, drafts.lengths, np.zeros(len(drafts.lengths), dtype=bool), 0.0
        most = self.policy.begin_round(drafts)
        for step in range(most):
            which = np.flatnonzero(drafting_rows(self.policy, drafts, ended, most))
            if not len(which):
                break
            seconds += float(self.costs.draft(self.unread[active[which]].sum() if step == 0 else len(which)))
            seconds += drafts.positions * self.costs.draft_position
            values, ended[which] = self.recorded.draft(rows, which, step)
            for name, column in values.items():
                drafts.features[name][which, step] = column
            lengths[which] += 1
        if lengths.any():
            seconds += self.costs.besides(len(active)) + (self.costs.weighing(len(active)) if self.policy.admits else 0.0)
        return seconds

    def _submitted(self, drafts: Drafts) -> np.ndarray:
        submitted = self.policy.admit(drafts)
        assert ((submitted >= 0) & (submitted <= drafts.lengths)).all(), (submitted, drafts.lengths)
        return submitted

    def _accepted(self, rows: Rows, drafts: Drafts) -> np.ndarray:
        """Return how many drafted tokens would be accepted if all were submitted, (R,)."""
        return drafts.lengths - 1 - rows.depth

    def _emit(self, drafts: Drafts, accepted: np.ndarray, tokens: np.ndarray) -> None:
        active, served = self.active, self.served
        self.position[active] += tokens
        # A draft of k tokens has read all but the last of them.
        drafted = drafts.lengths > 0
        unread = tokens - np.minimum(accepted, drafts.lengths - 1)
        self.unread[active] = np.where(drafted, unread, self.unread[active] + tokens)
        served.target_steps[active] += 1
        first = active[np.isnan(served.first_token[active])]
        served.first_token[first] = self.now
        done = self.position[active] >= self.recorded.lengths[self.traffic.prompts[active]]
        served.finished[active[done]] = self.now
        self.active = active[~done]
