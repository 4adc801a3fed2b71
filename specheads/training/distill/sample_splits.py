"""The splits of a distillation: samples to train on, and the target's responses to held-out prompts to measure the draft on."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.prompts.prompt import EncodedPrompt, GeneratedData, encode_prompts
from specheads.storage.data_set import load_split
from specheads.training.distill.samples import HeldOutSamples, Ragged, Responses, TrainSamples
from specheads.training.distill.settings import Distillation, TargetStorage
from specheads.training.distill.target_store import TargetStore, texts_fingerprint

OF_DATA = ("data", "texts", "stored distributions")  # what `load_splits` adds to a run's provenance


@dataclass(frozen=True)
class Splits:
    """The samples of each split."""

    train: TrainSamples
    dev: HeldOutSamples
    test: HeldOutSamples


@dataclass(frozen=True)
class TrainTexts:
    """The train prompts, the responses to them that exist before training, by kind, and the store of each kind's distributions.

    `longest` is the number of tokens of the longest text that training can read.
    """

    prompts: Ragged
    responses: dict[str, Responses]
    stores: dict[str, TargetStore]
    longest: int

    @classmethod
    def of(cls, data: GeneratedData, pair: Pair, settings: Distillation) -> "TrainTexts":
        """Return the texts of a data set. Raises UserError if no train prompt has the responses that are asked for."""
        prompts, responses = _train_responses(data, pair, settings)
        root, top_k = data.folder.parent, settings.target_probs.top_k
        stores = {kind: TargetStore(root, pair, prompts, known, settings.loss, top_k) for kind, known in responses.items()}
        lengths = [store.text_lengths.max() for store in stores.values()]
        if "on_policy" in settings.shares:
            lengths.append(min(prompts.lengths.max() + data.limits.max_new_tokens, pair.window))
        return cls(prompts, responses, stores, int(max(lengths)))

    def can_be_stored(self, storage: TargetStorage) -> bool:
        """Return whether all distributions that training reads fit the store. Raises UserError: see TargetStore.fits."""
        return all(store.fits(storage) for store in self.stores.values())


def load_splits(
    data: GeneratedData, texts: TrainTexts, settings: Distillation, target_leaves: bool = False, alike: bool = False
) -> tuple[Splits, dict[str, Any]]:
    """Return the splits and their provenance (OF_DATA).

    If the target's distributions along train responses are stored, as they are if `target_leaves` its device, the missing ones
    are computed here. `alike`: they are stored for responses of all kinds, or for none.

    Raises:
        UserError: the distributions do not fit the store.
    """
    dev, test = _held_out_samples(data, "dev", settings.validation.num_prompts), _held_out_samples(data, "test")
    stored = stored_distributions(texts, settings, target_leaves, alike)
    train = TrainSamples(texts.prompts, texts.responses, settings.shares, settings.seed, stored)
    distributions = {kind: store.provenance["distribution"] for kind, store in stored.items()}
    provenance = data.folder.name, texts_fingerprint(texts.prompts, texts.responses), json.dumps(distributions)
    return Splits(train, dev, test), dict(zip(OF_DATA, provenance, strict=True))


def _held_out_samples(data: GeneratedData, split: str, most: int | None = None) -> HeldOutSamples:
    """Return the prompts of a held-out split with the target's responses; at most the first `most`."""
    rows = load_split(data.folder, split).with_format("arrow")[:most]
    return HeldOutSamples(*(Ragged.of_column(rows.column(name)) for name in ("prompt_ids", "response_ids")))


def stored_distributions(
    texts: TrainTexts, settings: Distillation, target_leaves: bool, alike: bool = False
) -> dict[str, TargetStore]:
    """Return by kind of response the stores that are wanted, after computing what is missing in them; `alike`: all or none."""
    wanted = {}
    for kind, store in texts.stores.items():
        num_responses = max(1, len(texts.responses[kind].tokens))
        num_reads = settings.trainer.max_epochs * settings.shares[kind] * len(texts.prompts) / num_responses
        if store.is_wanted(settings.target_probs, num_reads, target_leaves):
            wanted[kind] = store
    if alike and len(wanted) < len(texts.stores):
        return {}
    for store in wanted.values():
        store.make()
    return wanted


def _train_responses(data: GeneratedData, pair: Pair, settings: Distillation) -> tuple[Ragged, dict[str, Responses]]:
    """Return the train prompts, and by kind the responses to them that exist before training.

    A prompt is left out if it is too long or has no response of one of the kinds.

    Raises:
        UserError: no prompt is left.
    """
    encoded = encode_prompts(pair, [prompt for prompt in data.prompts if prompt.split == "train"], data.limits)
    by_kind: dict[str, Mapping[str, list]] = {}
    if "text" in settings.shares:
        by_kind["text"] = _text_responses(pair, encoded, data.limits.max_new_tokens)
    if "target" in settings.shares:
        by_kind["target"] = _target_responses(data.folder)
    kept = [(prompt, ids) for prompt, ids in encoded if all(prompt.prompt_id in known for known in by_kind.values())]
    if not kept:
        raise UserError(
            f"no train prompt has responses of every kind in samples={settings.samples}; ask for more with data.num_train."
        )
    prompt_ids = [prompt.prompt_id for prompt, _ in kept]
    return Ragged([ids for _, ids in kept]), {kind: numbered(prompt_ids, known) for kind, known in by_kind.items()}


def _text_responses(pair: Pair, prompts: Sequence[EncodedPrompt], max_new_tokens: int) -> dict[str, list[list[int]]]:
    """Return the data set's own response to each prompt that has one, by prompt id."""
    return {
        prompt.prompt_id: [encoded_response(pair, prompt.response, len(ids), max_new_tokens)]
        for prompt, ids in prompts
        if prompt.response
    }


def _target_responses(folder: Path) -> Mapping[str, list]:
    """Return the target's responses to train prompts, by prompt id."""
    rows = load_split(folder, "train").with_format("arrow")[:]
    responses: dict[str, list] = defaultdict(list)
    for prompt_id, response in zip(rows.column("prompt_id").to_pylist(), rows.column("response_ids").to_numpy(), strict=True):
        responses[prompt_id].append(response)
    return responses


def encoded_response(pair: Pair, text: str, prompt_length: int, max_new_tokens: int) -> list[int]:
    """Return the ids of a data set's own response with an end token, cut to `max_new_tokens` and to the pair's window."""
    ids = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = pair.tokenizer.eos_token_id
    if end not in pair.stop_tokens:
        end = min(pair.stop_tokens, default=None)
    return [*ids, *([] if end is None else [end])][: min(max_new_tokens, pair.window - prompt_length)]


def numbered(prompt_ids: Iterable[str], responses: Mapping[str, list]) -> Responses:
    """Return the responses to prompts, numbered in the order of the prompts."""
    rows = [responses[prompt_id] for prompt_id in prompt_ids]
    numbers = iter(range(sum(map(len, rows))))
    return Responses(Ragged([response for row in rows for response in row]), [[next(numbers) for _ in row] for row in rows])
