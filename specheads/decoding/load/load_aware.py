"""Policies that weigh each token's survival against what submitting it costs at this load."""

import numpy as np

from specheads.decoding.arguments import check_count
from specheads.decoding.load.admission import frontier
from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.plan import Plan, Planner, SurvivalSample
from specheads.decoding.load.policy import MAX_TOKENS, LoadPolicy
from specheads.decoding.load.readout import ReadOut, survival


class LoadAware(LoadPolicy):
    """Draft as deep as pays at this load, and submit the tokens of the batch whose survival is worth their verification.

    Depth is planned before the round, from a sample of survival, and all rows draft it; then the frontier of the predicted
    survival is submitted. A depth that followed the drafts would be seen by the frontier, through the competition of later tokens
    of other rows, and a token could decide whether it is submitted itself. Where the target verifies everything that may be
    drafted at no cost, all is submitted, and depth may follow the drafts: the batch drafts on as long as the tokens that one more
    step is expected to add are worth its seconds.

    Args:
        costs: of draft and target steps.
        read_out: predictions of acceptance before and after tokens are sampled.
        sample: survival of dev prompts' drafts, by the same read-out.
        max_tokens: tokens per row and round at most.

    Source: the frontier is algorithm 1 of DSpark (Cheng et al. 2026), with seconds valued at the throughput of other rounds; the
    depth of drafts and both conditions for exactness are ours.
    """

    def __init__(self, costs: LoadCosts, read_out: ReadOut, sample: SurvivalSample, max_tokens: int = MAX_TOKENS) -> None:
        check_count("max_tokens", max_tokens, least=1)
        super().__init__(min(max_tokens, sample.survival.shape[1]))
        self.costs, self.read_out, self.needs = costs, read_out, read_out.needs
        self.planner, mean = Planner(costs, sample, self.max_tokens), sample.mean
        self.next_overlap = mean[1:] / np.maximum(mean[:-1], 1e-12)  # expected, by place

    def goes_on(self, drafts: Drafts) -> np.ndarray:
        plan, step = self._plan(drafts), drafts.longest
        more = step < plan.depth
        if more and plan.adaptive:
            more = self._gain(drafts) >= plan.throughput * self.costs.draft(drafts.num_requests)
        return np.full(drafts.num_requests, more)

    def admit(self, drafts: Drafts) -> np.ndarray:
        plan = self._plan(drafts)
        if plan.adaptive or not drafts.longest:
            return drafts.lengths
        return admitted(drafts, self.read_out, self.costs, plan.throughput)

    def _plan(self, drafts: Drafts) -> Plan:
        return self.planner.plan(drafts.num_requests, drafts.prompt_tokens)

    def _gain(self, drafts: Drafts) -> float:
        """Return the expected number of accepted tokens that one more step adds."""
        step = drafts.longest
        drafting = (drafts.lengths == step) & (drafts.capacity > step)
        if not step:
            return float(drafting.sum() * self.planner.sample.mean[0])
        accepted = self.read_out.acceptance(drafts).prod(axis=1)
        return float(accepted[drafting].sum() * self.next_overlap[step - 1])


class LoadBound(LoadPolicy):
    """Draft as another policy says, and submit of its tokens those whose survival is worth their verification at this load.

    The other policy must stop each row by that row alone, or by what is known before the round: then no token decides through
    other rows whether it is submitted.
    """

    def __init__(self, policy: LoadPolicy, costs: LoadCosts, read_out: ReadOut, sample: SurvivalSample) -> None:
        super().__init__(policy.max_tokens)
        self.policy, self.costs, self.read_out = policy, costs, read_out
        self.needs = policy.needs | read_out.needs
        self.planner = Planner(costs, sample, min(policy.max_tokens, sample.survival.shape[1]))

    def goes_on(self, drafts: Drafts) -> np.ndarray:
        return self.policy.goes_on(drafts)

    def admit(self, drafts: Drafts) -> np.ndarray:
        if not drafts.longest:
            return drafts.lengths
        throughput = self.planner.throughput(drafts.num_requests)
        return np.minimum(self.policy.admit(drafts), admitted(drafts, self.read_out, self.costs, throughput))

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        self.policy.learn(drafts, num_submitted, num_accepted, seconds)


def admitted(drafts: Drafts, read_out: ReadOut, costs: LoadCosts, throughput: float) -> np.ndarray:
    """Return the frontier (R,) of a round's drafts at a throughput that is known from other rounds."""
    survives = survival(read_out, drafts)
    return frontier(survives, drafts.lengths, costs.envelope, drafts.base_tokens, throughput=throughput)
