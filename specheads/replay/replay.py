"""Walk stopping rules through a recording: the rounds that decoding would have had with them,
without a model.

A draft follows the response while its tokens are accepted, and enters the branch at the first
rejected token. This is exact for token verification, because its output does not depend on the
length of drafts.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.stopping import HeadThreshold, StoppingRule
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.recording import GROUND_TRUTH, Recording


@dataclass(frozen=True)
class Replayed:
    """Every round of a rule: arrays (rounds,), in no order.

    `prompt`, `sample` and `start` (response position) are its place.
    """

    prompt: np.ndarray
    sample: np.ndarray
    start: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    tokens: np.ndarray  # emitted

    def per_prompt(self, num_prompts: int) -> "Counts":
        size = int(self.drafted.max(initial=0)) + 1
        place = self.prompt.astype(int) * size + self.drafted
        rounds = np.bincount(place, minlength=num_prompts * size).reshape(num_prompts, size)
        return Counts(
            tokens=np.bincount(self.prompt, weights=self.tokens, minlength=num_prompts),
            drafted=np.bincount(self.prompt, weights=self.drafted, minlength=num_prompts),
            accepted=np.bincount(self.prompt, weights=self.accepted, minlength=num_prompts),
            rounds=rounds,
        )


@dataclass(frozen=True)
class Counts:
    """The counts of a rule on each prompt: arrays (P,), sums over samples."""

    tokens: np.ndarray
    drafted: np.ndarray  # also the draft's forward passes, where none is issued ahead of a stop
    accepted: np.ndarray
    rounds: np.ndarray  # (P, n + 1), how many rounds drafted 0, 1, ... n tokens

    @property
    def discarded(self) -> np.ndarray:
        return self.drafted - self.accepted

    @property
    def target_calls(self) -> np.ndarray:
        return self.rounds.sum(axis=1)


class RecordedHead:
    """A head's logits as a recording has them, with its calibration, in place of the head.

    Or the true chances of acceptance.
    """

    def __init__(
        self, name: str, predicts: str, calibration: Mapping[str, object] | None = None
    ) -> None:
        self.name = name
        # The parts of a head's config that stopping rules read.
        self.config = SimpleNamespace(
            predicts=predicts, inputs=(name,), calibration=calibration, recommended=None
        )

    def __call__(self, features: dict[str, Tensor]) -> Tensor:
        values = features[self.name]
        return values.double().logit() if self.name == GROUND_TRUTH else values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordedHead):
            return False
        return self.name == other.name and self.config.calibration == other.config.calibration

    def __hash__(self) -> int:
        return hash(self.name)


def recorded_head(head: AcceptanceHead) -> RecordedHead:
    """Return the replacement for `head` in rules that are replayed.

    `add_predictions` must have added it to the recording.
    """
    return RecordedHead(head_fingerprint(head), head.config.predicts, head.config.calibration)


def recorded_threshold(head: RecordedHead, threshold: float, max_tokens: int) -> HeadThreshold:
    """Return a rule that stops at a threshold of a recorded head, for replay only."""
    return HeadThreshold(_as_head(head), threshold, max_tokens=max_tokens)


def _as_head(head: RecordedHead) -> AcceptanceHead:
    return cast(AcceptanceHead, head)  # a rule reads its config and calls it, like a head


class Ceiling(HeadThreshold):
    """The informed ceiling: a head that knows the true acceptance probability of every drafted
    token. For replay only.
    """

    def __init__(self, threshold: float = 0.7, max_tokens: int = 20) -> None:
        head = RecordedHead(GROUND_TRUTH, "next_token")
        super().__init__(_as_head(head), threshold, min_tokens=1, max_tokens=max_tokens)


def head_logits(recording: Recording, head: RecordedHead) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a head's predictions, before calibration, for the draft's token at every position and
    sample.

    Returns, (n,) each: logits; whether each token was accepted; its largest index in a round; and
    the nodes of the predictions.
    """
    node, after, accepted, furthest = recording.labels()
    # It predicts after it has read the token, which no round does with its last one
    if head.config.predicts == "input_token":
        read = after >= 0
        node = after[read]
        accepted = accepted[read]
        furthest = furthest[read]
    return recording.features[head.name][node].double(), accepted, furthest, node


def replay(recording: Recording, rules: Sequence[StoppingRule]) -> list[Replayed]:
    """Return the rounds of every rule, in order.

    Raises UserError for one that needs more than was recorded.
    """
    rounds = dict(replay_each(recording, rules))
    return [rounds[number] for number in range(len(rules))]


def replay_each(
    recording: Recording, rules: Sequence[StoppingRule]
) -> Iterator[tuple[int, Replayed]]:
    """Yield the number of each rule with its rounds, those of one compile key together: no more
    rounds need be in memory at once.
    """
    for rule in rules:
        if rule.max_tokens > recording.max_tokens:
            raise UserError(
                f"{type(rule).__name__} drafts up to {rule.max_tokens} tokens, but the recording"
                f" has branches of {recording.max_tokens}; give a smaller max_tokens."
            )
        missing = sorted(rule.needs - recording.features.keys() - {"token"})
        if missing:
            raise UserError(
                f"{type(rule).__name__} needs {missing[0]!r}, which the recording does not have; it"
                f" has token, {', '.join(sorted(recording.features))}."
            )
    alike: dict[Hashable, list[int]] = {}  # numbers of rules by compile key
    for number, rule in enumerate(rules):
        alike.setdefault(rule.compile_key, []).append(number)
    for numbers in alike.values():
        walk = _Walk(recording, [rules[number] for number in numbers])
        yield from zip(numbers, walk.run(), strict=True)


class _Walk:
    """A walk of rules with one compile key over all responses and samples.

    A row (rule, sample, prompt) is dropped once done.
    """

    def __init__(self, recording: Recording, rules: Sequence[StoppingRule]) -> None:
        self.recording = recording
        self.rules = rules
        self.rule = rules[0]
        self.num_rules = len(rules)
        self.learns = any(rule.learns for rule in rules)
        rows_per_rule = recording.num_samples * recording.num_prompts
        row = torch.arange(self.num_rules * rows_per_rule)
        self.which = row // rows_per_rule
        self.sample = row // recording.num_prompts % recording.num_samples
        self.prompt = row % recording.num_prompts
        self.cap = torch.tensor([rule.max_tokens for rule in rules])[self.which]
        states = []
        for rule in rules:
            state = rule.start_prompt(rows_per_rule, torch.device("cpu"))
            states.append(rule.start_round(state))
        self.state = tree_map(lambda *parts: torch.cat(parts), *states)
        self.start = torch.zeros_like(row)  # the round's start, as a response position
        self.drafted = torch.zeros_like(row)
        # How deep in the branch; -1: still along the response
        self.depth = torch.full_like(row, -1)
        self.rounds: list[tuple[Tensor, ...]] = []

    @torch.no_grad()
    def run(self) -> list[Replayed]:
        self._skip_last_tokens()
        while len(self.start):
            self._step()
        columns = [torch.cat(parts).numpy() for parts in zip(*self.rounds, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        cuts = np.searchsorted(columns[0][order], np.arange(1, self.num_rules))
        split = [np.split(column[order], cuts) for column in columns[1:]]
        return [Replayed(*parts) for parts in zip(*split, strict=True)]

    def _step(self) -> None:
        """Draft one token in every row, and end the rounds that stop there."""
        recording = self.recording
        prompt = self.prompt
        first = recording.first[prompt]
        on_response = self.depth < 0
        position = (
            first
            + self.start
            + torch.where(on_response, self.drafted, self.drafted - 1 - self.depth)
        )
        accepted = on_response & recording.accepted[self.sample, position]
        self.depth = torch.where(accepted, -1, self.depth + 1)
        node = torch.where(
            accepted, position, recording.branch_first[self.sample, position] + self.depth
        )
        features = dict[str, Tensor]()
        for name in self.rule.needs:
            values = recording.tokens if name == "token" else recording.features[name]
            features[name] = values[node]
        state, stop = self.rule.step(self.state, features)
        self.state = tree_map(lambda old, new: new.to(old.dtype), self.state, state)
        self.drafted += 1
        capacity = recording.limits[prompt] - self.start - 1
        last = recording.finished[prompt] & (self.start + self.drafted == recording.lengths[prompt])
        branch_ended = self.depth + 1 == recording.branch_length[self.sample, position]
        ended = (
            stop
            | (self.drafted >= torch.minimum(capacity, self.cap))
            | torch.where(accepted, last, branch_ended)
        )
        if ended.any():
            self._end_rounds(ended.nonzero().squeeze(1))

    def _end_rounds(self, rows: Tensor) -> None:
        """End the rounds of `rows` with the token of the target, and begin their next rounds."""
        drafted = self.drafted[rows]
        accepted = drafted - 1 - self.depth[rows]
        left = self.recording.lengths[self.prompt[rows]] - self.start[rows]
        tokens = torch.minimum(accepted + 1, left)
        self._keep(rows, drafted, accepted, tokens)
        if not self.learns:
            self._end_rounds_of(self.rule, rows, drafted, accepted)
        else:  # rules with one compile key step alike, but each learns in its own way
            which = self.which[rows]
            for number in which.unique().tolist():
                of_rule = which == number
                self._end_rounds_of(
                    self.rules[number], rows[of_rule], drafted[of_rule], accepted[of_rule]
                )
        self.start[rows] += tokens
        self.drafted[rows] = 0
        self.depth[rows] = -1
        self._skip_last_tokens()

    def _end_rounds_of(
        self, rule: StoppingRule, rows: Tensor, drafted: Tensor, accepted: Tensor
    ) -> None:
        """Pass outcomes to a rule, and begin the next rounds of its rows."""
        before = tree_map(lambda value: value[rows], self.state)
        after = rule.start_round(rule.end_round(before, drafted, accepted))

        def changed(value: Tensor, old: Tensor, new: Tensor) -> Tensor:
            return value if new is old else value.index_copy(0, rows, new.to(value.dtype))

        self.state = tree_map(changed, self.state, before, after)

    def _skip_last_tokens(self) -> None:
        """Drop rows that are done.

        Where one token is left to the limit, the target emits it without a draft.
        """
        lengths = self.recording.lengths[self.prompt]
        limits = self.recording.limits[self.prompt]
        one_left = (self.start == limits - 1) & (self.start < lengths)
        if one_left.any():
            rows = one_left.nonzero().squeeze(1)
            zeros = torch.zeros_like(rows)
            self._keep(rows, zeros, zeros, zeros + 1)
            self.start[rows] += 1
        going = self.start < lengths
        if not going.all():
            rows = going.nonzero().squeeze(1)
            for name in ("which", "sample", "prompt", "cap", "start", "drafted", "depth"):
                setattr(self, name, getattr(self, name)[rows])
            self.state = tree_map(lambda value: value[rows], self.state)

    def _keep(self, rows: Tensor, drafted: Tensor, accepted: Tensor, tokens: Tensor) -> None:
        columns = [
            self.which[rows],
            self.prompt[rows],
            self.sample[rows],
            self.start[rows],
            drafted,
            accepted,
            tokens,
        ]
        self.rounds.append(tuple(column.int() for column in columns))


def oracle(recording: Recording) -> Replayed:
    """Return the rounds of the rule that stops exactly before the first rejection, without a
    longest draft (Lemma 2.1).
    """
    parts = []
    for number in range(recording.num_prompts):
        first = int(recording.first[number])
        length = int(recording.lengths[number])
        for sample in range(recording.num_samples):
            accepted = recording.accepted[sample, first : first + length].numpy()
            emitted = ~accepted  # positions that the target emits itself
            if not recording.finished[number]:
                emitted[-1] = True
            # A last round may end without a token of the target
            ends = np.append(np.flatnonzero(emitted), length)
            starts = np.append(0, ends[:-1] + 1)
            drafted = (ends - starts)[starts < length]
            starts = starts[starts < length]
            tokens = np.minimum(drafted + 1, length - starts)
            where = np.full(len(starts), number), np.full(len(starts), sample)
            parts.append((*where, starts, drafted, drafted, tokens))
    columns = map(np.concatenate, zip(*parts, strict=True))
    return Replayed(*columns)
