"""Which texts heads learn from, and which tokens they judge there.

Mixing (SpecDec++, section 3.2) replaces a part of the response by drafted tokens, so that hidden states come from text like
the decoder's. It is redrawn every epoch from a seed per (epoch, row). Where several tokens were drafted at each position, each epoch
takes another one: a head then learns how chances differ between tokens instead of learning one token by heart.

Rollouts bring texts of their own: the response up to where each starts, and then the draft's words. All of a row's come in every epoch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from specheads.decoding.stopping import MAX_TOKENS
from specheads.training.heads.settings import LABELS, check_label, checked_share

COLUMNS = ("prompt_ids", "response_ids", "draft_ids", "accept_prob", "overlap", "more_draft_ids", "more_accept_prob")
ROUND_COLUMNS = ("response_draft_logprob", "response_target_logprob")
ROLLOUT_COLUMNS = ("rollout_start", "rollout_ids", "rollout_accept_prob")


def drawn(row: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the drafted tokens and their acceptance probabilities, (N,) each, of every draw in a row."""
    ids, probs = ([row[name], *row[f"more_{name}"]] for name in ("draft_ids", "accept_prob"))
    return [(np.asarray(drafted), np.asarray(accepted)) for drafted, accepted in zip(ids, probs, strict=True)]


def round_starts(row: Mapping[str, Any], rng: np.random.Generator) -> np.ndarray:
    """Return for each response position where the round began that drafted there (N,), in rounds as decoding could have had them.

    A round ends behind the first token that the target had to emit itself, which is one with chance `1 - min(1, d/t)`, and behind the
    target's token after a draft of at most so many tokens, 1 to MAX_TOKENS alike.
    """
    with np.errstate(invalid="ignore"):  # what neither model would say was not drafted
        ratio = np.asarray(row["response_draft_logprob"], dtype=np.float64) - np.asarray(row["response_target_logprob"])
    drafted = rng.random(len(ratio)) < np.exp(np.minimum(ratio, 0))
    longest = rng.integers(1, MAX_TOKENS, size=len(ratio), endpoint=True)
    starts, start = np.zeros(len(ratio), dtype=np.int64), 0
    for position, from_draft in enumerate(drafted):
        starts[position] = start
        if not from_draft or position - start == longest[start]:
            start = position + 1
    return starts


def rolled(row: Mapping[str, Any], labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each rollout of a row: `tokens` of its text, `index` and `drafted` of its judged tokens (n,), their `labels` and `alive`.

    Labels of the response are NaN. `alive` (n,) is the chance that all tokens of the rollout before it are accepted.
    """
    for start, *columns in zip(*(row[name] for name in ROLLOUT_COLUMNS), strict=True):
        ids, accept_prob = map(np.asarray, columns)
        begun = np.concatenate([row["prompt_ids"], row["response_ids"][:start]])
        found = {"rollout": accept_prob}
        yield {
            "tokens": np.concatenate([begun, ids]).astype(np.int64),
            "index": len(begun) + np.arange(len(ids)),
            "drafted": ids.astype(np.int64),
            "start": np.full(len(ids), len(begun)),
            "labels": {name: found.get(name, np.full(len(ids), np.nan)).astype(np.float32) for name in ("sampled", *labels)},
            "alive": np.concatenate([[1.0], accept_prob.cumprod()[:-1]]).astype(np.float32),
        }


class MixedResponses(Dataset):
    """Rows of a data cache, mixed anew for every (epoch, row) that is asked for."""

    def __init__(
        self,
        rows: Any,
        predicts: str,
        response_share: float | None,
        seed: int,
        labels: Sequence[str] = LABELS[:1],
        in_rounds: bool = False,
    ) -> None:
        """Mix `rows` (a `datasets.Dataset`, or dicts of its columns).

        `response_share` is the chance that a position keeps the target's token, None the default of the kind; `labels` are what
        heads are to learn, of LABELS; `in_rounds` says whether they look at where a round began, which is then drawn like the mixing.

        Raises:
            UserError: see `checked_share` and `check_label`.
        """
        for label in labels:
            check_label(label)
        self.predicts, self.seed, self.labels, self.in_rounds = predicts, seed, tuple(labels), in_rounds
        self.response_share = checked_share(predicts, response_share)
        columns = [*COLUMNS, *(ROUND_COLUMNS if in_rounds else ()), *(ROLLOUT_COLUMNS if self.rolls else ())]
        self.rows = rows.with_format("numpy", columns=columns) if hasattr(rows, "with_format") else rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def varies(self) -> bool:
        """Whether what the draft reads differs from epoch to epoch."""
        return self.response_share < 1

    @property
    def num_samples(self) -> int:
        """Tokens drafted at each position that an epoch may ask about in the same text."""
        return 1 if self.varies else len(drawn(self.rows[0]))

    @property
    def rolls(self) -> bool:
        """Whether heads learn from rollouts."""
        return "rollout" in self.labels

    def lengths(self) -> np.ndarray:
        """Return the number of tokens that may be judged in each row (rows,): of its response and its rollouts."""
        if not hasattr(self.rows, "with_format"):
            rolled_ids = [row["rollout_ids"] if self.rolls else [] for row in self.rows]
            return np.array(
                [len(row["response_ids"]) + sum(map(len, ids)) for row, ids in zip(self.rows, rolled_ids, strict=True)]
            )
        lengths = self._column("response_ids").value_lengths().to_numpy().astype(np.int64)
        if self.rolls:
            rollouts = self._column("rollout_ids")
            tokens = rollouts.flatten().value_lengths().to_numpy()
            lengths += np.bincount(rollouts.value_parent_indices(), tokens, len(lengths)).astype(np.int64)
        return lengths

    def _column(self, name: str) -> Any:
        return self.rows.with_format("arrow", columns=[name])[:].column(0).combine_chunks()

    def judged_draws(self, key: tuple[int, int]) -> list[np.ndarray]:
        """Return the tokens (n,) of every draw that an epoch may ask about at the judged positions of a row's text.

        A text that is mixed anew in each epoch goes with the draw of its epoch.
        """
        _, number = key
        if self.varies:
            return [self[key]["drafted"]]
        return [self[draw, number]["drafted"] for draw in range(len(drawn(self.rows[number])))]

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, number = key
        row = self.rows[number]
        response, draws = np.asarray(row["response_ids"]), drawn(row)
        drafted, accept_prob = draws[epoch % len(draws)]
        kept = np.random.default_rng([self.seed, epoch, number]).random(len(response)) < self.response_share
        # A head that judges its input token needs that token to have been read; one that looks ahead needs only its prefix.
        judged = ~kept if self.predicts == "input_token" else np.ones_like(kept)
        starts = np.arange(len(response))
        if self.in_rounds:
            starts = round_starts(row, np.random.default_rng([self.seed, epoch, number, 1]))
        own = {"sampled": accept_prob, "rollout": accept_prob}  # a draft of one token is a rollout too
        labels = {name: np.asarray(own[name] if name in own else row[name]) for name in ("sampled", *self.labels)}
        text = {
            "tokens": np.concatenate([row["prompt_ids"], np.where(kept, response, drafted)]).astype(np.int64),
            "index": len(row["prompt_ids"]) + np.flatnonzero(judged),
            "drafted": drafted[judged].astype(np.int64),
            "start": len(row["prompt_ids"]) + starts[judged],
            "labels": {name: values[judged].astype(np.float32) for name, values in labels.items()},
            "alive": np.ones(judged.sum(), dtype=np.float32),
        }
        return joined([text, *(rolled(row, self.labels) if self.rolls else ())])


def joined(texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the texts of one row as one item: `tokens` of the first, those of the others as `rollouts`, and the judged tokens of all.

    `text` (n,) says which text each judged token belongs to.
    """
    first, *others = texts
    return {
        "tokens": first["tokens"],
        "rollouts": [other["tokens"] for other in others],
        "text": np.repeat(np.arange(len(texts)), [len(text["index"]) for text in texts]),
        **{name: np.concatenate([text[name] for text in texts]) for name in ("index", "drafted", "start", "alive")},
        "labels": {name: np.concatenate([text["labels"][name] for text in texts]) for name in first["labels"]},
    }
