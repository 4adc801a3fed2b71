"""The drafts that a recording holds, token by token for a batch of rows: what decoding would have drafted there."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from specheads.errors import UserError
from specheads.replay.recording import Recording


@dataclass
class Rows:
    """Rows of a batch in one round: each is somewhere in a response of one acceptance sample; arrays (R,) long.

    `depth` is the place in the branch of the newest token, -1 while all drafted tokens are accepted.
    """

    prompt: np.ndarray
    sample: np.ndarray
    start: np.ndarray  # response position at which the round began
    depth: np.ndarray

    @classmethod
    def at(cls, prompt: np.ndarray, sample: np.ndarray, start: np.ndarray) -> "Rows":
        """Return rows at the start of a round."""
        return cls(prompt, sample, start, np.full(len(start), -1))


class RecordedDrafts:
    """A recording as numpy arrays, with the features that policies read.

    Raises:
        UserError: a feature that was not recorded.
    """

    def __init__(self, recording: Recording, needs: Collection[str] = ()) -> None:
        known = {*recording.features, *recording.in_rounds}
        if unknown := sorted(set(needs) - known):
            raise UserError(f"the recording has no {unknown[0]}; it has {', '.join(sorted(known))}.")
        self.recording, self.needs, self.max_tokens = recording, tuple(sorted(needs)), recording.max_tokens
        names = ("first", "lengths", "limits", "finished", "accepted", "branch_first", "branch_length")
        self.first, self.lengths, self.limits, self.finished, self.accepted, self.branch_first, self.branch_length = (
            getattr(recording, name).numpy() for name in names
        )
        self.prompt_lengths = np.array([len(prompt) for prompt in recording.prompts])

    def capacity(self, rows: Rows) -> np.ndarray:
        """Return how many tokens may be drafted, (R,): the last one to the length limit is the target's."""
        return self.limits[rows.prompt] - rows.start - 1

    def left(self, rows: Rows) -> np.ndarray:
        """Return how many tokens of the responses are still to be emitted, (R,)."""
        return self.lengths[rows.prompt] - rows.start

    def draft(self, rows: Rows, which: np.ndarray, place: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Draft the token at `place` of the rows `which` (n,), whose depths move on.

        Returns the features of the tokens by name, (n,) each, and whether the draft ends with them, (n,) bool: an end-of-sequence
        token, or the end of what was recorded.
        """
        prompt, sample, depth = rows.prompt[which], rows.sample[which], rows.depth[which]
        on_response, first = depth < 0, self.first[prompt]
        position = first + rows.start[which] + np.where(on_response, place, place - 1 - depth)
        accepted = on_response & self.accepted[sample, position]
        depth = np.where(accepted, -1, depth + 1)
        node = np.where(accepted, position, self.branch_first[sample, position] + depth)
        rows.depth[which] = depth
        num_before = position - first - rows.start[which]
        last = self.finished[prompt] & (rows.start[which] + place + 1 == self.lengths[prompt])
        ended = np.where(accepted, last, depth + 1 == self.branch_length[sample, position])
        return {name: self._feature(name, node, num_before) for name in self.needs}, ended

    def _feature(self, name: str, node: np.ndarray, num_before: np.ndarray) -> np.ndarray:
        values = self.recording.feature(name, torch.from_numpy(node), torch.from_numpy(num_before))
        return values.numpy().astype(np.float64)
