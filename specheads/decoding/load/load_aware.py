"""Policies that weigh each token's survival against what submitting it costs at this load."""

import numpy as np

from specheads.decoding.arguments import check_count
from specheads.decoding.load.admission import frontier
from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.plan import Plan, Planner, SurvivalSample
from specheads.decoding.load.policy import MAX_TOKENS, LoadPolicy
from specheads.decoding.load.readout import ReadOut


class LoadAware(LoadPolicy):
    """Draft as deep as pays at this load, and submit the tokens of the batch whose survival is worth their verification.

    Depth is planned before the round, from a sample of survival, and all rows draft it; then the frontier of the predicted
    survival is submitted, or everything where predicting and weighing takes longer than it is expected to save; if it does so at
    all sizes, no features of tokens are needed. A depth that followed the drafts would be seen by the frontier, through the
    competition of later tokens of other rows, and a token could decide whether it is submitted itself. Where the target verifies
    everything that may be drafted at no cost, all is submitted, and depth may follow the drafts: the batch drafts on as long as
    the tokens that one more step is expected to add are worth its seconds.

    A draft has to read every prompt and every emitted token some day, also those of rounds that it was not used in. So drafts end
    once the plans of recent rounds were worth less than that reading by more than PATIENCE rounds of it, and begin again once
    plans would have been worth more by as much as the draft then has to catch up.

    Args:
        costs: of draft and target steps.
        read_out: predictions of acceptance before and after tokens are sampled.
        sample: survival of dev prompts' drafts, by the same read-out.
        max_tokens: tokens per row and round at most.

    Source: the frontier is algorithm 1 of DSpark (Cheng et al. 2026), with seconds valued at the throughput of other rounds. The
    depth of drafts, both conditions for exactness and the account of what the draft reads are ours.
    """

    PATIENCE = 24  # fewer end drafts too early where prompts come in clusters

    def __init__(self, costs: LoadCosts, read_out: ReadOut, sample: SurvivalSample, max_tokens: int = MAX_TOKENS) -> None:
        check_count("max_tokens", max_tokens, least=1)
        super().__init__(min(max_tokens, sample.survival.shape[1]))
        self.costs, self.read_out = costs, read_out
        self.planner, mean = Planner(costs, sample, self.max_tokens), sample.mean
        if self.planner.ever_weighs():
            self.needs = read_out.needs
        else:  # then drafts are not even looked at
            self.planner = Planner(costs, sample, self.max_tokens, weighs=False)
        self.next_overlap = mean[1:] / np.maximum(mean[:-1], 1e-12)  # expected, by place
        self.plan = self.proposed = Plan(0, 0.0)  # of this round, and what it was if drafts pay for their reading
        self.drafting = True
        self.requests = np.zeros(0, dtype=np.int64)  # of the last round
        # Tokens that the plans since drafts began or ended were worth more than what the draft would have had to read.
        self.balance = 0.0

    def rests(self, num_requests: int, positions: int = 0) -> bool:
        if self.planner.plan(num_requests, 0, positions).depth:
            return False
        self.proposed = Plan(0, self.planner.throughput(num_requests, positions))
        self._settle(num_requests, num_requests)
        return True

    def begin_round(self, drafts: Drafts) -> int:
        self.plan = self._planned(drafts)
        self.follows_drafts, self.admits = self.plan.adaptive, self.plan.admits
        return self.plan.depth

    def goes_on(self, drafts: Drafts) -> np.ndarray:
        seconds = self.costs.draft(drafts.num_requests) + drafts.positions * self.costs.draft_position
        return np.full(drafts.num_requests, self._gain(drafts) >= self.plan.throughput * seconds)

    def admit(self, drafts: Drafts) -> np.ndarray:
        if not self.plan.admits or not drafts.longest:
            return drafts.lengths
        return admitted(drafts, self.read_out, self.costs, self.plan.throughput)

    def _planned(self, drafts: Drafts) -> Plan:
        """Return the plan of the round, and keep the one that it would be if drafts pay for their reading."""
        self.proposed = self.planner.plan(drafts.num_requests, drafts.prompt_tokens, drafts.positions)
        if not self.drafting and self.proposed.depth:
            first, usual = self.costs.draft(drafts.unread.sum()), self.costs.draft(drafts.num_requests)
            if self.balance >= self.proposed.throughput * (first - usual):
                self.drafting, self.balance = True, 0.0
        return self.proposed if self.drafting else Plan(0, self.proposed.throughput)

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        more = self.proposed.accepted + drafts.num_requests
        if not np.array_equal(drafts.requests, self.requests):
            more += drafts.unread[np.isin(drafts.requests, self.requests, invert=True)].sum()
            self.requests = drafts.requests
        self._settle(drafts.num_requests, more)

    def _settle(self, rows: int, more: float) -> None:
        """Weigh the plan of a round against `more` tokens, which the draft is to read."""
        table = self.costs.draft
        token = table.last_slope * self.proposed.throughput
        # The first step of a draft reads some for the price of one token per row.
        gained = self.proposed.worth - token * (more - max(table.flat_until, rows) * (self.proposed.depth > 0))
        if self.drafting:
            self.balance = min(self.balance + gained, 0.0)
            if self.balance < -self.PATIENCE * token * more:
                self.drafting, self.balance = False, 0.0
        else:
            self.balance = max(self.balance + gained, 0.0)

    def _gain(self, drafts: Drafts) -> float:
        """Return the expected number of accepted tokens that one more step adds to those drafted so far."""
        step = drafts.longest
        drafting = (drafts.lengths == step) & (drafts.capacity > step)
        accepted = self.read_out.after(drafts).prod(axis=1)
        return float(accepted[drafting].sum() * self.next_overlap[step - 1])


class LoadBound(LoadPolicy):
    """Draft as another policy says, and submit of its tokens those whose survival is worth their verification at this load.

    The other policy must stop each row by that row alone, or by what is known before the round: then no token decides through
    other rows whether it is submitted.
    """

    admits = True

    def __init__(self, policy: LoadPolicy, costs: LoadCosts, read_out: ReadOut, sample: SurvivalSample) -> None:
        super().__init__(policy.max_tokens)
        self.policy, self.costs, self.read_out = policy, costs, read_out
        self.needs, self.keeps_rule = policy.needs | read_out.needs, policy.keeps_rule
        self.follows_drafts = policy.follows_drafts
        self.planner = Planner(costs, sample, min(policy.max_tokens, sample.survival.shape[1]))

    def begin_round(self, drafts: Drafts) -> int:
        most = self.policy.begin_round(drafts)
        self.follows_drafts = self.policy.follows_drafts
        return most

    def goes_on(self, drafts: Drafts) -> np.ndarray:
        return self.policy.goes_on(drafts)

    def admit(self, drafts: Drafts) -> np.ndarray:
        if not drafts.longest:
            return drafts.lengths
        throughput = self.planner.throughput(drafts.num_requests, drafts.positions)
        return np.minimum(self.policy.admit(drafts), admitted(drafts, self.read_out, self.costs, throughput))

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        self.policy.learn(drafts, num_submitted, num_accepted, seconds)


def admitted(drafts: Drafts, read_out: ReadOut, costs: LoadCosts, throughput: float) -> np.ndarray:
    """Return the frontier (R,) of a round's drafts at a throughput that is known from other rounds."""
    seconds = costs.verification(drafts.positions / drafts.num_requests)
    return frontier(read_out.survival(drafts), drafts.lengths, seconds, drafts.base_tokens, throughput=throughput)
