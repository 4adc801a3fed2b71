"""The samples that a draft learns from: train prompts with responses, and the target's
distributions along these, on disk.

Of a distribution the store has the most likely tokens, and the rest as one outcome.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specheads.errors import UserError
from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS, batches_of_tokens, slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, states_by_length
from specheads.pair.sampling import check_numbers
from specheads.prompts.prompt import GeneratedData, encode_prompts
from specheads.storage.data_set import load_split
from specheads.storage.row_store import SHARD_BYTES, RowStore
from specheads.training.distill.distill_loss import most_likely
from specheads.training.distill.settings import Distillation

NUM_KEPT = 64  # tokens of each distribution, at 6 bytes each

Answers = Sequence[Sequence[np.ndarray]]  # the responses to each prompt, ids (R,) each


@dataclass
class Sample:
    """A text to learn from."""

    prompt: np.ndarray  # ids (P,)
    response: np.ndarray  # ids (R,)
    stored: Mapping[str, Tensor] | None = (
        None  # the target's distributions along it: `ids` (R, k) and `log_probs` (R, k + 1)
    )


def texts_of(samples: Sequence[Sample]) -> GivenTexts:
    """Return the texts of samples."""
    return GivenTexts.with_responses(
        [sample.prompt for sample in samples], [sample.response for sample in samples]
    )


def _fingerprint(prompts: Sequence[np.ndarray], answers: Answers) -> str:
    """Return a hash of prompts and the responses to each."""
    digest = hashlib.sha256(_bytes_of(prompts))
    numbers = iter(range(sum(map(len, answers))))
    digest.update(f" {[[next(numbers) for _ in row] for row in answers]}".encode())
    digest.update(_bytes_of([response for row in answers for response in row]))
    return digest.hexdigest()[:16]


def _bytes_of(texts: Sequence[np.ndarray]) -> bytes:
    """Return the bytes of all tokens, then of the places where texts end."""
    values = np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32)
    return values.tobytes() + np.cumsum([len(text) for text in texts], dtype=np.int64).tobytes()


class TargetStore(RowStore):
    """The distributions along all responses."""

    def __init__(
        self,
        root: Path,
        pair: Pair,
        prompts: Sequence[np.ndarray],
        answers: Answers,
        num_kept: int = NUM_KEPT,
    ) -> None:
        self.target: Any = pair.target_lm
        self.num_kept = min(num_kept, pair.target_lm.vocab_size)
        self.texts = [
            (prompt, response)
            for prompt, row in zip(prompts, answers, strict=True)
            for response in row
        ]
        self.firsts = np.cumsum(
            [0, *map(len, answers)]
        )  # the number of each prompt's first response
        provenance = {
            "target": [pair.target_revision, str(pair.target.dtype)],
            "texts": _fingerprint(prompts, answers),
            "distribution": [1.0, self.num_kept],  # the temperature, which earlier versions had
        }
        # For each token an id and a log-probability for each that is kept, and the log-probability
        # of the rest.
        sizes = np.array([len(response) for _, response in self.texts], dtype=np.int64) * (
            6 * self.num_kept + 2
        )
        super().__init__(
            root / "target_probs", provenance, {"": sizes}, "the target's distributions"
        )

    def __getitem__(self, key: tuple[int, int]) -> Mapping[str, Tensor]:
        """Return `ids` (R, k) int32 and `log_probs` (R, k + 1) half of a prompt's response, by the
        numbers of both.
        """
        prompt, response = key
        return self.row("", int(self.firsts[prompt]) + response)

    def make(self) -> None:
        parts = memory_parts(self.target) | {"a shard": 2 * min(self.num_bytes, SHARD_BYTES)}
        self.fill(self._computed, memory_of(self.what, self.target, parts), self._batches)

    def _batches(self, start: str, rows: range) -> list[list[int]]:
        lengths = [sum(map(len, self.texts[row])) for row in rows]
        return [
            [rows[place] for place in places] for places in batches_of_tokens(lengths, BATCH_TOKENS)
        ]

    @torch.no_grad()
    def _computed(self, start: str, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        prompts, responses = zip(*(self.texts[row] for row in rows), strict=True)
        hidden = states_by_length(self.target, GivenTexts.with_responses(prompts, responses))
        distributions = [
            most_likely(self.target.logits(hidden[piece]).log_softmax(dim=-1), self.num_kept)
            for piece in slices(len(hidden), self.target.vocab_size, SLICE_ELEMENTS)
        ]
        check_numbers(self.target.name, *(distribution.log_probs for distribution in distributions))
        ids = (
            torch.cat([cast(Tensor, distribution.ids) for distribution in distributions])
            .int()
            .cpu()
        )  # most_likely sets them
        log_probs = (
            torch.cat([distribution.log_probs for distribution in distributions]).half().cpu()
        )
        counts = [len(response) for response in responses]
        columns = zip(ids.split(counts), log_probs.split(counts), strict=True)
        return [{"ids": row_ids, "log_probs": row_log_probs} for row_ids, row_log_probs in columns]


class Samples(Dataset):
    """One sample per prompt and epoch: the next of the responses to the prompt."""

    def __init__(
        self, prompts: Sequence[np.ndarray], answers: Answers, stored: TargetStore | None = None
    ) -> None:
        """Take ids (P,) of prompts, the `answers` to each, and the target's distributions along
        these where they are stored.
        """
        self.prompts = prompts
        self.answers = answers
        self.stored = stored

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, row = key
        responses = self.answers[row]
        number = (epoch + row) % len(
            responses
        )  # an epoch has responses of all numbers, of which the first may be greedy
        return Sample(
            self.prompts[row],
            responses[number],
            None if self.stored is None else self.stored[row, number],
        )


def held_out(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Samples:
    """Return prompts with the target's response to each, the same in every epoch."""
    return Samples(prompts, [[response] for response in responses])


def train_samples(data: GeneratedData, pair: Pair, settings: Distillation) -> Samples:
    """Return the samples of prompts that are short enough and have responses.

    Raises UserError if there are none.
    """
    encoded = encode_prompts(
        pair, [prompt for prompt in data.prompts if prompt.split == "train"], data.limits
    )
    known = defaultdict[str, list[np.ndarray]](list)
    if settings.samples == "text":
        for prompt, ids in encoded:
            if prompt.response:
                known[prompt.prompt_id] = [
                    encoded_response(pair, prompt.response, len(ids), data.limits.max_new_tokens)
                ]
    else:
        rows = load_split(data.folder, "train").with_format("arrow")[:]
        for prompt_id, response in zip(
            rows.column("prompt_id").to_pylist(), _column(rows, "response_ids"), strict=True
        ):
            known[prompt_id].append(response)
    kept = [(prompt, ids) for prompt, ids in encoded if prompt.prompt_id in known]
    if not kept:
        raise UserError(
            f"no train prompt has a response of samples={settings.samples}; ask for more with"
            " data.num_train."
        )
    return Samples(
        [np.asarray(ids, dtype=np.int32) for _, ids in kept],
        [known[prompt.prompt_id] for prompt, _ in kept],
    )


def encoded_response(pair: Pair, text: str, prompt_length: int, max_new_tokens: int) -> np.ndarray:
    """Return the ids of a data set's own response with an end token, cut to `max_new_tokens` and to
    the pair's window.
    """
    ids = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = pair.tokenizer.eos_token_id
    if end not in pair.stop_tokens:
        end = min(pair.stop_tokens, default=None)
    whole = [*ids, *([] if end is None else [end])]
    return np.asarray(whole[: min(max_new_tokens, pair.window - prompt_length)], dtype=np.int32)


def load_splits(
    data: GeneratedData, pair: Pair, train: Samples, settings: Distillation
) -> tuple[dict[str, Samples], dict[str, Any]]:
    """Return the samples of each split, and what decides them.

    Distributions are stored if they are read again and fit.
    """
    splits = {"train": train}
    for split, most in (("dev", settings.num_dev_prompts), ("test", None)):
        rows = load_split(data.folder, split).with_format("arrow")[:most]
        splits[split] = held_out(_column(rows, "prompt_ids"), _column(rows, "response_ids"))
    store = TargetStore(data.folder.parent, pair, train.prompts, train.answers)
    num_reads = settings.trainer.max_epochs * len(train) / max(1, len(store.texts))
    if num_reads > 1 and store.fits(settings.target_probs_budget):
        store.make()
        train.stored = store
    distribution = None if train.stored is None else store.provenance["distribution"]
    return splits, {
        "data": data.folder.name,
        "texts": store.provenance["texts"],
        "stored distributions": distribution,
    }


def _column(rows: Any, name: str) -> list[np.ndarray]:
    return [np.asarray(row, dtype=np.int32) for row in rows.column(name).to_numpy()]
