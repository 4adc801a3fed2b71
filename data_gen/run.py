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

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from specheads.data_gen.kept_states import (
    announce_states,
    keep_states,
    remove_states,
    shards_with_states,
    with_states,
)
from specheads.data_gen.server_runner import server_responses
from specheads.data_gen.settings import RESPONSE_LIMITS, DataGeneration, OwnPrompts
from specheads.data_gen.shard_rows import (
    DEPTH,
    LABELS,
    Shard,
    elements_at_once,
    label_rows,
    plan_shards,
    respond,
    response_rows,
    warp_of,
)
from specheads.data_gen.vllm_runner import responses_provenance, vllm_responses
from specheads.decoding.engine import bulk_operations
from specheads.decoding.responses import Responder, Response
from specheads.decoding.stopping import MAX_TOKENS
from specheads.errors import UserError
from specheads.pair.config import INSTRUCTION
from specheads.pair.needs import memory_of, memory_to_read
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, computing_with
from specheads.progress import Advance, finished, progress, stage
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

MOST_LEFT_OUT = 20  # of so many rows one may be left out, whose logits were NaN


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
    was_complete = True
    while isinstance(found := next_stage(pair, prompts, settings, root, splits, labelled), Stage):
        found.run()
        was_complete = False
    tell_cut_thoughts(pair.tokenizer, found)
    logger.info("data: complete in %s", found)
    if was_complete:
        finished("labels" if labelled else "responses", f"reused from {found}")
    return found


def tell_cut_thoughts(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Warn if responses of a complete cache were cut while the target was thinking, after <think>
    and before </think>.
    """
    begin = tokenizer.get_vocab().get("<think>")
    end = tokenizer.get_vocab().get("</think>")
    if begin is None or end is None:
        return
    paths = sorted(folder.glob("*.parquet"))
    cut = 0
    for path in paths:
        rows = pq.read_table(
            path, columns=["prompt_ids", "response_ids"], filters=[("finished", "==", False)]
        ).to_pylist()
        for row in rows:
            text = row["prompt_ids"] + row["response_ids"]
            marks = [token for token in text if token in (begin, end)]
            cut += marks[-1:] == [begin]
    if cut:
        logger.warning(
            "data: %d of %d responses end within <think>, without an answer: raise"
            " data.max_new_tokens, or have the target not think (for many models"
            " model.chat_template_kwargs.enable_thinking=false)",
            cut,
            sum(pq.read_metadata(path).num_rows for path in paths),
        )


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
    return responses.folder if responses else ResponseStage(pair, wanted, settings, root, labelled)


def _check_answered(pair: Pair, folder: Path) -> None:
    """Warn where half of a complete cache's responses are an end token alone.

    Raises UserError where all are.
    """
    paths = sorted(folder.glob("*.parquet"))
    rows = pa.concat_tables(
        [pq.read_table(path, columns=["response_ids", "finished"]) for path in paths]
    )
    count = pc.sum(
        pc.and_(rows["finished"], pc.less_equal(pc.list_value_length(rows["response_ids"]), 1))
    ).as_py()
    if 2 * (count or 0) < len(rows):
        return
    text = (
        f"{count} of {len(rows)} responses of {pair.target_id} are an end token alone; look at its"
        " chat template (or model.chat, model.instruction_format) and at the end tokens of its"
        " generation config"
    )
    if count == len(rows):
        raise UserError(f"{text}: there is nothing to learn from. The responses are in {folder}.")
    logger.warning("data: %s", text)


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
        with self.store.missing(list(self.shards)) as missing, stage(self.name) as say:
            self.announce(missing)
            with progress(*self.amount(missing)) as advance:
                for lot in self.lots(missing):
                    self.make(lot, advance)
                    self.check_left_out()
            self.complete()
            say(self.made(missing))

    def check_left_out(self) -> int:
        """Return how many rows are left out of the shards that exist.

        Raises UserError where that is more than one in MOST_LEFT_OUT of all.
        """
        left_out = 0
        for name, entry in self.store.shards.items():
            if name in self.shards:
                left_out += len(self.shards[name].prompts) - entry["rows"]
        num_rows = self.num_rows(self.shards)
        if left_out * MOST_LEFT_OUT > num_rows:
            raise UserError(
                f"{left_out} of {num_rows} rows are left out of {self.name}, as a model's logits"
                f" were NaN or infinite: more than one in {MOST_LEFT_OUT}, so the model does not"
                " work in this type. Use model.dtype=float32, or bfloat16 in place of float16."
            )
        return left_out

    def complete(self) -> None:
        """Declare the cache complete; the manifest and the log say how many rows are left out."""
        if left_out := self.check_left_out():
            logger.warning(
                "data: %d of %d rows are left out of %s; the log names them",
                left_out,
                self.num_rows(self.shards),
                self.name,
            )
        self.store.complete(list(self.shards), left_out)

    def num_rows(self, names: Collection[str]) -> int:
        return sum(len(self.shards[name].prompts) for name in names)

    def amount(self, names: Collection[str]) -> tuple[str, float]:
        """Return what making some shards is counted in, and how much of it there is at most."""
        return self.name, self.num_rows(names)

    def announce(self, missing: Collection[str]) -> None:
        """Log how many responses are to be made or labelled, and the memory for it.

        Their size follows with the first shard.
        """
        rows = self.num_rows(missing)
        memory = self.memory()
        whole = self.num_rows(self.shards)
        how = (
            f"{whole - rows} reused, {rows} still to do" if rows < whole else f"{rows} still to do"
        )
        logger.info(
            "data: %s of %d prompts, %s, in %s%s", self.name, whole, how, self.store.folder, memory
        )
        self.store.announce(self.name, [len(self.shards[name].prompts) for name in missing])

    @abstractmethod
    def made(self, names: Collection[str]) -> str:
        """Return what some shards hold, in a few words."""

    @abstractmethod
    def memory(self) -> str:
        """Return how much memory making shards takes, for the log.

        Nothing where another program makes them.
        """

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

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        settings: DataGeneration,
        root: Path,
        will_be_labelled: bool,
    ) -> None:
        super().__init__(pair, prompts, settings, root)
        self.with_states = set[str]()  # the shards whose states labels are computed from
        if will_be_labelled:
            self.with_states.update(shards_with_states(pair, self.shards, settings))

    def announce(self, missing: Collection[str]) -> None:
        super().announce(missing)
        if self.with_states:
            kept = {name: self.shards[name] for name in self.with_states}
            announce_states(self.pair, kept, self.settings, self.store)

    def lots(self, missing: Collection[str]) -> list[list[str]]:
        """Return the lots with missing shards, whole ones where states are kept: those of a row
        depend, by the rounding of sums, on the rows that are decoded with it.
        """
        lots = []
        for lot in self._all_lots():
            left = [name for name in lot if name in missing]
            if left:
                lots.append(lot if lot[0] in self.with_states else left)
        return lots

    def _all_lots(self) -> list[list[str]]:
        """Return the fewest shards each that fill our rows, or the part of each of the processes
        that start a vLLM; those of a lot have one warp, and all or none have states.
        """
        settings = self.settings
        workers = settings.ray_num_workers if settings.runner == "ray" else 1
        rows = settings.batch_size if settings.runner == "local" else 1
        if settings.elsewhere:
            rows = -(-self.num_rows(self.shards) // workers)
        lots = list[list[str]]()
        last: tuple[Warp, bool] | None = None
        for name, shard in self.shards.items():
            warp = settings.warp if settings.elsewhere else warp_of(settings, shard)
            kind = warp, name in self.with_states
            if not lots or self.num_rows(lots[-1]) >= rows or kind != last:
                lots.append([])
            lots[-1].append(name)
            last = kind
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
        return self.name, self.num_rows(names) * self.settings.max_new_tokens

    def made(self, names: Collection[str]) -> str:
        num_tokens = 0
        for name in names:
            rows = pq.read_table(self.store.folder / name, columns=["response_ids"])
            num_tokens += len(rows["response_ids"].combine_chunks().values)
        return f"{self.num_rows(names):,} of the target, {num_tokens:,} tokens"

    def memory(self) -> str:
        return (
            ""
            if self.settings.elsewhere
            else ", " + memory_of(self.name, self.pair.target_lm, self._responder.memory())
        )

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
                if name in self.with_states:
                    keep_states(self.store, name, responses)
                self.store.write(name, response_rows(shards[name], responses))

    def _own_responses(
        self, shards: Mapping[str, Shard], advance: Advance
    ) -> Generator[tuple[str, list[Response]]]:
        missing = self.store.still_missing(list(self.shards))
        last = list(shards)[-1]
        keeps_states = last in self.with_states
        how = {
            "on_step": advance,
            "journal": None if keeps_states else self.store.journal(last),
            "num_later": self.num_rows([name for name in missing if name not in shards]),
            "with_states": keeps_states,
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

    def made(self, names: Collection[str]) -> str:
        return f"{self.num_rows(names):,} responses with acceptance probabilities"

    def memory(self) -> str:
        models = self.pair.target_lm, self.pair.draft_lm
        most = elements_at_once(models[0].device)
        parts = memory_to_read(*models, MAX_TOKENS, with_target=True, most=most)
        return ", " + memory_of(self.name, models[0], *parts)

    def make(self, names: Sequence[str], advance: Advance) -> None:
        operations = bulk_operations(self.pair.target_lm.device)
        columns = ["prompt_ids", "sample", "response_ids", "finished"]
        for name in names:
            shard = self.shards[name]
            path = self.responses.folder / name
            rows = list[dict[str, Any]]()
            if self.responses.has(name):
                rows = pq.read_table(path, columns=columns).to_pylist()
            answered = _answered(shard, rows)
            if len(answered.prompts) != len(rows):
                raise UserError(f"{path} has changed since it was written; run the command again.")
            responses = with_states(
                self.responses,
                name,
                [Response(row["response_ids"], row["finished"]) for row in rows],
            )
            with computing_with(operations):
                self.store.write(
                    name, label_rows(self.pair, answered, responses, self.settings, advance)
                )
            remove_states(self.responses, [name])

    def complete(self) -> None:
        super().complete()
        # A process was killed right after it had written the shard.
        remove_states(self.responses, list(self.shards))


def _answered(shard: Shard, rows: Sequence[Mapping[str, Any]]) -> Shard:
    """Return the part of a shard whose prompts have responses: rows, in the shard's order."""
    left = iter(shard.prompts)
    found = []
    for row in rows:
        for prompt, ids in left:
            if (ids, shard.sample) == (row["prompt_ids"], row["sample"]):
                found.append((prompt, ids))
                break
    return replace(shard, prompts=found)


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
        labels = [*LABELS, DEPTH] if pair.draft_lm.reads_layers else LABELS
        return provenance | {"settings": settings.sizes(), "labels": labels}
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
    # The command line has no sign for a new line
    openings = [each.replace(r"\n", "\n") for each in wish.openings or ("",)]
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
