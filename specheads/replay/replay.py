"""Walk stopping rules through a recording: the rounds that decoding would have had with them,
without a model.

A draft follows the response while its tokens are accepted, and enters the branch at the first
rejected token. This is exact for token verification, because its output does not depend on the
length of drafts.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.stopping import HeadThreshold, StoppingRule
from specheads.decoding.stopping.rule import State
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.recording import GROUND_TRUTH, Drafts, LabelledTokens, Recording

ROWS_AT_ONCE = 2**14  # drafts of a rule, so that its state stays in a CPU's cache


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
        is_whole = (self.drafted > 0) & (self.accepted == self.drafted)
        return Counts(
            tokens=np.bincount(self.prompt, weights=self.tokens, minlength=num_prompts),
            drafted=np.bincount(self.prompt, weights=self.drafted, minlength=num_prompts),
            accepted=np.bincount(self.prompt, weights=self.accepted, minlength=num_prompts),
            rounds=rounds,
            whole=np.bincount(self.prompt[is_whole], minlength=num_prompts),
        )


@dataclass(frozen=True)
class Counts:
    """The counts of a rule on each prompt: arrays (P,), sums over samples."""

    tokens: np.ndarray
    drafted: np.ndarray  # also the draft's forward passes, where none is issued ahead of a stop
    accepted: np.ndarray
    rounds: np.ndarray  # (P, n + 1), how many rounds drafted 0, 1, ... n tokens
    whole: np.ndarray  # how many drafts were accepted whole

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


def head_logits(recording: Recording, head: RecordedHead) -> tuple[Tensor, LabelledTokens]:
    """Return a head's predictions, before calibration, for the draft's token at every position and
    sample.

    Returns logits (n,), and the tokens with the nodes of the predictions.
    """
    tokens = recording.labels()
    # It predicts after it has read the token, which no round does with its last one
    if head.config.predicts == "input_token":
        tokens = tokens.chosen(tokens.after >= 0)
        tokens = tokens._replace(node=tokens.after)
    return recording.features[head.name][tokens.node].double(), tokens


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
    drafts = recording.drafts()
    for numbers in alike.values():
        rounds = _Rounds(recording, drafts, [rules[number] for number in numbers])
        yield from zip(numbers, rounds.of_rules(), strict=True)


class _Rounds:
    """The rounds of rules with one compile key, each of which begins where the one before ended."""

    def __init__(self, recording: Recording, drafts: Drafts, rules: Sequence[StoppingRule]) -> None:
        self.recording = recording
        self.drafts = drafts
        self.rules = rules
        self.rule = rules[0]

    @torch.no_grad()
    def of_rules(self) -> list[Replayed]:
        """Return the rounds of each rule."""
        walk = self._remembering if self.rule.remembers else self._looked_up
        return _collected(self.recording, len(self.rules), walk)

    def _looked_up(self, which: Tensor, start: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield rounds of rules that remember nothing: how much each drafts from every start does
        not depend on how it came there, so it is computed for all of them at once.
        """
        lengths = torch.stack([self._from_everywhere(rule) for rule in self.rules])
        yield from _with_lengths(self.drafts, lengths, which, start)

    def _from_everywhere(self, rule: StoppingRule) -> Tensor:
        """Return how many tokens (Q N,) int a rule drafts in a round from every start."""
        parts = list[Tensor]()
        for start in torch.arange(len(self.drafts.most)).split(ROWS_AT_ONCE):
            state = rule.start_round(rule.start_prompt(len(start), start.device))
            drafted, _ = self._drafted(start, rule.max_tokens, state)
            parts.append(drafted.int())
        return torch.cat(parts)

    def _remembering(self, which: Tensor, start: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield rounds of rules whose drafts depend on the rounds before."""
        rule = self.rule
        most_tokens = torch.tensor([each.max_tokens for each in self.rules])
        rows_per_rule = len(start) // len(self.rules)
        states = [each.start_prompt(rows_per_rule, start.device) for each in self.rules]
        state = tree_map(lambda *parts: torch.cat(parts), *states)
        while len(start):
            state = rule.start_round(state)
            drafted, state = self._drafted(start, most_tokens[which], state)
            accepted, tokens, stay = _outcomes(self.drafts, start, drafted)
            yield which, start, drafted, accepted, tokens
            state = rule.end_round(state, drafted, accepted)
            which, start, state = _of_rows((which, start + tokens, state), stay)

    def _drafted(
        self, start: Tensor, max_tokens: Tensor | int, state: State
    ) -> tuple[Tensor, State]:
        """Return how many tokens (n,) are drafted from each `start` (n,), at most `max_tokens`, and
        the state (n, ...) after them.
        """
        drafted = torch.zeros_like(start)
        drafts = _of_rows(self.drafts, start)
        drafts = drafts._replace(most=drafts.most.clamp_max(max_tokens))
        rows = torch.arange(len(start))
        ended = list[Tensor]()
        states = list[State]()  # of the rows that have ended
        index = 0
        goes_on = drafts.most > 0
        while True:
            if not goes_on.all():
                (leave,) = (~goes_on).nonzero(as_tuple=True)
                ended.append(rows[leave])
                drafted[ended[-1]] = index
                if self.rule.remembers:
                    states.append(_of_rows(state, leave))
                (stay,) = goes_on.nonzero(as_tuple=True)
                rows, drafts, state = _of_rows((rows, drafts, state), stay)
            if not len(rows):
                break
            node = drafts.node(index)
            features = dict[str, Tensor]()
            for name in self.rule.needs:
                values = self.recording.tokens if name == "token" else self.recording.features[name]
                features[name] = values.index_select(0, node)
            new, stop = self.rule.step(state, features)
            state = tree_map(lambda old, new: new.to(old.dtype), state, new)
            index += 1
            goes_on = ~stop & (index < drafts.most)
        if self.rule.remembers:
            order = torch.cat(ended).argsort()
            state = tree_map(lambda *parts: torch.cat(parts)[order], *states)
        return drafted, state


_Walk = Callable[[Tensor, Tensor], Iterator[tuple[Tensor, ...]]]


def _collected(recording: Recording, num_rules: int, walk: _Walk) -> list[Replayed]:
    """Return the rounds of each rule, which `walk` yields in parts from the number of a rule and
    the start of a response, (n,) long each: these, and the drafted, accepted and emitted tokens.
    """
    num_samples, num_tokens = recording.accepted.shape
    first = recording.first
    starts = (first + num_tokens * torch.arange(num_samples)[:, None]).flatten()
    which = torch.arange(num_rules).repeat_interleave(len(starts))
    columns = list[np.ndarray]()
    for parts in zip(*walk(which, starts.repeat(num_rules)), strict=True):
        columns.append(torch.cat(parts).int().numpy())
    of_rule, place, *counts = columns
    position = place % num_tokens
    prompt = np.searchsorted(first.numpy(), position, side="right") - 1
    within = position - first.numpy()[prompt]
    order = np.argsort(of_rule, kind="stable")
    cuts = np.searchsorted(of_rule[order], np.arange(1, num_rules))
    split = list[list[np.ndarray]]()
    for column in (prompt, place // num_tokens, within, *counts):
        split.append(np.split(column[order], cuts))
    return [Replayed(*of_one) for of_one in zip(*split, strict=True)]


def _with_lengths(
    drafts: Drafts, lengths: Tensor, which: Tensor, start: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield rounds of rules that draft as many tokens from each start as `lengths` (rules, starts)
    say.
    """
    table = lengths.flatten()
    while len(start):
        drafted = table.index_select(0, which * lengths.shape[1] + start).long()
        accepted, tokens, stay = _outcomes(drafts, start, drafted)
        yield which, start, drafted, accepted, tokens
        which, start = _of_rows((which, start + tokens), stay)


def _outcomes(drafts: Drafts, start: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the accepted tokens (n,) of rounds, the emitted ones (n,), and the rows (m,) whose
    responses go on.
    """
    left = drafts.left.index_select(0, start)
    accepted = drafted.minimum(drafts.num_accepted.index_select(0, start))
    tokens = (accepted + 1).minimum(left)
    (stay,) = (tokens < left).nonzero(as_tuple=True)
    return accepted, tokens, stay


def _of_rows(tree: State, rows: Tensor) -> State:
    """Return a tree of tensors in some `rows` (n,) long."""
    return tree_map(lambda value: value.index_select(0, rows), tree)


def oracle(recording: Recording) -> Replayed:
    """Return the rounds of the rule that stops exactly before the first rejection, with the longest
    drafts that are recorded (Lemma 2.1).
    """
    drafts = recording.drafts()
    lengths = drafts.num_accepted.minimum(drafts.most)
    (rounds,) = _collected(recording, 1, partial(_with_lengths, drafts, lengths[None]))
    return rounds
