"""The samples that a draft learns from: each train prompt with a response of the data set, or of the target."""

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
from specheads.training.distill.target_store import Answers, TargetStore


@dataclass
class Sample:
    """A text to learn from."""

    prompt: np.ndarray  # ids (P,)
    response: np.ndarray  # ids (R,)
    stored: Mapping[str, Tensor] | None = None  # the target's distributions along it: `ids` (R, k) and `log_probs` (R, k + 1)


def batch_of(samples: Sequence[Sample], device: torch.device) -> ResponseBatch:
    """Return the batch of samples."""
    return ResponseBatch.of([sample.prompt for sample in samples], [sample.response for sample in samples], device)


class Samples(Dataset):
    """One sample per prompt and epoch: the next of the responses to the prompt."""

    def __init__(self, prompts: Sequence[np.ndarray], answers: Answers, stored: TargetStore | None = None) -> None:
        """Take ids (P,) of prompts, the `answers` to each, and the target's distributions along these where they are stored."""
        self.prompts, self.answers, self.stored = prompts, answers, stored

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, row = key
        responses = self.answers[row]
        number = (epoch + row) % len(responses)  # an epoch has responses of all numbers, of which the first may be greedy
        return Sample(self.prompts[row], responses[number], None if self.stored is None else self.stored[row, number])


def held_out(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Samples:
    """Return prompts with the target's response to each, the same in every epoch."""
    return Samples(prompts, [[response] for response in responses])


def train_samples(data: GeneratedData, pair: Pair, settings: Distillation) -> Samples:
    """Return the samples of prompts that are short enough and have responses. Raises UserError if there are none."""
    encoded = encode_prompts(pair, [prompt for prompt in data.prompts if prompt.split == "train"], data.limits)
    known = defaultdict[str, list[np.ndarray]](list)
    if settings.samples == "text":
        for prompt, ids in encoded:
            if prompt.response:
                known[prompt.prompt_id] = [encoded_response(pair, prompt.response, len(ids), data.limits.max_new_tokens)]
    else:
        rows = load_split(data.folder, "train").with_format("arrow")[:]
        for prompt_id, response in zip(rows.column("prompt_id").to_pylist(), _column(rows, "response_ids"), strict=True):
            known[prompt_id].append(response)
    kept = [(prompt, ids) for prompt, ids in encoded if prompt.prompt_id in known]
    if not kept:
        raise UserError(f"no train prompt has a response of samples={settings.samples}; ask for more with data.num_train.")
    return Samples([np.asarray(ids, dtype=np.int32) for _, ids in kept], [known[prompt.prompt_id] for prompt, _ in kept])


def encoded_response(pair: Pair, text: str, prompt_length: int, max_new_tokens: int) -> np.ndarray:
    """Return the ids of a data set's own response with an end token, cut to `max_new_tokens` and to the pair's window."""
    ids = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = pair.tokenizer.eos_token_id
    if end not in pair.stop_tokens:
        end = min(pair.stop_tokens, default=None)
    whole = [*ids, *([] if end is None else [end])]
    return np.asarray(whole[: min(max_new_tokens, pair.window - prompt_length)], dtype=np.int32)


def load_splits(
    data: GeneratedData, pair: Pair, train: Samples, settings: Distillation
) -> tuple[dict[str, Samples], dict[str, Any]]:
    """Return the samples of each split, and what decides them; distributions are stored if they are read again and fit."""
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
    return splits, {"data": data.folder.name, "texts": store.provenance["texts"], "stored distributions": distribution}


def _column(rows: Any, name: str) -> list[np.ndarray]:
    return [np.asarray(row, dtype=np.int32) for row in rows.column(name).to_numpy()]
