"""Make a data set in two stages, of which each fills a cache and keeps the shards that exist.

The target's responses fit every draft of the same window; labels are the draft's tokens and their
acceptance probabilities.
"""

import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from specheads.data_gen.server_runner import server_responses
from specheads.data_gen.settings import RESPONSE_LIMITS, DataGeneration, OwnPrompts
from specheads.data_gen.shard_rows import (
    LABELS,
    Shard,
    label_rows,
    plan_shards,
    respond,
    response_rows,
    warp_of,
)
from specheads.data_gen.vllm_runner import responses_provenance, vllm_responses
from specheads.decoding.engine import bulk_operations
from specheads.decoding.responses import Responder, Response
from specheads.errors import UserError
from specheads.forecast import Advance, progress
from specheads.pair.config import INSTRUCTION
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, computing_with
from specheads.prompts.prompt import (
    SPLITS,
    Prompt,
    encode_prompts,
    response_provenance,
    text_id,
    unique,
)
from specheads.prompts.sources import PromptSource
from specheads.storage.data_set import SCHEMA, load_split
from specheads.storage.files import write_whole
from specheads.storage.shards import MANIFEST, ShardStore, fingerprint

logger = logging.getLogger(__name__)


def generate_data(
    pair: Pair,
    source: PromptSource | Sequence[Prompt],
    settings: DataGeneration,
    root: Path,
    splits: Collection[str] = SPLITS,
    labelled: bool = True,
) -> Path:
    """Return the folder of the complete cache of the prompts of a source, or of given ones.

    Missing shards are made first.

    With `labelled` false responses are enough. Raises UserError for prompts none of which is
    usable.
    """
    prompts = unique(source if isinstance(source, Sequence) else source.load(pair.chats))
    while isinstance(stage := next_stage(pair, prompts, settings, root, splits, labelled), Stage):
        stage.run()
    logger.info("data: complete in %s", stage)
    return stage


def next_stage(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: DataGeneration,
    root: Path,
    splits: Collection[str] = SPLITS,
    labelled: bool = True,
) -> "Path | Stage":
    """Return the folder of the complete cache, see `generate_data`, or the stage that comes next
    where there is none yet.
    """
    settings = settings.for_pair(pair)
    # Final prompts are for evaluations
    usable = [prompt for prompt in prompts if prompt.split in SPLITS]
    wanted = [prompt for prompt in usable if prompt.split in splits]

    def complete(labels: bool) -> ShardStore | None:
        for some in (usable, wanted):  # a cache with more splits than needed can be used, too
            provenance = cache_provenance(pair, some, settings, labels)
            folder = root / fingerprint(provenance)
            if (folder / MANIFEST).is_file() and (
                store := ShardStore(folder, provenance)
            ).is_complete():
                return store
        return None

    if store := complete(labels=True):
        return store.folder
    responses = complete(labels=False)
    if responses:
        _check_answered(pair, responses.folder)
    if responses and labelled:
        return LabelStage(pair, wanted, settings, root, responses)
    return responses.folder if responses else ResponseStage(pair, wanted, settings, root)


def _check_answered(pair: Pair, folder: Path) -> None:
    """Raise UserError where every response of a complete cache is an end token alone."""
    for path in sorted(folder.glob("*.parquet")):
        for row in pq.read_table(path, columns=["response_ids", "finished"]).to_pylist():
            if len(row["response_ids"]) > 1 or not row["finished"]:
                return
    raise UserError(
        f"all responses of {pair.target_id} in {folder} are an end token alone, so there is nothing"
        " to learn from; look at its chat template (or model.chat, model.instruction_format) and at"
        " the end tokens of its generation config."
    )


class Stage(ABC):
    """One stage of a data set: the shards of a cache, made in lots that do not depend on each
    other.
    """

    name: str
    labelled: bool

    def __init__(
        self, pair: Pair, prompts: Sequence[Prompt], settings: DataGeneration, root: Path
    ) -> None:
        self.pair = pair
        self.settings = settings
        provenance = cache_provenance(pair, prompts, settings, self.labelled)
        self.store = ShardStore(root / fingerprint(provenance), provenance, SCHEMA)
        encoded = encode_prompts(pair, prompts, settings.limits)
        if lost := {prompt.split for prompt in prompts} - {prompt.split for prompt, _ in encoded}:
            raise UserError(
                f"no {lost.pop()} prompt is left, as the log says; raise"
                f" data.max_prompt_tokens={settings.max_prompt_tokens}, or take other prompts."
            )
        self.shards = plan_shards(encoded, settings)

    def run(self) -> None:
        with self.store.missing(list(self.shards)) as missing:
            self.announce(missing)
            with progress(*self.amount(missing)) as advance:
                for lot in self.lots(missing):
                    self.make(lot, advance)
            self.store.complete(list(self.shards))

    def num_rows(self, names: Collection[str]) -> int:
        return sum(len(self.shards[name].prompts) for name in names)

    def amount(self, names: Collection[str]) -> tuple[str, float]:
        """Return what making some shards is counted in, and how much of it there is at most."""
        return self.name, self.num_rows(names)

    def announce(self, missing: Collection[str]) -> None:
        """Log how many responses are to be made or labelled."""
        logger.info(
            "data: %s of %d prompts, %d still to do, in %s",
            self.name,
            self.num_rows(self.shards),
            self.num_rows(missing),
            self.store.folder,
        )

    def lots(self, missing: Collection[str]) -> list[list[str]]:
        return [[name] for name in missing]

    @abstractmethod
    def make(self, names: Sequence[str], advance: Advance) -> None:
        """Make some shards.

        `advance` takes how much of their amount is done, and where that was the most, how much is
        left.
        """


class ResponseStage(Stage):
    """The stage that answers the prompts: by vLLM, by a server, or in this process."""

    name = "responses"
    labelled = False

    def lots(self, missing: Collection[str]) -> list[list[str]]:
        """Return the fewest shards each that fill our rows, or the part of each of the processes
        that start a vLLM; those of a lot have one warp.
        """
        settings = self.settings
        workers = settings.ray_num_workers if settings.runner == "ray" else 1
        rows = settings.batch_size if settings.runner == "local" else 1
        if settings.elsewhere:
            rows = -(-self.num_rows(self.shards) // workers)
        lots = list[list[str]]()
        last: Warp | None = None
        for name in missing:
            warp = settings.warp if settings.elsewhere else warp_of(settings, self.shards[name])
            if not lots or self.num_rows(lots[-1]) >= rows or warp != last:
                lots.append([])
            lots[-1].append(name)
            last = warp
        return lots

    @cached_property
    def _responder(self) -> Responder:
        lengths = list[int]()
        for shard in self.shards.values():
            lengths += [len(ids) for _, ids in shard.prompts]
        return Responder(self.pair, lengths, self.settings.limits)

    def amount(self, names: Collection[str]) -> tuple[str, float]:
        """Return responses where others make them.

        Else tokens, whose pace is known before the first response ends.
        """
        if self.settings.elsewhere:
            return super().amount(names)
        return f"{self.name}, in tokens", self.num_rows(names) * self.settings.max_new_tokens

    def make(self, names: Sequence[str], advance: Advance) -> None:
        shards = {name: self.shards[name] for name in names}
        if self.settings.runner == "server":
            responses_of = server_responses(self.pair, shards, self.settings, self.store, advance)
        elif self.settings.elsewhere:
            responses_of = vllm_responses(
                self.pair, shards, self.settings, self.store.folder, advance
            )
        else:
            responses_of = self._own_responses(shards, advance)
        with contextlib.closing(responses_of) as made:
            for name, responses in made:
                self.store.write(name, response_rows(shards[name], responses))

    def _own_responses(
        self, shards: Mapping[str, Shard], advance: Advance
    ) -> Generator[tuple[str, list[Response]]]:
        num_later = self.num_rows(self.store.still_missing(list(self.shards))) - self.num_rows(
            shards
        )
        how = {
            "on_step": advance,
            "journal": self.store.journal(list(shards)[-1]),
            "num_later": num_later,
        }
        yield from zip(
            shards,
            respond(self._responder, list(shards.values()), self.settings, **how),
            strict=True,
        )


class LabelStage(Stage):
    """The stage that adds the draft's tokens and their labels to the responses in a folder."""

    name = "labels"
    labelled = True

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        settings: DataGeneration,
        root: Path,
        responses: ShardStore,
    ) -> None:
        super().__init__(pair, prompts, settings, root)
        self.responses = responses

    def make(self, names: Sequence[str], advance: Advance) -> None:
        operations = bulk_operations(self.pair.target_lm.device)
        columns = ["prompt_ids", "sample", "response_ids", "finished"]
        for name in names:
            shard = self.shards[name]
            path = self.responses.folder / name
            rows = list[dict[str, Any]]()
            if self.responses.has(name):
                rows = pq.read_table(path, columns=columns).to_pylist()
            answered = [(row["prompt_ids"], row["sample"]) for row in rows]
            if answered != [(ids, shard.sample) for _, ids in shard.prompts]:
                raise UserError(f"{path} has changed since it was written; run the command again.")
            responses = [Response(row["response_ids"], row["finished"]) for row in rows]
            with computing_with(operations):
                self.store.write(
                    name, label_rows(self.pair, shard, responses, self.settings, advance)
                )


def cache_provenance(
    pair: Pair, prompts: Sequence[Prompt], settings: DataGeneration, labelled: bool
) -> dict[str, object]:
    """Return everything that decides a cache's content.

    Responses depend on the draft only by the length of its window.
    """
    provenance = response_provenance(
        pair, prompts, settings.warp, settings.seed
    ) | responses_provenance(settings)
    if labelled:
        return provenance | {"settings": settings.sizes(), "labels": LABELS}
    draft = ["every draft", f"of window {pair.window}"]
    dtype = [str(pair.target.dtype), "any"]
    return provenance | {
        "draft": draft,
        "dtype": dtype,
        "settings": {name: getattr(settings, name) for name in RESPONSE_LIMITS},
    }


def write_own_prompts(pair: Pair, wish: OwnPrompts, settings: DataGeneration, root: Path) -> Path:
    """Return a JSON-lines file of different prompts, `{"instruction": ...}`, that the pair's target
    has written.

    It writes what follows where its chat template has a user's message (Magpie, Xu et al. 2024). A
    text that does not end within `data.max_new_tokens` is no prompt. Raises UserError for a target
    without a format in which a user's message begins, and where no text has ended.
    """
    opening_format = pair.text_before_instruction()
    if opening_format is None:
        raise UserError(
            f"own_prompts.number: {pair.target_id} takes no instructions, so no message of a user"
            " begins anywhere; give model.instruction_format, or take prompts from a data set"
            " (data.path=)."
        )
    opened = replace(pair, instruction_format=opening_format + INSTRUCTION)
    openings = wish.openings or ("",)
    prompts = list[Prompt]()
    for number in range(wish.number):
        opening = openings[number % len(openings)]
        # Each has another id: several responses to one prompt would be in several files.
        prompts.append(Prompt(text_id(f"{number} {opening}"), "train", opening))
    settings = settings.but(responses_per_prompt=1, warp=Warp(1.0))
    folder = generate_data(opened, prompts, settings, root, ("train",), labelled=False)
    texts = dict[str, None]()  # without repetitions, in order
    for row in load_split(folder, "train"):
        if not row["finished"]:
            continue
        # Decoded with what precedes it: some tokenizers drop a space at the beginning.
        before = pair.decode(row["prompt_ids"])
        whole = pair.decode([*row["prompt_ids"], *row["response_ids"]])
        texts[(row["prompt"] + whole[len(before) :]).strip()] = None
    if not (kept := [text for text in texts if text]):
        raise UserError(
            f"{pair.target_id} has written no prompt that ends within"
            f" data.max_new_tokens={settings.max_new_tokens}; raise it."
        )
    file = folder / "own_prompts.jsonl"
    lines = "".join(json.dumps({"instruction": text}) + "\n" for text in kept)
    write_whole(file, lambda temporary: temporary.write_text(lines, encoding="utf-8"))
    return file
