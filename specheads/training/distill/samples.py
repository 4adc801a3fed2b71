"""The samples that a draft learns from: each train prompt with a response of the data set, of the target, or of the draft.

In mixed samples the kind of response is chosen at random for every (epoch, prompt).
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.prompts.prompt import GeneratedData, encode_prompts
from specheads.replay.response_batch import ResponseBatch
from specheads.storage.data_set import load_split
from specheads.training.distill.settings import Distillation
from specheads.training.distill.target_store import Answers, TargetStore, texts_fingerprint


@dataclass
class Sample:
    """A text to learn from: `prompt` (P,) and `response` (R,) ids; the response is None until the draft has written it.

    `stored` are the target's distributions along it, `ids` (R, k) and `log_probs` (R, k + 1), if they are stored (TargetStore).
    """

    key: tuple[int, int]  # epoch and prompt
    prompt: np.ndarray
    response: np.ndarray | None
    stored: Mapping[str, Tensor] | None = None


def batch_of(samples: Sequence[Sample], device: torch.device) -> ResponseBatch:
    """Return the batch of samples, all of which have responses."""
    responses = [sample.response for sample in samples if sample.response is not None]
    return ResponseBatch.of([sample.prompt for sample in samples], responses, device)


class Samples(Dataset):
    """One sample per prompt and epoch: the next of the responses of a kind that is chosen at random."""

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        answers: Mapping[str, Answers],
        shares: Mapping[str, float],
        seed: int = 0,
        stored: Mapping[str, TargetStore] | None = None,
    ) -> None:
        """Sample responses by their kind.

        Args:
            prompts: ids (P,) each.
            answers: the responses to each prompt by kind, except for "on_policy", which the draft writes during training.
            shares: the probability of each kind that occurs.
            seed: of the choice between kinds.
            stored: the target's distributions along responses, for the kinds of which they are stored.
        """
        self.prompts, self.answers, self.shares, self.seed = prompts, answers, dict(shares), seed
        self.stored = dict(stored or {})

    def __len__(self) -> int:
        return len(self.prompts)

    def kind(self, key: tuple[int, int]) -> str:
        """Return the kind of response that a prompt gets in an epoch."""
        if len(self.shares) == 1:
            return next(iter(self.shares))
        uniform = np.random.default_rng([self.seed, *key, 2]).random()
        place = np.searchsorted(np.cumsum(list(self.shares.values())), uniform, side="right")
        return list(self.shares)[min(int(place), len(self.shares) - 1)]

    def unanswered(self, keys: Sequence[tuple[int, int]]) -> list[Sample]:
        """Return the samples among `keys` that need a response by the draft."""
        return [self[key] for key in keys if self.kind(key) == "on_policy"]

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        (epoch, row), kind = key, self.kind(key)
        if kind == "on_policy":
            return Sample(key, self.prompts[row], None)
        responses = self.answers[kind][row]
        number = epoch % len(responses)
        stored = self.stored[kind][row, number] if kind in self.stored else None
        return Sample(key, self.prompts[row], responses[number], stored)


def held_out(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Samples:
    """Return prompts with the target's response to each, the same in every epoch."""
    return Samples(prompts, {"target": [[response] for response in responses]}, {"target": 1.0})


def train_samples(data: GeneratedData, pair: Pair, settings: Distillation) -> Samples:
    """Return the samples of a data set; a prompt is left out if it is too long or has no response of one of the kinds.

    Raises:
        UserError: no prompt is left.
    """
    encoded = encode_prompts(pair, [prompt for prompt in data.prompts if prompt.split == "train"], data.limits)
    by_kind: dict[str, dict[str, list[np.ndarray]]] = {}
    if "text" in settings.shares:
        most = data.limits.max_new_tokens
        own = ((prompt.prompt_id, prompt.response, len(ids)) for prompt, ids in encoded if prompt.response)
        by_kind["text"] = {prompt_id: [encoded_response(pair, text, length, most)] for prompt_id, text, length in own}
    if "target" in settings.shares:
        by_kind["target"] = defaultdict(list)
        rows = load_split(data.folder, "train").with_format("arrow")[:]
        for prompt_id, response in zip(rows.column("prompt_id").to_pylist(), _column(rows, "response_ids"), strict=True):
            by_kind["target"][prompt_id].append(response)
    kept = [(prompt, ids) for prompt, ids in encoded if all(prompt.prompt_id in known for known in by_kind.values())]
    if not kept:
        raise UserError(
            f"no train prompt has responses of every kind in samples={settings.samples}; ask for more with data.num_train."
        )
    prompts = [np.asarray(ids, dtype=np.int32) for _, ids in kept]
    answers = {kind: [known[prompt.prompt_id] for prompt, _ in kept] for kind, known in by_kind.items()}
    return Samples(prompts, answers, settings.shares, settings.seed)


def encoded_response(pair: Pair, text: str, prompt_length: int, max_new_tokens: int) -> np.ndarray:
    """Return the ids of a data set's own response with an end token, cut to `max_new_tokens` and to the pair's window."""
    ids = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = pair.tokenizer.eos_token_id
    if end not in pair.stop_tokens:
        end = min(pair.stop_tokens, default=None)
    whole = [*ids, *([] if end is None else [end])]
    return np.asarray(whole[: min(max_new_tokens, pair.window - prompt_length)], dtype=np.int32)


def load_splits(
    data: GeneratedData, pair: Pair, train: Samples, settings: Distillation, alike: bool = False
) -> tuple[dict[str, Samples], dict[str, Any]]:
    """Return the samples of each split, and what decides them.

    The target's distributions along responses of `train` are stored, and the missing ones computed here, if they fit the budget
    and are read again. `alike`: they are stored for responses of all kinds, or for none.
    """
    splits = {"train": train}
    for split, most in (("dev", settings.num_dev_prompts), ("test", None)):
        rows = load_split(data.folder, split).with_format("arrow")[:most]
        splits[split] = held_out(_column(rows, "prompt_ids"), _column(rows, "response_ids"))
    for kind, rows in train.answers.items():
        store = TargetStore(data.folder.parent, pair, train.prompts, rows)
        num_reads = settings.trainer.max_epochs * settings.shares[kind] * len(train) / max(1, len(store.texts))
        if num_reads > 1 and store.fits(settings.target_probs_budget):
            train.stored[kind] = store
    if alike and len(train.stored) < len(train.answers):
        train.stored.clear()
    for store in train.stored.values():
        store.make()
    distributions = {kind: store.provenance["distribution"] for kind, store in train.stored.items()}
    texts = texts_fingerprint(train.prompts, train.answers)
    return splits, {"data": data.folder.name, "texts": texts, "stored distributions": json.dumps(distributions)}


def _column(rows: Any, name: str) -> list[np.ndarray]:
    """Return the lists of ids in a column of an Arrow table."""
    return [np.asarray(row, dtype=np.int32) for row in rows.column(name).to_numpy()]
