"""Responses that are read from a complete cache, also that of another draft: the target's answers do not depend on the draft."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_gen.rows import Shard
from data_gen.settings import SHARD_LIMITS, Generation
from specheads.decoding.responses import Response
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.storage.shards import FORMAT_VERSION, checksum, fingerprint, read_manifest

logger = logging.getLogger(__name__)


def reusable_cache(root: Path, provenance: Mapping[str, Any]) -> Path | None:
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


def read_responses(cache: Path, name: str, shard: Shard, pair: Pair, settings: Generation) -> list[Response] | None:
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
