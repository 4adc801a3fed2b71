"""Make a data set in two stages, of which each fills a cache and keeps the shards that exist.

`Responses` makes the target's responses, which fit every draft of the same window. `Labels` reads them, and adds the tokens that
the draft samples along them with their acceptance probabilities.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_gen.progress import Meter, announce
from data_gen.rows import Shard, label_rows, plan_shards, respond, response_rows
from data_gen.settings import RESPONSE_LIMITS, SHARD_LIMITS, Generation
from data_gen.vllm_runner import VllmResponses, responses_provenance
from specheads.decoding.responses import Responder, Response
from specheads.errors import UserError
from specheads.forecast import progress
from specheads.pair.pair import Pair
from specheads.prompts.prompt import SPLITS, Prompt, PromptSource, encode_prompts, response_provenance, unique
from specheads.storage.data_set import SCHEMA
from specheads.storage.shards import FORMAT_VERSION, MANIFEST, ShardStore, checksum, fingerprint, read_manifest

logger = logging.getLogger(__name__)

Advance = Callable[[int], object]  # takes how many responses are done


def generate_data(
    pair: Pair,
    source: PromptSource,
    settings: Generation,
    root: Path,
    splits: Collection[str] = SPLITS,
    labelled: bool = True,
) -> Path:
    """Return the folder of the complete cache for these arguments; missing shards are made first.

    Another process of this machine that makes the same cache is waited for. With `labelled` false, responses are enough: an
    existing cache with labels is used as well.

    Raises:
        UserError: no usable prompt.
    """
    prompts = unique(source.load(pair.chats))
    while isinstance(stage := next_stage(pair, prompts, settings, root, splits, labelled), Stage):
        stage.run()
    logger.info("data: complete in %s", stage)
    return stage


def next_stage(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: Generation,
    root: Path,
    splits: Collection[str] = SPLITS,
    labelled: bool = True,
) -> "Path | Stage":
    """Return the folder of the complete cache, see `generate_data`, or the stage that comes next where there is none yet."""
    usable = [prompt for prompt in prompts if prompt.split in SPLITS]  # final prompts are for evaluations
    wanted = [prompt for prompt in usable if prompt.split in splits]
    # A cache with labels, or with more splits than needed, can be used too.
    for some in (usable, wanted):
        for labels in (True, labelled):
            if folder := _complete(root, cache_provenance(pair, some, settings, labels)):
                return folder
    if not labelled:
        return Responses(pair, wanted, settings, root)
    for some in (usable, wanted):
        if folder := _complete(root, cache_provenance(pair, some, settings, labelled=False)):
            return Labels(pair, wanted, settings, root, folder)
    return Responses(pair, wanted, settings, root)


def _complete(root: Path, provenance: dict[str, Any]) -> Path | None:
    folder = root / fingerprint(provenance)
    return folder if (folder / MANIFEST).is_file() and ShardStore(folder, provenance, SCHEMA).is_complete() else None


class Stage(ABC):
    """One stage of a data set: the shards of a cache, made in lots that do not depend on each other."""

    name: str
    labelled: bool

    def __init__(self, pair: Pair, prompts: Sequence[Prompt], settings: Generation, root: Path) -> None:
        self.pair, self.settings, self.root = pair, settings, root
        provenance = cache_provenance(pair, prompts, settings, self.labelled)
        self.store = ShardStore(root / fingerprint(provenance), provenance, SCHEMA)
        self.shards = plan_shards(encode_prompts(pair, prompts, settings.limits), settings)

    def run(self) -> None:
        """Make what is missing in this process."""
        with self.store.missing(list(self.shards)) as missing, self.progress(self.announced(missing)) as advance:
            for lot in self.lots(missing):
                self.make(lot, advance)
            self.store.complete(list(self.shards))

    def num_rows(self, names: Collection[str]) -> int:
        """Return the number of responses in some shards."""
        return sum(len(self.shards[name].prompts) for name in names)

    def announced(self, missing: Collection[str]) -> int:
        """Log what is to be done; return the number of responses in the missing shards."""
        announce(self.name, self.store.folder, self.num_rows(self.shards), self.num_rows(missing), self.settings)
        return self.num_rows(missing)

    def lots(self, missing: Collection[str]) -> list[list[str]]:
        """Return the missing shards in the parts in which they are made."""
        return [[name] for name in missing]

    def progress(self, num_rows: int) -> Any:
        """Return a context manager with a progress bar; it gives what advances it."""
        return progress(self.name, num_rows)

    @abstractmethod
    def make(self, names: Sequence[str], advance: Any) -> None:
        """Make some shards."""


class Responses(Stage):
    """The stage that answers the prompts: with responses of another cache, by vLLM, or in this process."""

    name, labelled = "responses", False

    def lots(self, missing: Collection[str]) -> list[list[str]]:
        """Return one lot per vLLM process, which answers many prompts together, or one per shard."""
        if not self.settings.by_vllm:
            return super().lots(missing)
        names, count = list(self.shards), self.settings.num_lots
        ends = [round(len(names) * number / count) for number in range(count + 1)]
        return [[name for name in names[first:end] if name in missing] for first, end in pairwise(ends)]

    def progress(self, num_rows: int) -> Any:
        return Meter(num_rows, self.settings.max_new_tokens)

    @cached_property
    def reusable(self) -> Path | None:
        """A cache whose responses are copied."""
        return None if self.settings.by_vllm else _reusable_cache(self.root, self.store.provenance)

    @cached_property
    def responder(self) -> Responder:
        """What makes responses in this process."""
        lengths = [len(ids) for shard in self.shards.values() for _, ids in shard.prompts]
        return Responder(self.pair, lengths, self.settings.limits)

    def make(self, names: Sequence[str], advance: Callable[[int, int], None]) -> None:
        """`advance` takes the tokens that were made, and how many responses ended with them."""
        if self.settings.by_vllm and names:
            missing = {name: self.shards[name] for name in names}
            with VllmResponses(self.pair, missing, self.settings, self.store.folder) as vllm:
                for name in names:
                    self.store.write(name, response_rows(self.shards[name], vllm.of(name, advance)))
            return
        for name in names:
            shard = self.shards[name]
            responses = _read_responses(self.reusable, name, shard, self.pair, self.settings) if self.reusable else None
            if responses is not None:
                advance(0, len(responses))
            else:
                responses = respond(self.responder, shard, self.settings, advance)
            self.store.write(name, response_rows(shard, responses))


class Labels(Stage):
    """The stage that adds the draft's tokens and their labels to the responses in a folder."""

    name, labelled = "labels", True

    def __init__(self, pair: Pair, prompts: Sequence[Prompt], settings: Generation, root: Path, responses: Path) -> None:
        super().__init__(pair, prompts, settings, root)
        self.responses = responses

    def make(self, names: Sequence[str], advance: Advance) -> None:
        """`advance` takes how many responses are labelled."""
        for name in names:
            shard = self.shards[name]
            responses = _read_responses(self.responses, name, shard, self.pair, self.settings)
            if responses is None:
                raise UserError(f"{name} in {self.responses} has changed since it was written; run the command again.")
            self.store.write(name, label_rows(self.pair, shard, responses, self.settings))
            advance(len(responses))


def cache_provenance(pair: Pair, prompts: Sequence[Prompt], settings: Generation, labelled: bool) -> dict[str, Any]:
    """Return everything that decides a cache's content. Responses depend on the draft only by the length of its window."""
    provenance, sizes = response_provenance(pair, prompts, settings.warp, settings.seed), settings.sizes()
    provenance |= responses_provenance(settings)
    if labelled:
        return provenance | {"settings": sizes}
    return provenance | {
        "draft": ["every draft", f"of window {pair.window}"],
        "dtype": [str(pair.target.dtype), "any"],
        "settings": {name: value for name, value in sizes.items() if name in RESPONSE_LIMITS},
    }


def _reusable_cache(root: Path, provenance: Mapping[str, Any]) -> Path | None:
    """Return a complete cache in `root` of the same target, prompts and limits, from which responses can be copied, or None."""
    wanted = json.loads(json.dumps(provenance))
    candidates = {}
    for manifest_path in sorted(root.glob("*/manifest.json")):
        if manifest_path.parent.name == fingerprint(provenance):
            continue  # the cache itself, whose shards have changed
        try:
            manifest = read_manifest(manifest_path.parent)
        except UserError:
            continue  # an unreadable cache has nothing to copy
        if manifest.get("complete") and _has_same_responses(manifest.get("provenance", {}), wanted):
            candidates[manifest_path.parent] = manifest
    if not candidates:
        return None
    folder = max(candidates, key=lambda path: candidates[path]["provenance"]["settings"].get("responses_per_prompt", 1))
    manifest = candidates[folder]
    earlier = "" if manifest.get("format_version") == FORMAT_VERSION else " by an earlier version"
    logger.info(
        "data: the target's responses are taken from %s, which was made for %s %s%s",
        folder,
        *manifest["provenance"]["draft"],
        earlier,
    )
    return folder


def _has_same_responses(theirs: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two caches of these provenances have the same responses, shard by shard."""
    if theirs.keys() != wanted.keys() or theirs["dtype"][0] != wanted["dtype"][0]:
        return False
    limits = [{name: provenance["settings"].get(name) for name in SHARD_LIMITS} for provenance in (theirs, wanted)]
    return limits[0] == limits[1] and all(theirs[name] == wanted[name] for name in wanted.keys() - {"draft", "dtype", "settings"})


def _read_responses(cache: Path, name: str, shard: Shard, pair: Pair, settings: Generation) -> list[Response] | None:
    """Return the responses of a shard of a cache; None if that is missing or damaged, or if a window cut them elsewhere."""
    entry, path = read_manifest(cache)["shards"].get(name), cache / name
    if entry is None or not path.is_file() or checksum(path) != entry["sha256"]:
        return None
    rows = pq.read_table(path, columns=["prompt_ids", "sample", "response_ids", "finished"]).to_pylist()
    if [(row["prompt_ids"], row["sample"]) for row in rows] != [(ids, shard.sample) for _, ids in shard.prompts]:
        return None
    responses = [Response(row["response_ids"], row["finished"]) for row in rows]
    for (_, ids), response in zip(shard.prompts, responses, strict=True):
        limit = min(settings.max_new_tokens, pair.window - len(ids))
        if len(response.ids) > limit or (len(response.ids) < limit and not response.finished):
            return None
    return responses
