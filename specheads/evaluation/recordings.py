"""Recordings of sets of prompts, with the predictions of heads: each is made once and read by every command that needs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specheads.decoding.stopping import MAX_TOKENS
from specheads.evaluation.candidates import longest_draft
from specheads.evaluation.intervals import Groups
from specheads.evaluation.setup import Setup
from specheads.forecast import progress
from specheads.heads.head import AcceptanceHead
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.prompts.encoding import EncodedPrompt, ResponseLimits
from specheads.replay.head_scores import add_predictions, head_fingerprint, predictor_names
from specheads.replay.recording import GROUND_TRUTH, Recording, load_recording, make_recording
from specheads.replay.response_tree import RecordSettings


@dataclass(frozen=True)
class RecordedSet:
    """The recording of one set of prompts."""

    name: str
    role: str  # dev: rules are tuned on it; test: they are not
    recording: Recording
    groups: Groups  # the group of each prompt


@dataclass(frozen=True)
class Recorder:
    """How prompts are recorded: everything that decides a recording but the prompts and the heads."""

    pair: Pair
    warp: Warp
    limits: ResponseLimits
    settings: RecordSettings
    seed: int
    folder: Path  # that holds all recordings

    def record(
        self, sets: Mapping[str, Sequence[EncodedPrompt]], heads: Sequence[AcceptanceHead], ground_truth: bool
    ) -> dict[str, Recording]:
        """Return the recording of each set of prompts by name.

        It has the predictions of `heads`, all made in one forward pass, and with `ground_truth` the true acceptance
        probabilities.
        """
        named, total = {head_fingerprint(head): head for head in heads}, sum(map(len, sets.values()))
        folders = {}
        with progress("recording", total) as advance:
            for name, prompts in sets.items():
                folders[name] = make_recording(
                    self.pair, prompts, self.warp, self.limits, self.settings, self.seed, self.folder, advance
                )
        with progress("predicting", (bool(named) + bool(ground_truth)) * total) as advance:
            for folder in folders.values():
                add_predictions(folder, self.pair, named, ground_truth, advance)
        names = [*predictor_names(named), *([GROUND_TRUTH] if ground_truth else [])]
        return {name: load_recording(folder, names) for name, folder in folders.items()}


def record(setup: Setup) -> list[RecordedSet]:
    """Return the recordings of all sets of prompts of an evaluation, dev prompts first."""
    settings, sets = setup.settings, setup.prompts.recorded()
    longest = max(longest_draft(setup.rules), MAX_TOKENS)  # so that fewer rules need no other recording
    amounts = RecordSettings(settings.record.num_samples, longest, settings.record.batch_size)
    limits = replace(setup.prompt_data.limits, max_new_tokens=settings.max_new_tokens)
    recorder = Recorder(setup.pair, settings.warp, limits, amounts, settings.seed, setup.data_folder)
    prompts = {name: prompt_set.prompts for name, prompt_set in sets.items()}
    recordings = recorder.record(prompts, list(setup.heads.values()), settings.record.ground_truth)
    return [
        RecordedSet(name, sets[name].role, recording, setup.prompts.groups_of(recording.prompt_ids))
        for name, recording in recordings.items()
    ]
