"""The samples that a draft learns from: train prompts with responses, and on disk what the target
computes along these: its distributions, or what a draft reads of it.

Of a distribution the store has the most likely tokens, and the rest as one outcome.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specheads.errors import UserError
from specheads.pair.language_model import LanguageModel
from specheads.pair.needs import memory_of, memory_parts
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, read_features, states_of
from specheads.pair.sampling import check_numbers, naming_rows
from specheads.prompts.prompt import GeneratedData, encode_prompts
from specheads.storage.data_set import load_split
from specheads.storage.row_store import SHARD_BYTES, RowStore
from specheads.training.distill.distill_loss import log_totals, most_likely
from specheads.training.distill.settings import Distillation
from specheads.training.loaders import row_batches

NUM_KEPT = 64  # tokens of each distribution, at 6 bytes each
# Tensors of a store of states
STATES = "states"
TOTALS = "log_totals"

Answers = Sequence[Sequence[np.ndarray]]  # the responses to each prompt, ids (R,) each


@dataclass
class Sample:
    """A text to learn from."""

    prompt: np.ndarray  # ids (P,)
    response: np.ndarray  # ids (R,)
    # What a store has of it
    stored: Mapping[str, Tensor] | None = None
    where: str = "a text"  # what messages call it


def texts_of(samples: Sequence[Sample]) -> GivenTexts:
    """Return the texts of samples, with the target's states where they are stored."""
    texts = GivenTexts.with_responses(
        [sample.prompt for sample in samples], [sample.response for sample in samples]
    )
    known = list[Tensor]()
    for sample in samples:
        if sample.stored is not None and STATES in sample.stored:
            known.append(sample.stored[STATES])
    return texts._replace(of_target=pad_sequence(known, batch_first=True)) if known else texts


def stored_totals(samples: Sequence[Sample]) -> Tensor | None:
    """Return the target's `log_totals` (N,) at the positions of samples; None: they are not
    stored.
    """
    totals = list[Tensor]()
    for sample in samples:
        if sample.stored is None or TOTALS not in sample.stored:
            return None
        first = len(sample.prompt) - 1
        totals.append(sample.stored[TOTALS][first : first + len(sample.response)])
    return torch.cat(totals)


def place_of(sample: Sample) -> str:
    """Return what messages call a sample."""
    return sample.where


def _fingerprint(prompts: Sequence[np.ndarray], answers: Answers) -> str:
    """Return a hash of prompts and the responses to each."""
    digest = hashlib.sha256(_bytes_of(prompts))
    responses = list[np.ndarray]()
    numbers = list[list[int]]()  # of each prompt's responses
    for row in answers:
        numbers.append(list(range(len(responses), len(responses) + len(row))))
        responses += row
    digest.update(f" {numbers}".encode())
    digest.update(_bytes_of(responses))
    return digest.hexdigest()[:16]


def _bytes_of(texts: Sequence[np.ndarray]) -> bytes:
    """Return the bytes of all tokens, then of the places where texts end."""
    values = np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32)
    return values.tobytes() + np.cumsum([len(text) for text in texts], dtype=np.int64).tobytes()


class _TextStore(RowStore):
    """What the target computes along all responses."""

    def __init__(
        self,
        folder: Path,
        pair: Pair,
        samples: "Samples",
        kept: Mapping[str, object],
        num_bytes: Callable[[Sample], int],
        what: str,
    ) -> None:
        """Plan a store whose rows have `num_bytes` of a text; `kept` says what it keeps."""
        self.target = pair.target_lm
        self.target_id = pair.target_id
        self.kept = kept
        self.texts: list[Sample] = []
        self.firsts: list[int] = []  # the number of each prompt's first response
        for row, responses in enumerate(samples.answers):
            self.firsts.append(len(self.texts))
            for response in responses:
                self.texts.append(Sample(samples.prompts[row], response, where=samples.where(row)))
        provenance = {
            "target": [pair.target_revision, str(pair.target.dtype)],
            "texts": _fingerprint(samples.prompts, samples.answers),
            **kept,
        }
        sizes = {"": np.array([num_bytes(text) for text in self.texts], dtype=np.int64)}
        super().__init__(folder, provenance, sizes, what)

    def __getitem__(self, key: tuple[int, int]) -> Mapping[str, Tensor]:
        """Return what is stored of a prompt's response, by the numbers of both."""
        prompt, response = key
        return self.row("", self.firsts[prompt] + response)

    def make(self) -> None:
        """Make what is missing; another process that needs it, too, waits."""
        parts = memory_parts(self.target) | {"a shard": 2 * min(self.num_bytes, SHARD_BYTES)}
        self.fill(self._computed, memory_of(self.what, self.target, parts), self._batches)

    def _batches(self, start: str, rows: range) -> list[list[int]]:
        lengths = list[int]()
        for row in rows:
            lengths.append(len(self.texts[row].prompt) + len(self.texts[row].response))
        return row_batches(rows, lengths)

    def _computed(self, start: str, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        return naming_rows(self._of_texts, [self.texts[row] for row in rows], place_of)

    def _of_texts(self, texts: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """Return the tensors of each of some texts."""
        raise NotImplementedError


class TargetStore(_TextStore):
    """The target's distributions: `ids` (R, k) int32 and `log_probs` (R, k + 1) half of a response
    of R tokens.
    """

    def __init__(
        self, root: Path, pair: Pair, samples: "Samples", num_kept: int = NUM_KEPT
    ) -> None:
        self.num_kept = min(num_kept, pair.target_lm.vocab_size)
        # For each token an id and a log-probability for each that is kept, and the log-probability
        # of the rest
        num_bytes = 6 * self.num_kept + 2
        super().__init__(
            root / "target_probs",
            pair,
            samples,
            # The temperature, which earlier versions had
            {"distribution": [1.0, self.num_kept]},
            lambda text: len(text.response) * num_bytes,
            "the target's distributions",
        )

    @torch.no_grad()
    def _of_texts(self, texts: Sequence[Sample]) -> list[dict[str, Tensor]]:
        hidden = states_of(self.target, texts_of(texts))
        ids: list[Tensor] = []
        log_probs: list[Tensor] = []
        for piece in slices(len(hidden), self.target.vocab_size, SLICE_ELEMENTS):
            whole = self.target.logits(hidden[piece]).log_softmax(dim=-1)
            kept = most_likely(whole, self.num_kept)
            check_numbers(self.target_id, kept.log_probs)
            ids.append(cast(Tensor, kept.ids).int().cpu())  # most_likely sets them
            log_probs.append(kept.log_probs.half().cpu())
        counts = [len(text.response) for text in texts]
        columns = zip(torch.cat(ids).split(counts), torch.cat(log_probs).split(counts), strict=True)
        return [{"ids": row_ids, "log_probs": row_log_probs} for row_ids, row_log_probs in columns]


class StateStore(_TextStore):
    """What a draft reads of its target along a text of T tokens, and what the target's
    distributions are computed from: `states` (T, (L + 1) H_target) as in GivenTexts, and
    `log_totals` (T,), which are 0 where no token of the response is predicted.
    """

    def __init__(self, root: Path, pair: Pair, samples: "Samples") -> None:
        self.layers = pair.draft_lm.reads_layers
        num_bytes = state_bytes(pair.target_lm, len(self.layers))
        super().__init__(
            root / "target_states",
            pair,
            samples,
            {"layers": [*self.layers, TOTALS]},
            lambda text: (len(text.prompt) + len(text.response)) * num_bytes,
            "the target's states",
        )

    @torch.no_grad()
    def _of_texts(self, texts: Sequence[Sample]) -> list[dict[str, Tensor]]:
        given = texts_of(texts)
        hidden, features = read_features(self.target, given.tokens, self.layers)
        totals = torch.zeros(given.tokens.shape, dtype=self.target.probs_dtype)
        predicting = given.at(hidden)
        for piece in slices(len(predicting), self.target.vocab_size, SLICE_ELEMENTS):
            of_piece = log_totals(self.target.logits(predicting[piece]))
            check_numbers(self.target_id, of_piece)
            totals[given.row[piece], given.position[piece]] = of_piece.cpu()
        rows = list[dict[str, Tensor]]()
        states = torch.cat([features, hidden], dim=-1).cpu()
        for text, of_text, of_tokens in zip(texts, states, totals, strict=True):
            size = len(text.prompt) + len(text.response)
            rows.append({STATES: of_text[:size], TOTALS: of_tokens[:size]})
        return rows


def state_bytes(target: LanguageModel, num_layers: int) -> int:
    """Return how many bytes the states of a token take, of which a draft reads some layers."""
    of_states = (num_layers + 1) * target.hidden_size * target.model.dtype.itemsize
    return of_states + target.probs_dtype.itemsize


class Samples:
    """One sample per prompt and epoch: the next of the responses to the prompt."""

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        answers: Answers,
        stored: TargetStore | StateStore | None = None,
        places: Iterable[str] = (),
    ) -> None:
        """Take ids (P,) of prompts, the `answers` to each, what is stored of the target along
        these, and what messages call the prompts.
        """
        self.prompts = list(prompts)
        self.answers = list(answers)
        self.stored = stored
        self.places = list(places)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, row = key
        responses = self.answers[row]
        # An epoch has responses of all numbers, of which the first may be greedy.
        number = (epoch + row) % len(responses)
        stored = None if self.stored is None else self.stored[row, number]
        return Sample(self.prompts[row], responses[number], stored, self.where(row))

    def where(self, row: int) -> str:
        """Return what messages call a prompt."""
        return self.places[row] if self.places else f"prompt number {row}"


def held_out(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], places: Iterable[str] = ()
) -> Samples:
    """Return prompts with the target's response to each, the same in every epoch."""
    return Samples(prompts, [[response] for response in responses], places=places)


def train_samples(data: GeneratedData, pair: Pair, settings: Distillation) -> Samples:
    """Return the samples of prompts that are short enough and have responses.

    Raises UserError if there are none.
    """
    prompts = [prompt for prompt in data.prompts if prompt.split == "train"]
    encoded = encode_prompts(pair, prompts, data.limits)
    known = defaultdict[str, list[np.ndarray]](list)
    if settings.samples == "text":
        most = data.limits.max_new_tokens
        for prompt, ids in encoded:
            if prompt.response:
                response = encoded_response(pair, prompt.response, len(ids), most)
                known[prompt.prompt_id].append(response)
    else:
        rows = load_split(data.folder, "train").with_format("arrow")[:]
        names = rows.column("prompt_id").to_pylist()
        for name, response in zip(names, _column(rows, "response_ids"), strict=True):
            known[name].append(response)
    samples = Samples([], [])
    for prompt, ids in encoded:
        if prompt.prompt_id in known:
            samples.prompts.append(np.asarray(ids, dtype=np.int32))
            samples.answers.append(known[prompt.prompt_id])
            samples.places.append(prompt.where)
    if not samples.prompts:
        raise UserError(
            f"no train prompt has a response of samples={settings.samples}; ask for more with"
            " data.num_train."
        )
    return samples


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
) -> tuple[dict[str, Samples], dict[str, object]]:
    """Return the samples of each split, and what decides them.

    What the target computes along train texts is stored if it is read again and fits.
    """
    splits = {"train": train}
    places = {prompt.prompt_id: prompt.where for prompt in data.prompts}
    for split, most in (("dev", settings.num_dev_prompts), ("test", None)):
        rows = load_split(data.folder, split).with_format("arrow")[:most]
        names = rows.column("prompt_id").to_pylist()
        splits[split] = held_out(
            _column(rows, "prompt_ids"),
            _column(rows, "response_ids"),
            [places.get(name, f"prompt {name}") for name in names],
        )
    is_read = bool(pair.draft_lm.reads_layers)  # by the draft, in every step
    kind = StateStore if is_read else TargetStore
    store = kind(data.folder.parent, pair, train)
    provenance = {
        "data": data.folder.name,
        "texts": store.provenance["texts"],
        "stored distributions": None,
    }
    num_reads = settings.trainer.max_epochs * len(train) / max(1, len(store.texts))
    if num_reads > 1 and store.fits(settings.target_probs_budget):
        store.make()
        train.stored = store
        provenance["stored distributions"] = next(iter(store.kept.values()))
    return splits, provenance


def _column(rows: pa.Table, name: str) -> list[np.ndarray]:
    return [np.asarray(row, dtype=np.int32) for row in rows.column(name).to_numpy()]
