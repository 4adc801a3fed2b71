"""What each way to decode would be worth, from recorded prompts and measured steps; every choice is made on other prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.step_times import StepTimes
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, Logistic
from specheads.evaluation.candidates import CEILING, FIXED, ORACLE, Candidate, RuleChoice, candidates
from specheads.evaluation.intervals import Groups, Interval, interval, resample_counts
from specheads.evaluation.rule_costs import CostTable, Tuning
from specheads.integrations.served_target import ServedModel
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, check_finite, overlap
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, oracle, replay, rounds_by_length
from specheads.replay.response_batch import ResponseBatch


@dataclass(frozen=True)
class Agreement:
    """Draft and target along the responses of P prompts: by prompt, one number for each token of its response."""

    overlaps: Sequence[np.ndarray]  # of the two distributions, before each token
    draft_logprob: Sequence[np.ndarray]  # of the response's tokens under the warped draft
    target_logprob: Sequence[np.ndarray]
    unknown: Sequence[np.ndarray]  # the target's probability of tokens that the draft does not know
    left_out: Sequence[np.ndarray] = ()  # that of tokens that a server which runs the target does not name

    @property
    def sums(self) -> np.ndarray:
        """The sum of overlaps and the number of tokens by prompt, (P, 2)."""
        return np.array([[each.sum(), len(each)] for each in self.overlaps])


@torch.no_grad()
def agreement(pair: Pair, recording: Recording, warp: Warp) -> Agreement:
    """Return how far a pair agrees along the responses of a recording."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    left_out: list[np.ndarray] = []
    known = pair.known_to_draft
    unknown = torch.zeros(pair.vocab_size, dtype=torch.bool) if known is None else ~known
    unknown = unknown.to(pair.draft_lm.device)
    for number, prompt in enumerate(recording.prompts):
        batch = ResponseBatch.of([np.array(prompt)], [np.array(recording.response(number))], pair.draft_lm.device)
        said = batch.response_tokens[:, None]
        states = {lm: batch.states(lm) for lm in (pair.draft_lm, pair.target_lm)}
        probs = [warp(lm.logits(each)).to(pair.draft_lm.device) for lm, each in states.items()]
        for model_id, each in zip((pair.draft_id, pair.target_id), probs, strict=True):
            check_finite(model_id, each)
        values = [overlap(*probs), *(each.gather(1, said).squeeze(1).log() for each in probs), (probs[1] * unknown).sum(dim=1)]
        for column, value in zip(columns, values, strict=True):
            column.append(value.double().cpu().numpy())
        if isinstance(pair.target_lm, ServedModel):
            left_out.append(pair.target_lm.left_out(states[pair.target_lm]).double().numpy())
    return replace(Agreement(*columns), left_out=left_out)


def survival(recording: Recording, longest: int) -> list[float]:
    """Return the chance that at least 1, 2, ... `longest` tokens of a draft are accepted, from any position of the responses."""
    runs = _runs_from(recording)
    return [float((runs >= length).double().mean()) for length in range(1, longest + 1)]


def _runs_from(recording: Recording) -> Tensor:
    """Return how many drafted tokens are accepted from each position on at which a draft may begin, (n,)."""
    accepted, ends = recording.accepted, torch.zeros(recording.accepted.shape[1], dtype=torch.bool)
    ends[recording.first + recording.lengths - 1] = True
    runs = torch.zeros(accepted.shape, dtype=torch.long)
    after = torch.zeros(len(accepted), dtype=torch.long)
    for position in range(accepted.shape[1] - 1, -1, -1):
        after = torch.where(accepted[:, position], 1 + (0 if ends[position] else after), 0)
        runs[:, position] = after
    return runs[accepted | (recording.branch_length > 0)]


def fixed_counts(recording: Recording, lengths: Sequence[int]) -> list[Counts]:
    """Return the counts of fixed lengths under token verification."""
    return [rounds.per_prompt(recording.num_prompts) for rounds in replay(recording, [FixedLength(each) for each in lengths])]


def better_draft(recording: Recording, gain: float, seed: int = 0) -> Recording:
    """Return the recording of a draft whose tokens are accepted more often by a share `gain`, for fixed lengths only.

    Rejections become acceptances at random, equally likely everywhere.
    """
    share = recording.accepted.double().mean().item()
    flipped = min(1.0, share * gain / max(1e-9, 1 - share))
    uniform = torch.rand(recording.accepted.shape, generator=torch.Generator().manual_seed(seed))
    return replace(recording, accepted=recording.accepted | (uniform < flipped))


def chance_accepted(draft_logprob: Tensor, target_logprob: Tensor) -> Tensor:
    """Return the chance that at least 1, 2, ... N tokens were accepted in a round that begins with the first, (..., N).

    Block verification's output follows the target whatever is drafted, so rounds can be drawn after the response. Write D and T
    for the probabilities of a draft's first n tokens under the draft and the target. A path is drafted and at least n of its
    tokens are accepted with probability D p_n, where p_n = min(1, p_{n-1} t / d); that is min(D_n, D_{n-1} p_{n-1} t). Divided by
    T, the chance of the path in the output, it is the smallest D / T so far, at most 1. The law is ours.

    Args:
        draft_logprob, target_logprob: (..., N), of a response's tokens.
    """
    ratio = (draft_logprob - target_logprob).cumsum(dim=-1)
    return ratio.cummin(dim=-1).values.clamp_max(0).exp()


def block_counts(recording: Recording, agreed: Agreement, lengths: Sequence[int], seed: int = 0) -> list[Counts]:
    """Return the counts of fixed lengths under block verification; each sample of the recording is another draw of the rounds."""
    rng = np.random.default_rng(seed)
    uniforms = [rng.random((recording.num_samples, int(length))) for length in recording.lengths]
    return [_block_counts(recording, agreed, length, uniforms) for length in lengths]


def _block_counts(recording: Recording, agreed: Agreement, length: int, uniforms: Sequence[np.ndarray]) -> Counts:
    rows = []
    for prompt, (draft, target) in enumerate(zip(agreed.draft_logprob, agreed.target_logprob, strict=True)):
        total, limit = int(recording.lengths[prompt]), int(recording.limits[prompt])
        # From every position, the chances that the next tokens are accepted; beyond the response's end, never.
        chance = np.zeros((total, length))
        for start in range(total):
            window = slice(start, start + length)
            known = chance_accepted(torch.from_numpy(draft[window]), torch.from_numpy(target[window])).numpy()
            chance[start, : len(known)] = known
        for uniform in uniforms[prompt]:
            start = 0
            while start < total:
                drafted = min(length, limit - start - 1)
                # An end of the response that was drafted ends the draft too.
                accepted = int((chance[start, :drafted] > uniform[start]).sum())
                if bool(recording.finished[prompt]) and start + accepted >= total:
                    accepted = drafted = total - start
                tokens = min(accepted + 1, total - start)
                rows.append((prompt, drafted, accepted, tokens))
                start += tokens
    prompt_of, *columns = (np.array(column) for column in zip(*rows, strict=True))
    drafted_of, accepted_of, tokens_of = (
        np.bincount(prompt_of, weights=column, minlength=recording.num_prompts) for column in columns
    )
    return Counts(tokens_of, drafted_of, accepted_of, rounds_by_length(prompt_of, columns[0], recording.num_prompts))


PLAIN, FIXED_NAME, LOGISTIC = "the target alone", "fixed length", "logistic"
BLOCK, BETTER, HEAD = "block verification", "a better draft", "head of width "  # the last is followed by the width
HERE = "here"  # the name of the measured costs
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(2, 20))
RULES = {
    FIXED: RuleChoice(FixedLength, {"num_tokens": list(LENGTHS)}),
    LOGISTIC: RuleChoice(
        Logistic,
        {"threshold": list(THRESHOLDS), "weights": {"logit_max_prob": None, "bias": None}, "max_tokens": MAX_TOKENS},
    ),
}
# Of the way from the best fixed length to the informed ceiling, what trained heads closed on mini at ratios 5 to 20, with less
# than 1 % of a draft step for their cost: the least and the most on two sets of prompts, and a value between them
# (docs/measurements/rules.md, rules_sampled and rules_greedy). A probe of mini itself is therefore no test of them.
HEAD_SHARES = {False: (0.29, 0.32, 0.37), True: (0.38, 0.43, 0.52)}  # by whether decoding is greedy
MORE_OVERLAP = 0.1  # half of what distillation added to the overlap of nano's and mini's drafts


@dataclass(frozen=True)
class Half:
    """The recording of one half of the prompts, with what both models say along the responses."""

    recording: Recording
    agreed: Agreement
    groups: Sequence[str]


@dataclass(frozen=True)
class Overheads:
    """The seconds that decoding takes besides its steps: of a round with a draft, and of a token of the target alone."""

    round_seconds: float = 0.0
    alone_seconds: float = 0.0


@dataclass(frozen=True)
class Option:
    """One way to decode, and the speed-up over the target alone that is predicted for it."""

    name: str
    speedup: Interval
    gain: Interval  # speed-up over that of the best fixed length, a ratio, on the same resampled prompts
    value: str = ""  # what was chosen for it, such as a length
    is_bound: bool = False  # whether no decoder can reach it
    width: int | None = None  # of its head


@dataclass
class Counted:
    """The counts of one way to decode on each half of the prompts, and what was chosen for it."""

    counts: list[Counts] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def add(self, counts: Counts, chosen: str) -> None:
        """Add the counts of the next half."""
        self.counts.append(counts)
        self.chosen.append(chosen)


def predict(halves: Sequence[Half], times: StepTimes, greedy: bool, overheads: Overheads | None = None) -> list[Option]:
    """Return every option, the target alone first.

    Lengths and thresholds are chosen on one half of the prompts and counted on the other, both ways.
    """
    return Prediction(halves, times, greedy, overheads or Overheads()).options()


def fixed_of(options: Sequence[Option]) -> Option:
    """Return the best fixed length of some options."""
    return next(option for option in options if option.name == FIXED_NAME)


def best_length(halves: Sequence[Half], times: StepTimes, greedy: bool) -> int:
    """Return the fixed length that is the fastest on all prompts."""
    prediction = Prediction(halves, times, greedy, Overheads())
    counts = zip(*(fixed_counts(half.recording, LENGTHS) for half in halves), strict=True)
    speeds = [prediction.speeds(of_halves, 0.0)[0] for of_halves in counts]
    return LENGTHS[int(np.argmax(speeds))]


class Prediction:
    """The counts of every option on all prompts, each half at what the other half chose."""

    def __init__(self, halves: Sequence[Half], times: StepTimes, greedy: bool, overheads: Overheads) -> None:
        self.costs = replace(times.costs, round_seconds=overheads.round_seconds)
        self.halves, self.times, self.greedy = halves, times, greedy
        self.table, self.alone = CostTable({HERE: self.costs}), self.costs.target_seconds + overheads.alone_seconds
        groups: Groups = [group for half in halves for group in half.groups]
        self.resamples = resample_counts(groups)

    def options(self) -> list[Option]:
        """Return every option."""
        counted = self._rules_counted() | self._lengths_counted()
        counted[ORACLE] = Counted([oracle(half.recording).per_prompt(half.recording.num_prompts) for half in self.halves])
        speeds = {name: self.speeds(each.counts, self._more(name)) for name, each in counted.items()}
        fixed = speeds[FIXED]
        options = [Option(PLAIN, Interval(1.0, 1.0, 1.0), interval(1 / fixed))]
        for name, samples in speeds.items():
            chosen = " or ".join(dict.fromkeys(counted[name].chosen))
            is_bound = name in (CEILING, ORACLE)
            options.append(Option(name.replace("_", " "), interval(samples), interval(samples / fixed), chosen, is_bound))
        return options + self._heads(counted[CEILING].counts, speeds)

    def _rules_counted(self) -> "dict[str, Counted]":
        """Return the counts of every rule, on each half with the value that was the best on the other."""
        counted: dict[str, Counted] = {}
        for number, half in enumerate(self.halves):
            for family, candidate in self._best(self.halves[1 - number]).items():
                rounds = replay(half.recording, [candidate.rule])[0]
                counted.setdefault(family, Counted()).add(rounds.per_prompt(half.recording.num_prompts), candidate.name)
        return counted

    def _lengths_counted(self) -> "dict[str, Counted]":
        """Return the counts of fixed lengths under block verification, and of those of a better draft."""
        counted: dict[str, Counted] = {}
        ways: dict[str, Callable[[Half], Sequence[Counts]]] = {
            BLOCK: lambda half: block_counts(half.recording, half.agreed, LENGTHS),
            BETTER: lambda half: fixed_counts(better_draft(half.recording, MORE_OVERLAP), LENGTHS),
        }
        for name in (BETTER,) if self.greedy else (BLOCK, BETTER):  # block verification is token verification then
            lengths = [dict(zip(LENGTHS, ways[name](half), strict=True)) for half in self.halves]
            for number, counts in enumerate(lengths):
                other = lengths[1 - number]
                best = max(LENGTHS, key=lambda length, other=other: self._total(other[length]))  # type: ignore[misc]
                counted.setdefault(name, Counted()).add(counts[best], f"fixed K={best}")
        return counted

    def _more(self, family: str) -> float:
        """Return the seconds that a family of rules adds to a draft step."""
        return self.times.rules[LOGISTIC].step_seconds if family == LOGISTIC else 0.0

    def _best(self, half: Half) -> dict[str, Candidate]:
        """Return the fastest candidate of each family on one half, to which open parameters are fitted."""
        recording = half.recording
        rules = candidates(RULES, {}, Tuning(recording, self.table))
        best: dict[str, tuple[float, Candidate]] = {}
        for candidate, rounds in zip(rules, replay(recording, [rule.rule for rule in rules]), strict=True):
            speed = self._total(rounds.per_prompt(recording.num_prompts), self._more(candidate.family))
            if candidate.family not in best or speed > best[candidate.family][0]:
                best[candidate.family] = (speed, candidate)
        return {family: candidate for family, (_, candidate) in best.items()}

    def _heads(self, of_ceiling: Sequence[Counts], speeds: Mapping[str, np.ndarray]) -> list[Option]:
        """Return heads of every width that was timed, at the share of the gap that heads have closed elsewhere."""
        fixed, ceiling = speeds[FIXED], speeds[CEILING]
        # A head's rule drafts about as much per emitted token as the ceiling's.
        drafted = sum(each.drafted.sum() for each in of_ceiling) / sum(each.tokens.sum() for each in of_ceiling)
        options = []
        for name, rule in self.times.rules.items():
            if name == LOGISTIC:
                continue
            seconds = rule.step_seconds
            least, typical, most = (
                self._slowed(fixed + share * (ceiling - fixed), seconds * drafted) for share in HEAD_SHARES[self.greedy]
            )
            speedup, gain = (
                Interval(float(each[1][0]), interval(each[0]).low, interval(each[2]).high)
                for each in ((least, typical, most), (least / fixed, typical / fixed, most / fixed))
            )
            options.append(Option(name, speedup, gain, width=int(name.removeprefix(HEAD))))
        return options

    def _slowed(self, speed: np.ndarray, seconds: float) -> np.ndarray:
        """Return speed-ups with so many seconds more for each emitted token."""
        return 1 / (1 / speed + seconds / self.alone)

    def _total(self, counts: Counts, more: float = 0.0) -> float:
        seconds = self.costs.seconds(counts.drafted, counts.rounds).sum() + more * counts.drafted.sum()
        return float(counts.tokens.sum() / seconds * self.alone)

    def speeds(self, counts: Sequence[Counts], more: float) -> np.ndarray:
        """Return the speed-ups (R,) of counts of each half, with so many seconds more in each draft step."""
        seconds = np.concatenate([self.costs.seconds(each.drafted, each.rounds) + more * each.drafted for each in counts])
        tokens = np.concatenate([each.tokens for each in counts])
        return (self.resamples @ tokens) / (self.resamples @ seconds) * self.alone
