"""What a draft is worth on some data, as a file that other tools read: `speculation_profile.json`.

It says how often the draft's tokens are accepted by their place in a draft, how many tokens a round yields by the number of
drafted tokens, and how well a head predicts acceptance, with intervals over prompts. None of it depends on a machine; with the
seconds of a machine's steps it decides how many tokens to draft there. The
schema is in speculation_profile.schema.json. Beside a head, the file goes wherever the head goes, also to the hub.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specheads.decoding.stopping import MAX_TOKENS, FixedLength
from specheads.evaluation.intervals import Groups, Interval, interval, resample_counts
from specheads.evaluation.replayed_rows import reliability
from specheads.evaluation.replayed_sets import Outcome
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup, versions
from specheads.heads.head import AcceptanceHead, load_head
from specheads.heads.head_folder import PROFILE_FILE
from specheads.heads.portable.standalone_head import bounds_of
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, Replayed, recorded_head, recorded_threshold, replay
from specheads.storage.files import write_json

logger = logging.getLogger(__name__)

FORMAT, FILE = 1, PROFILE_FILE
VERIFICATION = "token"  # the numbers are those of token verification


@dataclass(frozen=True)
class HeadProfile:
    """A head on one set of prompts, at the threshold and the bounds that it recommends."""

    threshold: float
    max_tokens: int
    tokens_per_round: Interval
    drafted_per_round: Interval
    expected_calibration_error: float
    predicted: Sequence[float]  # acceptance in each of some bins of predictions
    observed: Sequence[float]
    share: Sequence[float]  # of the predictions in each bin


@dataclass(frozen=True)
class SetProfile:
    """A draft on one set of prompts; entry k of each sequence is about k + 1 drafted tokens."""

    name: str
    prompts: Mapping[str, Any]  # which ones
    num_tokens: int  # of the responses
    acceptance: Sequence[Interval]  # of a token whose draft is accepted up to it, in rounds of MAX_TOKENS drafted tokens
    survival: Sequence[Interval]  # the chance that so many drafted tokens are all accepted
    tokens_per_round: Sequence[Interval]  # of rounds with so many drafted tokens, the target's token included
    head: HeadProfile | None = None


@dataclass(frozen=True)
class Profile:
    """The content of the file."""

    pair: Mapping[str, Any]
    warp: Mapping[str, Any]
    settings: Mapping[str, Any]
    sets: Sequence[SetProfile]
    versions: Mapping[str, str]

    def write(self, folder: Path) -> Path:
        """Write the file into a folder, which is made if it is not there; return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, {"format": FORMAT, "verification": VERIFICATION, **asdict(self)})
        return folder / FILE


def set_profile(name: str, prompts: Mapping[str, Any], recording: Recording, groups: Groups) -> SetProfile:
    """Return the numbers of one recorded set of prompts, without a head.

    Args:
        prompts: what the file says of the prompts.
        groups: the group of each prompt, which the intervals resample.
    """
    resamples = resample_counts(groups)
    lengths = range(1, MAX_TOKENS + 1)
    rounds = replay(recording, [FixedLength(length) for length in lengths])
    tried, accepted = _by_place(rounds[-1], recording.num_prompts)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.nan_to_num((resamples @ accepted) / (resamples @ tried))
    return SetProfile(
        name,
        prompts,
        int(recording.lengths.sum()),
        [interval(share) for share in shares.T],
        [interval(survival) for survival in shares.cumprod(axis=1).T],
        [interval(_per_round(each.per_prompt(recording.num_prompts), resamples)[0]) for each in rounds],
    )


def _by_place(rounds: Replayed, num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, by prompt and place in a draft, how many tokens had only accepted ones before them, and how many were accepted too.

    Shapes: (P, MAX_TOKENS) each.
    """
    place = np.arange(MAX_TOKENS)
    passed = rounds.accepted[:, None] > place
    reached = (rounds.accepted[:, None] >= place) & (rounds.drafted[:, None] > place)
    sums = np.zeros((2, num_prompts, MAX_TOKENS))
    for part, values in zip(sums, (reached, passed), strict=True):
        np.add.at(part, rounds.prompt.astype(int), values)
    return sums[0], sums[1]


def _per_round(counts: Counts, resamples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the drafted tokens of a round, (1 + R,) each."""
    rounds = resamples @ counts.target_calls
    return (resamples @ counts.tokens) / rounds, (resamples @ counts.drafted) / rounds


def head_profile(recording: Recording, groups: Groups, head: AcceptanceHead) -> HeadProfile:
    """Return the numbers of a head with predictions in the recording."""
    resamples = resample_counts(groups)
    bounds, recorded = bounds_of(head.config.to_dict()), recorded_head(head)
    bounds["max_tokens"] = min(bounds["max_tokens"], MAX_TOKENS)
    (rounds,) = replay(recording, [recorded_threshold(recorded, bounds["threshold"], bounds["max_tokens"])])
    tokens, drafted = _per_round(rounds.per_prompt(recording.num_prompts), resamples)
    curve = [row for row in reliability(recording, {"head": recorded}) if row.predictor.startswith("head")][-1]
    return HeadProfile(
        bounds["threshold"],
        bounds["max_tokens"],
        interval(tokens),
        interval(drafted),
        curve.ece,
        curve.predicted,
        curve.observed,
        curve.share,
    )


def write_profiles(setup: Setup[Evaluation], outcome: Outcome) -> None:
    """Write the profile of each head into its folder, or into the run's folder where that is on the hub or there is no head.

    Of several heads, those without a local folder get none. Without a recording there is nothing to write.
    """
    if not outcome.recorded:
        return
    recorded = outcome.recorded[1:]
    plain = [
        set_profile(each.name, setup.prompts.recorded()[each.name].provenance(), each.recording, each.groups) for each in recorded
    ]
    ids = {
        "draft": {"id": setup.pair.draft_id, "revision": setup.pair.draft_revision, "dtype": str(setup.pair.draft.dtype)},
        "target": {"id": setup.pair.target_id, "revision": setup.pair.target_revision, "dtype": str(setup.pair.target.dtype)},
    }
    settings = setup.settings
    sizes = {"seed": settings.seed, "num_samples": settings.record.num_samples, "max_new_tokens": settings.max_new_tokens}
    profile = Profile(ids, asdict(settings.warp), sizes, plain, versions())
    if not setup.located_heads:
        profile.write(setup.run_folder)
    for located in setup.located_heads.values():
        is_local = Path(located.where).is_dir() and not settings.any_draft
        if not is_local and len(setup.located_heads) > 1:
            continue
        head = load_head(located.where) if is_local else located.head  # what it recommends may have changed
        described = ids | {"head": {"id": Path(located.where).name, "inputs": list(head.config.inputs)}}
        sets = [
            replace(known, head=head_profile(each.recording, each.groups, head))
            for known, each in zip(plain, recorded, strict=True)
        ]
        try:
            replace(profile, pair=described, sets=sets).write(Path(located.where) if is_local else setup.run_folder)
        except OSError as error:
            logger.warning("no %s could be written into %s (%s)", FILE, located.where, error.strerror)
