"""What each way to decode would be worth, from recorded prompts and measured steps; every choice is made on other prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, Logistic
from specheads.evaluation.candidates import CEILING, FIXED, ORACLE, ORACLE_BOUND, Candidate, RuleChoice, candidates, fixed_length
from specheads.evaluation.intervals import Interval, interval, resample_counts
from specheads.evaluation.replayed_sets import RecordedSet, counts_of
from specheads.evaluation.rule_costs import CostTable, Tuning
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, check_finite, overlap
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts
from specheads.replay.response_batch import ResponseBatch

PLAIN, FIXED_NAME, LOGISTIC = "the target alone", "fixed length", "logistic"
BETTER, HEAD = "a better draft", "head of width "  # the last is followed by the width
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


@torch.no_grad()
def agreement(pair: Pair, recording: Recording, warp: Warp) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return how far a pair agrees before each token of the responses of a recording, by response (N,).

    Returns the overlaps of the two distributions, and the target's probability of tokens that the draft does not know.
    """
    overlaps, unknown, device, known = [], [], pair.draft_lm.device, pair.known_to_draft
    is_unknown = (torch.zeros(pair.vocab_size, dtype=torch.bool) if known is None else ~known).to(device)
    for number, prompt in enumerate(recording.prompts):
        batch = ResponseBatch.of([np.array(prompt)], [np.array(recording.response(number))], device)
        probs = [warp(lm.logits(batch.states(lm))).to(device) for lm in (pair.draft_lm, pair.target_lm)]
        for model_id, each in zip((pair.draft_id, pair.target_id), probs, strict=True):
            check_finite(model_id, each)
        overlaps.append(overlap(*probs).double().cpu().numpy())
        unknown.append((probs[1] * is_unknown).sum(dim=1).double().cpu().numpy())
    return overlaps, unknown


def better_draft(recording: Recording, gain: float, seed: int = 0) -> Recording:
    """Return the recording of a draft whose tokens are accepted more often by a share `gain`, for fixed lengths only.

    Rejections become acceptances at random, equally likely everywhere.
    """
    share = recording.accepted.double().mean().item()
    flipped = min(1.0, share * gain / max(1e-9, 1 - share))
    uniform = torch.rand(recording.accepted.shape, generator=torch.Generator().manual_seed(seed))
    return replace(recording, accepted=recording.accepted | (uniform < flipped))


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


def predict(halves: Sequence[RecordedSet], times: StepTimes, greedy: bool, overheads: Overheads = Overheads()) -> list[Option]:
    """Return every option, the target alone first.

    Lengths and thresholds are chosen on one half of the prompts and counted on the other, both ways.
    """
    costs = replace(times.costs, round_seconds=overheads.round_seconds)
    alone = costs.target_seconds + overheads.alone_seconds
    more = {LOGISTIC: times.rules[LOGISTIC].step_seconds}  # seconds that a family of rules adds to a draft step
    resamples = resample_counts([group for half in halves for group in half.groups or ()])
    better = [better_draft(half.recording, MORE_OVERLAP) for half in halves]
    counted: dict[str, list[tuple[Counts, str]]] = {}  # by option, of each half its counts at what the other half chose
    for number, half in enumerate(halves):
        for family, candidate in _best_rules(halves[1 - number].recording, costs, more).items():
            counted.setdefault(family, []).append((counts_of(half.recording, [candidate])[0], candidate.name))
        chosen = fixed_length(_best_length([better[1 - number]], costs))
        counted.setdefault(BETTER, []).append((counts_of(better[number], [chosen])[0], chosen.name))
        counted.setdefault(ORACLE, []).append((counts_of(half.recording, [ORACLE_BOUND])[0], ""))
    speeds = {
        name: _throughput([counts for counts, _ in made], costs, more.get(name, 0.0), resamples) * alone
        for name, made in counted.items()
    }
    options = [Option(PLAIN, Interval(1.0, 1.0, 1.0), interval(1 / speeds[FIXED]))]
    for name, samples in speeds.items():
        value = " or ".join(dict.fromkeys(value for _, value in counted[name]))
        title, is_bound = name.replace("_", " "), name in (CEILING, ORACLE)
        options.append(Option(title, interval(samples), interval(samples / speeds[FIXED]), value, is_bound))
    ceiling = [counts for counts, _ in counted[CEILING]]
    # A head's rule drafts about as much per emitted token as the ceiling's.
    drafted = sum(each.drafted.sum() for each in ceiling) / sum(each.tokens.sum() for each in ceiling)
    for name, rule in times.rules.items():
        if name != LOGISTIC:
            slowed = rule.step_seconds * drafted / alone
            options.append(_head_option(name, speeds[FIXED], speeds[CEILING], slowed, HEAD_SHARES[greedy]))
    return options


def best_length(halves: Sequence[RecordedSet], times: StepTimes) -> int:
    """Return the fixed length that is the fastest on all prompts."""
    return _best_length([half.recording for half in halves], replace(times.costs, round_seconds=0.0))


def _best_length(recordings: Sequence[Recording], costs: StepCosts) -> int:
    lengths = [fixed_length(length) for length in LENGTHS]
    by_length = zip(*(counts_of(recording, lengths) for recording in recordings), strict=True)
    return LENGTHS[int(np.argmax([_throughput(counts, costs)[0] for counts in by_length]))]


def _throughput(counts: Sequence[Counts], costs: StepCosts, more: float = 0.0, resamples: np.ndarray | None = None) -> np.ndarray:
    """Return the tokens per second (R,) of counts, with so many seconds more in each draft step; without resamples (1,)."""
    seconds = np.concatenate([costs.seconds(each.drafted, each.rounds) + more * each.drafted for each in counts])
    tokens = np.concatenate([each.tokens for each in counts])
    resamples = np.ones((1, len(tokens))) if resamples is None else resamples
    return (resamples @ tokens) / (resamples @ seconds)


def _best_rules(recording: Recording, costs: StepCosts, more: Mapping[str, float]) -> dict[str, Candidate]:
    """Return the fastest candidate of each family on a recording, to which open parameters are fitted."""
    rules = candidates(RULES, {}, Tuning(recording, CostTable({HERE: costs})))
    best: dict[str, tuple[float, Candidate]] = {}
    for candidate, counts in zip(rules, counts_of(recording, rules), strict=True):
        speed = _throughput([counts], costs, more.get(candidate.family, 0.0))[0]
        if candidate.family not in best or speed > best[candidate.family][0]:
            best[candidate.family] = (speed, candidate)
    return {family: candidate for family, (_, candidate) in best.items()}


def _head_option(name: str, fixed: np.ndarray, ceiling: np.ndarray, slowed: float, shares: Sequence[float]) -> Option:
    """Return a head at the shares of the gap that heads have closed elsewhere: the least, a typical one, the most.

    Args:
        fixed, ceiling: speed-ups (1 + R,).
        slowed: what the head adds to each emitted token, in tokens of the target alone.
    """
    least, typical, most = (1 / (1 / (fixed + share * (ceiling - fixed)) + slowed) for share in shares)
    speedup = Interval(float(typical[0]), interval(least).low, interval(most).high)
    gain = Interval(float((typical / fixed)[0]), interval(least / fixed).low, interval(most / fixed).high)
    return Option(name, speedup, gain, width=int(name.removeprefix(HEAD)))
