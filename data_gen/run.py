"""The whole stage: prompts in, a complete cache out; what is already there is kept."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from data_gen.labels import Labels, label_responses
from data_gen.rollouts import Rollouts, roll_out, rollout_uniforms
from specheads.decoding.responses import Response, make_responses, row_uniforms
from specheads.errors import UserError, is_count
from specheads.forecast import Forecast
from specheads.pair import Pair
from specheads.prompts.encoding import EncodedPrompt, ResponseLimits, encode_prompts, response_provenance
from specheads.prompts.sources import SPLITS, Prompt, PromptSource, unique
from specheads.sampling import Warp
from specheads.storage.data_set import SCHEMA
from specheads.storage.shards import FORMAT_VERSION, ShardStore, checksum, exclusive, fingerprint, read_manifest

logger = logging.getLogger(__name__)


# Settings that decide responses; the others decide what the draft is asked about them.
SHARD_LIMITS = ("max_new_tokens", "max_prompt_tokens", "batch_size", "rows_per_shard")
RESPONSE_LIMITS = (*SHARD_LIMITS, "responses_per_prompt")  # which decides how many shards there are, not what is in one


@dataclass(frozen=True)
class GenerationSettings(ResponseLimits):
    """Limits and sizes; all of them are part of the cache's fingerprint."""

    rows_per_shard: int = 512  # a restart repeats at most one shard
    responses_per_prompt: int = 1  # to train prompts; of a greedy pair's, those after the first are sampled
    samples_per_position: int = 4  # tokens drafted there, each with its acceptance probability; a greedy draft has but one
    rollouts_per_response: int = 0  # drafts on the draft's own words, from random positions
    rollout_tokens: int = 8  # at most, of each

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "rollouts_per_response":
                if not is_count(value):
                    raise UserError(f"{name}={value} is no whole number of at least 0; 0: no rollouts.")
            elif not is_count(value, least=1):
                raise UserError(f"{name}={value} is no positive whole number; it is a count of at least 1.")

    @property
    def tokens_per_response(self) -> int:
        """The most tokens that a response takes, with those of its rollouts."""
        return self.max_new_tokens + self.rollouts_per_response * self.rollout_tokens

    def provenance(self) -> dict[str, int]:
        """Return what decides a cache's content: how long rollouts are does not, where there are none."""
        without = () if self.rollouts_per_response else ("rollouts_per_response", "rollout_tokens")
        return {name: value for name, value in asdict(self).items() if name not in without}


def generate_data(
    pair: Pair,
    source: PromptSource,
    warp: Warp,
    settings: GenerationSettings,
    seed: int,
    root: Path,
    splits: Collection[str] = SPLITS,
    labelled: bool = True,
) -> Path:
    """Return the folder of the complete cache for these arguments, made or finished first if need be.

    With `labelled` false only responses are wanted: a cache with labels serves, and one that is made has none, for whatever draft.

    Raises:
        UserError: no usable prompt; another run at work on the same cache.
    """
    loaded = [prompt for prompt in unique(source.load(pair.chats)) if prompt.split in SPLITS]  # final prompts are for evaluations
    prompts = [prompt for prompt in loaded if prompt.split in splits]
    # Labels do no harm, and all splits serve for some.
    every = [cache_facts(pair, some, warp, seed, settings, more) for some in (loaded, prompts) for more in (True, labelled)]
    caches = {root / fingerprint(provenance): provenance for provenance in every}
    for folder, provenance in caches.items():
        if (folder / "manifest.json").is_file() and ShardStore(folder, provenance, SCHEMA).is_complete():
            logger.info("data: complete in %s", folder)
            return folder
    with exclusive(folder):
        store = ShardStore(folder, provenance, SCHEMA)
        shards = plan_shards(encode_prompts(pair, prompts, settings), settings)
        missing = {name: rows for name, rows in shards.items() if not store.has(name)}
        _announce(folder, shards, missing, settings)
        with _progress() as bar:
            total = settings.tokens_per_response * sum(len(shard.prompts) for shard in missing.values())
            task = bar.add_task("responses", total=total, speed="")
            meter = _Meter(bar, task)
            twin = twin_of(root, provenance, settings)
            for name, shard in missing.items():
                answers = shared_responses(twin, name, shard, pair, settings) if twin else None
                store.write(name, make_rows(pair, shard, warp, settings, seed, meter.add, answers, labelled))
        store.complete(list(shards))
    return folder


@dataclass(frozen=True)
class Shard:
    """What one file holds: response number `sample` to each of `prompts`."""

    prompts: Sequence[EncodedPrompt]
    sample: int = 0


def cache_facts(
    pair: Pair, prompts: Sequence[Prompt], warp: Warp, seed: int, settings: GenerationSettings, labelled: bool
) -> dict[str, Any]:
    """Return everything that decides a cache's content. Responses know of the draft only how far it reaches."""
    provenance = response_provenance(pair, prompts, warp, seed)
    if labelled:
        return provenance | {"settings": settings.provenance()}
    limits = {name: value for name, value in settings.provenance().items() if name in RESPONSE_LIMITS}
    return provenance | {
        "draft": ["every draft", f"of window {pair.window}"],
        "dtype": [str(pair.target.dtype), "any"],
        "settings": limits,
    }


def twin_of(root: Path, provenance: Mapping[str, Any], settings: GenerationSettings) -> Path | None:
    """Return a complete cache of the same target, prompts and limits, if there is one, whatever the draft was asked: its responses are ours."""
    ours, twins = json.loads(json.dumps(provenance)), {}
    for manifest in sorted(root.glob("*/manifest.json")):
        try:
            found = read_manifest(manifest.parent)
        except UserError:
            continue  # it is not the cache that is asked for
        theirs = found.get("provenance", {})
        if not found.get("complete") or theirs.keys() != ours.keys():
            continue
        limits = [{name: provenance["settings"].get(name) for name in SHARD_LIMITS} for provenance in (ours, theirs)]
        same = all(theirs[name] == ours[name] for name in ours.keys() - {"draft", "dtype", "settings"})
        if same and theirs["dtype"][0] == ours["dtype"][0] and limits[0] == limits[1]:
            twins[manifest.parent] = theirs | {"format_version": found.get("format_version")}
    most = max(twins, key=lambda folder: twins[folder]["settings"].get("responses_per_prompt", 1), default=None)
    if most is not None:
        earlier = "" if twins[most]["format_version"] == FORMAT_VERSION else " by an earlier version"
        logger.info(
            "data: the target's responses are taken from %s, which was made for %s %s%s", most, *twins[most]["draft"], earlier
        )
    return most


def shared_responses(twin: Path, name: str, shard: "Shard", pair: Pair, settings: GenerationSettings) -> list[Response] | None:
    """Return the responses of a shard from a cache for another draft; None where that is damaged, or where a window cut them elsewhere."""
    entry, path = read_manifest(twin)["shards"].get(name), twin / name
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


def plan_shards(prompts: Sequence[EncodedPrompt], settings: GenerationSettings) -> dict[str, Shard]:
    """Return the files, `train-00000.parquet` and so on; first responses come before second ones."""
    shards = {}
    for split in SPLITS:
        rows = [row for row in prompts if row[0].split == split]
        parts = [
            Shard(rows[start : start + settings.rows_per_shard], sample)
            for sample in range(settings.responses_per_prompt if split == "train" else 1)
            for start in range(0, len(rows), settings.rows_per_shard)
        ]
        shards |= {f"{split}-{number:05d}.parquet": shard for number, shard in enumerate(parts)}
    return shards


def make_rows(
    pair: Pair,
    shard: Shard,
    warp: Warp,
    settings: GenerationSettings,
    seed: int,
    on_step: Callable[[int, int], None],
    responses: list[Response] | None = None,
    labelled: bool = True,
) -> list[dict]:
    """Return the finished rows of one shard, in the order of its prompts; `responses` are the target's, where they are known.

    Without labels, what the draft would be asked stays empty.
    """
    draws = 1 if warp.greedy else settings.samples_per_position
    ids = [ids for _, ids in shard.prompts]
    sizes = settings.max_new_tokens, draws, shard.sample
    uniform = np.stack([row_uniforms(seed, prompt.prompt_id, *sizes) for prompt, _ in shard.prompts])
    # A greedy target has one response. Text that it would not have written shows the heads of a greedy pair more.
    distribution = replace(warp, temperature=1.0) if warp.greedy and shard.sample else warp
    if responses is None:
        responses = make_responses(pair, ids, uniform[:, 0], distribution, settings, on_step)
    else:
        on_step(0, settings.max_new_tokens * len(ids))
    answers = [response.ids for response in responses]
    if labelled:
        labels = label_responses(pair, ids, answers, uniform[:, 1:], warp)
        sizes = shard.sample, settings.rollouts_per_response, settings.rollout_tokens
        uniform = np.stack([rollout_uniforms(seed, prompt.prompt_id, *sizes) for prompt, _ in shard.prompts])
        rollouts = roll_out(pair, ids, answers, uniform, warp, settings.max_new_tokens, settings.batch_size, on_step)
    else:
        labels, rollouts = ([kind(*([] for _ in fields(kind)))] * len(ids) for kind in (Labels, Rollouts))
    return [
        {
            "prompt_id": prompt.prompt_id,
            "sample": shard.sample,
            "split": prompt.split,
            "prompt": prompt.text,
            "prompt_ids": prompt_ids,
            "response_ids": response.ids,
            "finished": response.finished,
            **asdict(label),
            **asdict(rolled),
        }
        for (prompt, prompt_ids), response, label, rolled in zip(shard.prompts, responses, labels, rollouts, strict=True)
    ]


def _announce(folder: Path, shards: Mapping[str, Shard], missing: Mapping[str, Shard], settings: GenerationSettings) -> None:
    rows, left = (sum(len(shard.prompts) for shard in some.values()) for some in (shards, missing))
    logger.info("data: %d responses in %d shards, %d still to do, in %s", rows, len(shards), left, folder)
    # Nine numbers per token and two for every further draw; one for each rollout and two for its tokens. Of four bytes, before compression.
    numbers = settings.max_new_tokens * (9 + 2 * (settings.samples_per_position - 1))
    numbers += settings.rollouts_per_response * (1 + 2 * settings.rollout_tokens)
    size = 4 * numbers * left / 2**20
    logger.info("data: at most %d tokens to generate, at most %.0f MiB on disk", left * settings.tokens_per_response, size)
    free = shutil.disk_usage(folder).free / 2**20
    if size > free:
        logger.warning("data: only %.0f MiB are free there; paths.data= puts it elsewhere", free)


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())


class _Meter:
    """Turns tokens as they come into a bar, on which a row that has ended early counts as its whole limit."""

    def __init__(self, bar: Progress, task) -> None:
        self.bar, self.task = bar, task
        self.start = time.perf_counter()
        self.forecast = Forecast("data", wait=30)
        self.tokens = self.done = 0

    def add(self, made: int, done: int) -> None:
        self.tokens += made
        self.done += done
        speed = self.tokens / (time.perf_counter() - self.start)
        self.bar.update(self.task, completed=self.done, speed=f"{speed:,.0f} tokens/s")
        self.forecast.update(self.done, self.bar.tasks[0].total)
