"""The samples that a draft learns from: each train prompt with a response of the data set, of the target, or of the draft."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specheads.decoding.responses import Responder
from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import GeneratedData, ResponseLimits, encode_prompts
from specheads.replay.response_batch import ResponseBatch
from specheads.storage.data_set import load_split
from specheads.training.distill.settings import Distillation
from specheads.training.distill.target_store import Answers, TargetStore, texts_fingerprint


@dataclass
class Sample:
    """A text to learn from."""

    key: tuple[int, int]  # epoch and prompt
    prompt: np.ndarray  # ids (P,)
    response: np.ndarray | None  # ids (R,), None until the draft has written it
    stored: Mapping[str, Tensor] | None = None  # the target's distributions along it: `ids` (R, k) and `log_probs` (R, k + 1)


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
        """Take ids (P,) of prompts, the `answers` to each by kind but those that the draft writes, and the share of each kind."""
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
        number = (epoch + row) % len(responses)  # an epoch has responses of all numbers, of which the first may be greedy
        stored = self.stored[kind][row, number] if kind in self.stored else None
        return Sample(key, self.prompts[row], responses[number], stored)


def held_out(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Samples:
    """Return prompts with the target's response to each, the same in every epoch."""
    return Samples(prompts, {"target": [[response] for response in responses]}, {"target": 1.0})


class DraftResponses:
    """On-policy samples: responses of the draft by (epoch, prompt), for the samples of a few steps at a time.

    They are part of a checkpoint, as a resumed run no longer has the weights that wrote them. All processes write, each what it
    reads, at the same steps: `covered` are the samples of all that have responses somewhere.
    """

    def __init__(self, pair: Pair, warp: Warp, limits: ResponseLimits, seed: int) -> None:
        """Sample with the warp of decoding; a greedy draft would always write the same, so it samples at temperature 1."""
        self.pair, self.limits, self.seed = pair, limits, seed
        self.warp = replace(warp, temperature=1.0) if warp.greedy else warp
        self.responses: dict[tuple[int, int], np.ndarray] = {}
        self.covered: set[tuple[int, int]] = set()

    def refresh(self, batch: Sequence[Sample], upcoming: Callable[[], tuple[Sequence[Sample], Sequence[Sample]]]) -> None:
        """Let the draft write for `upcoming` steps (samples of all processes, and of this one) if a step's has no response."""
        if all(sample.key in self.covered for sample in batch):
            return
        everywhere, here = upcoming()
        self.covered = {sample.key for sample in everywhere}
        self.responses = {}
        if here:
            self.write(here)

    def answered(self, samples: Sequence[Sample]) -> list[Sample]:
        return [replace(sample, response=self.responses[sample.key]) if sample.response is None else sample for sample in samples]

    @torch.no_grad()
    def write(self, samples: Sequence[Sample]) -> None:
        """Let the draft respond to `samples`, and forget the responses that it wrote before."""
        model = self.pair.draft
        was_training = model.training
        model.eval()
        lengths = [len(sample.prompt) for sample in samples]
        # Weights change from call to call: code that was compiled for them, and packed copies, would be made for one call.
        responder = Responder(self.pair, lengths, self.limits, self.pair.draft_lm, engine="eager")
        most = self.limits.max_new_tokens
        uniform = np.stack([np.random.default_rng([self.seed, *sample.key, 3]).random(most) for sample in samples])
        responses = responder.respond([sample.prompt.tolist() for sample in samples], uniform, self.warp)
        keys = [sample.key for sample in samples]
        self.responses = {key: np.array(each.ids, dtype=np.int32) for key, each in zip(keys, responses, strict=True)}
        model.train(was_training)

    def load(self, responses: Mapping[tuple[int, int], Tensor]) -> None:
        """Restore the responses of a checkpoint, those of all processes."""
        self.responses = {key: ids.numpy() for key, ids in responses.items()}
        self.covered = set(responses)


def train_samples(data: GeneratedData, pair: Pair, settings: Distillation) -> Samples:
    """Return the samples of prompts that are short enough and have responses of all kinds. Raises UserError if there are none."""
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
    """Return the samples of each split, and what decides them; distributions are stored `alike` for all kinds, or for some."""
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
    return [np.asarray(row, dtype=np.int32) for row in rows.column(name).to_numpy()]
