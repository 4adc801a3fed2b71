"""What a draft is worth on some data, as a file that other tools read: `speculation_profile.json`.

It says how often the draft's tokens are accepted by their place in a draft, how many tokens a round yields by the number of
drafted tokens, and how well a head predicts acceptance, with intervals over prompts. None of it depends on a machine; with the
seconds of a machine's steps it decides how many tokens to draft there. The
schema is in speculation_profile.schema.json. Beside a head, the file goes wherever the head goes, also to the hub.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specheads.decoding.stopping import MAX_TOKENS, FixedLength
from specheads.errors import UserError
from specheads.evaluation.intervals import Groups, Interval, interval, resample_counts
from specheads.evaluation.replayed_rows import reliability
from specheads.heads.head import AcceptanceHead
from specheads.heads.head_folder import PROFILE_FILE
from specheads.heads.portable.standalone_head import bounds_of
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, Replayed, recorded_head, recorded_threshold, replay
from specheads.storage.files import read_json, write_json

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


def set_profile(
    name: str, prompts: Mapping[str, Any], recording: Recording, groups: Groups, head: AcceptanceHead | None = None
) -> SetProfile:
    """Return the numbers of one recorded set of prompts.

    Args:
        prompts: what the file says of the prompts.
        groups: the group of each prompt, which the intervals resample.
        head: one with predictions in the recording.
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
        None if head is None else _head_profile(recording, resamples, head),
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


def _head_profile(recording: Recording, resamples: np.ndarray, head: AcceptanceHead) -> HeadProfile:
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


def read_profile(path: Path) -> Profile:
    """Return the profile in a file. Raises UserError if it is none."""
    try:
        content = read_json(path)
        if (content.pop("format"), content.pop("verification")) != (FORMAT, VERIFICATION):
            raise ValueError("another format")
        sets = [_set_of(each) for each in content.pop("sets")]
        ids = [content["pair"][role]["id"] for role in ("draft", "target")]
        if not sets or not all(isinstance(text, str) for text in (*ids, *(each.name for each in sets))):
            raise ValueError("no names")
        return Profile(**content, sets=sets)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a {FILE}, which specheads profile writes.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is no speculation profile of format {FORMAT}; specheads profile writes one.") from None


def _set_of(content: dict[str, Any]) -> SetProfile:
    head = content["head"]
    if head is not None:
        rounds = {name: Interval.of(head[name]) for name in ("tokens_per_round", "drafted_per_round")}
        content["head"] = HeadProfile(**(head | rounds))
    for name in ("acceptance", "survival", "tokens_per_round"):
        content[name] = [Interval.of(each) for each in content[name]]
    profile = SetProfile(**content)
    chances = [each.value for each in profile.acceptance]
    if len(chances) != MAX_TOKENS or not all(0 <= chance <= 1 for chance in chances):
        raise ValueError(f"acceptance must be {MAX_TOKENS} probabilities")
    return profile
