"""Stopping rules of other papers, and bounds, that `rules.py` replays and that are not in the package.

A rule that learns from all requests at once keeps what it knows in the object, not in the state: as replay walks all prompts
side by side, it is as if they were decoded together.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specheads.decoding.arguments import check_probability
from specheads.decoding.stopping import logistic_inputs
from specheads.decoding.stopping.confidence import ConfidenceRule, ConfidenceState
from specheads.decoding.stopping.fitting import StepCosts
from specheads.decoding.stopping.length import LengthRule, LengthState
from specheads.decoding.stopping.online import OnlineLogistic, OnlineMemory
from specheads.decoding.stopping.rule import MAX_TOKENS, outcomes
from specheads.decoding.stopping.survival import SurvivalRule, SurvivalState
from specheads.heads.calibration import IndexCalibration
from specheads.replay.recording import GROUND_TRUTH, Recording, accepted_before
from specheads.theory.optimal_stopping import AcceptanceChain, OptimalStopping, optimal_stopping


class Played(NamedTuple):
    """What `TapOut` remembers."""

    arm: Tensor  # (B,) long, which rule decides in this round
    plays: Tensor  # (B, A) float64, rounds so far
    rewards: Tensor  # (B, A) float64, the sum of theirs
    last: Tensor  # (B,) float64, the square root of the entropy before this token, negative at the start of a round


class TapOut(ConfidenceRule):
    """Let a bandit (UCB1) choose for each round which of three rules without parameters to fit ends the draft.

    The rules stop where the largest probability is below 0.8; the square root of the entropy is above 0.6; that square root has
    risen by more than 0.2. The reward of a round is `blend accepted / max_tokens + (1 - blend) accepted / drafted`.

    Args:
        blend: in [0, 1], the weight of the share of the longest draft in the reward.
        max_tokens: tokens per round at most.

    Source: sequence-level UCB1 of TapOut (Sridhar et al. 2025, arXiv 2511.02017). A prompt begins without what others taught.
    Left out are the margin of the two largest probabilities, which recordings lack, and the adaptive bound on the entropy, whose
    state would have to follow the rounds of other rules.
    """

    needs = frozenset({"max_prob", "entropy"})
    compile_key = "tapout"
    ARMS = 3

    def __init__(self, blend: float = 0.5, max_tokens: int = MAX_TOKENS) -> None:
        check_probability("blend", blend, "a weight, for example 0.5")
        super().__init__(0.0, max_tokens)
        self.blend = blend

    def initial_memory(self, batch: int, device: torch.device) -> Played:
        plays = torch.zeros(batch, self.ARMS, dtype=torch.float64, device=device)
        arm = torch.zeros(batch, dtype=torch.long, device=device)
        return Played(arm, plays, plays.clone(), torch.full((batch,), -1.0, dtype=torch.float64, device=device))

    def remember(self, state: ConfidenceState, features: Mapping[str, Tensor]) -> Played:
        return state.memory._replace(last=features["entropy"].double().clamp_min(0).sqrt())

    def is_unsure(self, state: ConfidenceState, features: Mapping[str, Tensor]) -> Tensor:
        memory: Played = state.memory
        root = features["entropy"].double().clamp_min(0).sqrt()
        rises = (state.num_drafted > 0) & (root - memory.last > 0.2)
        stops = torch.stack([features["max_prob"] < 0.8, root > 0.6, rises], dim=1)
        return stops.gather(1, memory.arm[:, None]).squeeze(1)

    def learn(self, state: ConfidenceState, num_drafted: Tensor, num_accepted: Tensor) -> ConfidenceState:
        memory: Played = state.memory
        accepted = num_accepted.double()
        reward = self.blend * accepted / self.max_tokens + (1 - self.blend) * accepted / num_drafted.clamp_min(1)
        played = torch.nn.functional.one_hot(memory.arm, self.ARMS).double()
        plays, rewards = memory.plays + played, memory.rewards + played * reward[:, None]
        optimism = (2 * plays.sum(dim=1, keepdim=True).clamp_min(1).log() / plays.clamp_min(1)).sqrt()
        index = torch.where(plays > 0, rewards / plays.clamp_min(1) + optimism, torch.inf)
        return state._replace(memory=memory._replace(arm=index.argmax(dim=1), plays=plays, rewards=rewards))


class SpecKV(LengthRule):
    """Choose a round's length at its first token, by a small network of the draft's confidence there.

    The network predicts how likely each of the next tokens is accepted, given that those before it were. The length is the one
    with the most expected tokens minus what they cost at the throughput that this policy reaches on dev prompts.

    Args:
        network: from (log draft_prob, logit max_prob, entropy) to one logit for each token.
        throughput: tokens per second.
        costs: of a draft step and a verification.

    Source: SpecKV (Shukla 2026, arXiv 2605.02888), whose network predicts the tokens of four lengths, and which leaves the
    draft's time out of what it maximises. It is in here, because a rule that never pays for drafting always drafts the longest.
    """

    needs = frozenset({"draft_prob", "max_prob", "entropy"})
    fitted_to_costs = frozenset({"network"})
    INPUTS = ("log_draft_prob", "logit_max_prob", "entropy")

    def __init__(
        self, network: nn.Module, throughput: float = 1.0, costs: StepCosts | None = None, max_tokens: int = MAX_TOKENS
    ) -> None:
        super().__init__(max_tokens, max_tokens)
        self.network, self.throughput, self.costs = network, throughput, costs
        self.compile_key = ("speckv", id(self))

    @classmethod
    def open_parameters(cls, arguments: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"network"} if arguments.get("network") == "fitted" else ())

    @classmethod
    def fit(cls, arguments: Mapping[str, Any], fitting: Any, head: Any, costs: StepCosts | None) -> dict[str, Any]:
        assert costs is not None
        if not hasattr(fitting, "recording"):  # values are only checked
            return {**arguments, "network": _network(arguments["max_tokens"]), "costs": costs}
        inputs, run = first_tokens(fitting.recording, arguments["max_tokens"])
        network = _trained(_network(arguments["max_tokens"]), inputs, run)
        survival, throughput = network(inputs).sigmoid().cumprod(dim=1), 0.0
        for _ in range(20):  # Dinkelbach: the throughput of the best lengths at a throughput
            length = _best_length(survival, throughput, costs)
            tokens = 1 + (survival.cumsum(dim=1).gather(1, length[:, None] - 1)).mean()
            throughput = float(tokens / (costs.target_seconds + length.double().mean() * _token_seconds(costs)))
        return {**arguments, "network": network, "throughput": throughput, "costs": costs}

    def step(self, state: LengthState, features: Mapping[str, Tensor]) -> tuple[LengthState, Tensor]:
        assert self.costs is not None
        survival = self.network(logistic_inputs(self.INPUTS, features)).sigmoid().cumprod(dim=1)
        chosen = _best_length(survival, self.throughput, self.costs)
        return super().step(state._replace(num_tokens=torch.where(state.num_drafted == 0, chosen, state.num_tokens)), features)


def _network(num_tokens: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(len(SpecKV.INPUTS), 32), nn.SiLU(), nn.Linear(32, num_tokens)).double()


def _token_seconds(costs: StepCosts) -> float:
    return costs.draft_seconds + costs.verified_seconds


def _best_length(survival: Tensor, throughput: float, costs: StepCosts) -> Tensor:
    """Return the length (n,) with the most tokens minus what drafting them costs; survival (n, lengths)."""
    each = survival - throughput * _token_seconds(costs)
    return each.cumsum(dim=1).argmax(dim=1) + 1


def first_tokens(recording: Recording, longest: int) -> tuple[Tensor, Tensor]:
    """Return SpecKV's inputs (n, 3) wherever a round may begin, in all samples, and how many tokens are accepted there (n,)."""
    accepted, count = recording.accepted, recording.accepted.shape[1]
    node = torch.where(accepted, torch.arange(count), recording.branch_first)
    known = accepted | (recording.branch_length > 0)
    # Accepted tokens after each position are those before it, read backwards.
    ends = count - (recording.first + recording.lengths)
    run = torch.where(accepted, accepted_before(accepted.flip(1), ends.flip(0)).flip(1) + 1, 0)
    features = {name: recording.features[name][node[known]] for name in ("draft_prob", "max_prob", "entropy")}
    return logistic_inputs(SpecKV.INPUTS, features), run[known].clamp_max(longest)


def _trained(network: nn.Module, inputs: Tensor, run: Tensor) -> nn.Module:
    """Return the network after 400 steps on the outcomes that verification would have decided."""
    places = torch.arange(network[-1].out_features)  # type: ignore[index,union-attr]
    labels, decided = (places < run[:, None]).double(), places <= run[:, None]
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        rows = torch.randint(len(inputs), (4096,), generator=generator)
        losses = nn.functional.binary_cross_entropy_with_logits(network(inputs[rows]), labels[rows], reduction="none")
        optimizer.zero_grad()
        (losses * decided[rows]).sum().div(decided[rows].sum()).backward()
        optimizer.step()
    return network.requires_grad_(False)


class GoodputLength(LengthRule):
    """Draft the length of the highest expected throughput, from how often tokens at each place were accepted in all requests.

    Args:
        costs: of a draft step and a verification.

    Source: `argmax_K (1 + sum_k prod_{j <= k} alpha_j) / (K draft seconds + target seconds)`, the goodput of SmartSpec (Liu et
    al. 2024), at one request. Places that were not reached yet count as the one before them.
    """

    fitted_to_costs = frozenset({"costs"})

    def __init__(self, costs: StepCosts | None = None, max_tokens: int = MAX_TOKENS) -> None:
        super().__init__(4, max_tokens)
        self.costs, self.compile_key = costs, ("goodput", id(self))
        self.accepted, self.decided = torch.zeros(2, max_tokens, dtype=torch.float64)

    @classmethod
    def open_parameters(cls, arguments: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"costs"})

    @classmethod
    def fit(cls, arguments: Mapping[str, Any], fitting: Any, head: Any, costs: StepCosts | None) -> dict[str, Any]:
        return {**arguments, "costs": costs}

    def learn(self, state: LengthState, num_drafted: Tensor, num_accepted: Tensor) -> LengthState:
        assert self.costs is not None
        accepted, decided, _ = outcomes(self.max_tokens, num_drafted, num_accepted)
        self.accepted, self.decided = self.accepted + accepted.sum(dim=0), self.decided + decided.sum(dim=0)
        rates = self.accepted / self.decided.clamp_min(1)
        reached = int((self.decided > 0).sum())
        rates[reached:] = rates[max(0, reached - 1)]
        lengths = torch.arange(1, self.max_tokens + 1)
        seconds = self.costs.target_seconds + lengths * _token_seconds(self.costs)
        best = int(((1 + rates.cumprod(dim=0).cumsum(dim=0)) / seconds).argmax()) + 1
        return state._replace(num_tokens=torch.full_like(state.num_tokens, best))


class PooledLogistic(OnlineLogistic):
    """OnlineLogistic with the same weights for all requests, which every round of each of them moves, as one of vLLM's."""

    def __init__(self, slope: float = 1.0, prior: float = 10.0, threshold: float = 0.7, max_tokens: int = MAX_TOKENS) -> None:
        super().__init__(slope, 0.0, prior, threshold, 1, max_tokens)
        self.compile_key = ("pooled", id(self))
        self.weights: Tensor | None = None
        self.information = prior * torch.eye(2, dtype=torch.float64)

    def learn(self, state: SurvivalState, num_drafted: Tensor, num_accepted: Tensor) -> SurvivalState:
        memory: OnlineMemory = state.memory
        weights = memory.weights[0] if self.weights is None else self.weights
        accepted, decided, _ = outcomes(self.max_tokens, num_drafted, num_accepted)
        probs = (memory.inputs @ weights).sigmoid()
        weighted = memory.inputs * (decided * probs * (1 - probs))[..., None]
        self.information = self.information + (weighted.mT @ memory.inputs).sum(dim=0)
        gradient = (memory.inputs * (decided * (accepted.double() - probs))[..., None]).sum(dim=(0, 1))
        self.weights = weights + torch.linalg.solve(self.information, gradient)
        return state._replace(memory=memory._replace(weights=self.weights.expand_as(memory.weights).clone()))


class BestPolicy(SurvivalRule):
    """The best stopping policy for a Markov chain of acceptance probabilities that is fitted to drafts of dev prompts.

    It knows the true acceptance probability of every drafted token, which no decoder does.

    Source: the Markov decision process of SpecDec++ (section 3.1), solved by dynamic programming.
    """

    needs = frozenset({GROUND_TRUTH})
    fitted_to_costs = frozenset({"policy"})

    def __init__(
        self, policy: OptimalStopping | None = None, chain: AcceptanceChain | None = None, max_tokens: int = MAX_TOKENS
    ) -> None:
        super().__init__(1.0, 1, max_tokens)
        self.policy, self.chain, self.compile_key = policy, chain, ("best policy", id(self))

    @classmethod
    def open_parameters(cls, arguments: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"policy"})

    @classmethod
    def fit(cls, arguments: Mapping[str, Any], fitting: Any, head: Any, costs: StepCosts | None) -> dict[str, Any]:
        assert costs is not None
        if not hasattr(fitting, "recording"):
            return dict(arguments)
        chain = AcceptanceChain.of(*drafted_pairs(fitting.recording, cls.predictions(fitting.recording, head)))
        policy = optimal_stopping(chain, _token_seconds(costs), costs.target_seconds, arguments["max_tokens"])
        return {**arguments, "policy": policy, "chain": chain}

    @staticmethod
    def predictions(recording: Recording, head: Any) -> Tensor:
        """Return the acceptance probabilities of all nodes."""
        return recording.features[GROUND_TRUTH]

    def acceptance(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        return features[GROUND_TRUTH].double()

    def step(self, state: SurvivalState, features: Mapping[str, Tensor]) -> tuple[SurvivalState, Tensor]:
        assert self.policy is not None and self.chain is not None
        acceptance, place = self.acceptance(state, features), state.num_drafted
        new, stop = super().step(state, features)
        least = self.policy.least_survival[place.clamp_max(self.max_tokens - 1), torch.bucketize(acceptance, self.chain.edges)]
        return new, stop | (new.survival <= least)


class BestHeadPolicy(BestPolicy):
    """The same for the predictions of a head instead of the truth: what stopping at a threshold leaves to gain."""

    uses_head = True

    def __init__(
        self,
        head: Any,
        policy: OptimalStopping | None = None,
        chain: AcceptanceChain | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        super().__init__(policy, chain, max_tokens)
        self.head, self.needs = head, frozenset(head.config.inputs)

    @staticmethod
    def predictions(recording: Recording, head: Any) -> Tensor:
        calibration = IndexCalibration.from_dict(head.config.calibration)
        logits = recording.features[head.name].double()
        return calibration(logits, torch.zeros(len(logits), dtype=torch.long)).sigmoid()

    def acceptance(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        calibration = IndexCalibration.from_dict(self.head.config.calibration)
        return calibration(features[self.head.name].double(), state.num_drafted).sigmoid()


def drafted_pairs(recording: Recording, predictions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions at first tokens of drafts, and at tokens and the ones drafted after them, by the draft's own law."""
    node, after, _, _ = recording.labels()
    followed = after >= 0
    return predictions[node], predictions[node[followed]], predictions[after[followed]]


RIVALS: dict[str, dict[str, Any]] = {
    "tapout": {"_target_": "benchmarks.rival_rules.TapOut", "blend": [0.0, 0.5, 1.0], "max_tokens": 20},
    "speckv": {"_target_": "benchmarks.rival_rules.SpecKV", "network": "fitted", "max_tokens": 20},
    "goodput_length": {"_target_": "benchmarks.rival_rules.GoodputLength", "max_tokens": 20},
    "pooled_logistic": {
        "_target_": "benchmarks.rival_rules.PooledLogistic",
        "threshold": np.linspace(0.05, 0.95, 19).round(2).tolist(),
        "prior": 10.0,
        "max_tokens": 20,
    },
    "best_head_policy": {"_target_": "benchmarks.rival_rules.BestHeadPolicy", "max_tokens": 20},
    "best_policy": {"_target_": "benchmarks.rival_rules.BestPolicy", "max_tokens": 20},
}
