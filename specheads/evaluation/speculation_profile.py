"""What a draft is worth on some data, as a file that other tools read: `speculation_profile.json`.

It says how often the draft's tokens are accepted by their place in a draft, how many tokens a round yields by the number of
drafted tokens, and how well a head predicts acceptance, with intervals over prompts. None of it depends on a machine; with the
seconds of a machine's steps it decides how many tokens to draft there. The
schema is in speculation_profile.schema.json. Next to a head, the file goes wherever the head goes, also to the hub.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from specheads.decoding.stopping import MAX_TOKENS, FixedLength
from specheads.evaluation.candidates import fixed_length
from specheads.evaluation.intervals import interval, sums
from specheads.evaluation.replayed_rows import reliability
from specheads.evaluation.replayed_sets import Outcome, RecordedSet, counts_of
from specheads.evaluation.setup import Setup, versions
from specheads.heads.head import AcceptanceHead, load_head
from specheads.heads.head_folder import PROFILE_FILE
from specheads.heads.portable.standalone_head import bounds_of
from specheads.replay.recording import Recording
from specheads.replay.replay import recorded_head, recorded_threshold, replay
from specheads.storage.files import write_json

logger = logging.getLogger(__name__)


def set_profile(prompts: Mapping[str, Any], recorded: RecordedSet) -> dict[str, Any]:
    """Return the numbers of one recorded set of prompts, without a head; entry k of each list is about k + 1 drafted tokens.

    `acceptance` is of a token whose draft is accepted up to it, in rounds of MAX_TOKENS drafted tokens, `survival` the chance
    that so many drafted tokens are all accepted, and `tokens_per_round` counts the target's token too.

    Args:
        prompts: what the file says of the prompts.
    """
    recording, resamples = recorded.recording, recorded.resamples
    reached, accepted = _by_place(recording, MAX_TOKENS)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.nan_to_num((resamples @ accepted) / (resamples @ reached))
    counts = counts_of(recording, [fixed_length(length) for length in range(1, MAX_TOKENS + 1)])
    totals = [sums(each, resamples) for each in counts]
    return {
        "name": recorded.name,
        "prompts": prompts,
        "num_tokens": int(recording.lengths.sum()),
        "acceptance": [interval(share) for share in shares.T],
        "survival": [interval(survival) for survival in shares.cumprod(axis=1).T],
        "tokens_per_round": [interval(each.tokens / each.target_calls) for each in totals],
        "head": None,
    }


def survival(recording: Recording, num_places: int) -> list[float]:
    """Return the probability that the first 1, 2, ... tokens of a draft are all accepted."""
    reached, accepted = (counts.sum(axis=0) for counts in _by_place(recording, num_places))
    return (accepted / np.maximum(reached, 1)).cumprod().tolist()


def _by_place(recording: Recording, num_places: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, by prompt and place in a draft, how many tokens had only accepted ones before them, and how many were accepted too.

    The drafts are of `num_places` tokens. Shapes: (P, N) each.
    """
    (rounds,) = replay(recording, [FixedLength(num_places)])
    place = np.arange(num_places)
    passed = rounds.accepted[:, None] > place
    reached = (rounds.accepted[:, None] >= place) & (rounds.drafted[:, None] > place)
    counts = np.zeros((2, recording.num_prompts, num_places))
    for part, values in zip(counts, (reached, passed), strict=True):
        np.add.at(part, rounds.prompt.astype(int), values)
    return counts[0], counts[1]


def _head_profile(recorded: RecordedSet, head: AcceptanceHead) -> dict[str, Any]:
    """Return the numbers of a head with predictions in the recording, at the threshold and the bounds that it recommends."""
    bounds, recording, logits = bounds_of(head.config.to_dict()), recorded.recording, recorded_head(head)
    most = min(bounds["max_tokens"], MAX_TOKENS)
    (rounds,) = replay(recording, [recorded_threshold(logits, bounds["threshold"], most)])
    total = sums(rounds.per_prompt(recording.num_prompts), recorded.resamples)
    curve = [row for row in reliability(recording, {"head": logits}) if row.predictor.startswith("head")][-1]
    return {
        "threshold": bounds["threshold"],
        "max_tokens": most,
        "tokens_per_round": interval(total.tokens / total.target_calls),
        "drafted_per_round": interval(total.drafted / total.target_calls),
        "expected_calibration_error": curve.ece,
        "predicted": curve.predicted,
        "observed": curve.observed,
        "share": curve.share,
    }


def write_profiles(setup: Setup, outcome: Outcome) -> None:
    """Write the profile of each head into its folder, or into the run's folder where that is on the hub or there is no head.

    Of several heads, those without a local folder get none. Without a recording there is nothing to write.
    """
    pair, settings, prompts = setup.pair, setup.settings, setup.prompts.recorded if outcome.sets else {}
    plain = [set_profile(prompts[each.name].provenance(), each) for each in outcome.sets[1:]]
    models = {
        "draft": {"id": pair.draft_id, "revision": pair.draft_revision, "dtype": str(pair.draft.dtype)},
        "target": {"id": pair.target_id, "revision": pair.target_revision, "dtype": str(pair.target.dtype)},
    }
    sizes = {"seed": settings.seed, "num_samples": settings.record.num_samples, "max_new_tokens": settings.max_new_tokens}

    def write(folder: Path, described: Mapping[str, Any], sets: Sequence[Mapping[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": 1, "verification": "token", "pair": described, "warp": asdict(settings.warp), "settings": sizes}
        write_json(folder / PROFILE_FILE, json.loads(json.dumps(content | {"sets": sets, "versions": versions()}, default=vars)))

    if plain and not setup.located_heads:
        write(setup.run_folder, models, plain)
    for located in setup.located_heads.values() if plain else ():
        is_local = Path(located.where).is_dir() and not settings.any_draft
        if not is_local and len(setup.located_heads) > 1:
            continue
        head = load_head(located.where) if is_local else located.head  # what it recommends may have changed
        described = models | {"head": {"id": Path(located.where).name, "inputs": list(head.config.inputs)}}
        try:
            sets = [known | {"head": _head_profile(each, head)} for known, each in zip(plain, outcome.sets[1:], strict=True)]
            write(Path(located.where) if is_local else setup.run_folder, described, sets)
        except OSError as error:
            logger.warning("no %s could be written into %s (%s)", PROFILE_FILE, located.where, error.strerror)
