"""The data set on disk: one row per response, in Parquet shards that each belong to one split."""

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from specheads.errors import UserError
from specheads.storage.files import read_json, write_json
from specheads.storage.shards import checksum, read_manifest

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

_COPIES = ".arrow"  # the folder, in that of the data set, of copies of splits that can be mapped into memory
SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "sample": pa.int32(),  # number of the response among those of its prompt
        "split": pa.string(),
        "prompt": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "finished": pa.bool_(),
        "draft_ids": pa.list_(pa.int32()),
        "accept_prob": pa.list_(pa.float32()),
        "overlap": pa.list_(pa.float32()),
        "draft_logprob": pa.list_(pa.float32()),
        "target_logprob": pa.list_(pa.float32()),
        "response_draft_logprob": pa.list_(pa.float32()),
        "response_target_logprob": pa.list_(pa.float32()),
        "more_draft_ids": pa.list_(pa.list_(pa.int32())),
        "more_accept_prob": pa.list_(pa.list_(pa.float32())),
        # Empty: earlier versions could write drafts from random positions here.
        "rollout_start": pa.list_(pa.int32()),
        "rollout_ids": pa.list_(pa.list_(pa.int32())),
        "rollout_accept_prob": pa.list_(pa.list_(pa.float32())),
    }
)


def load_split(folder: Path, split: str) -> "datasets.Dataset":
    """Return one split of a complete cache, mapped from disk. Raises UserError if it has no rows."""
    import datasets  # slow to import, and only readers need it

    names = sorted(name for name in read_manifest(folder).get("shards", {}) if name.startswith(f"{split}-"))
    files = [str(folder / name) for name in names]
    if not files:
        raise UserError(f"{folder} has no rows of split {split!r}; data.num_{split}= must be above 0 to generate some.")
    datasets.disable_progress_bars()
    copies = folder.absolute() / _COPIES
    note = copies / f"{split}.json"
    known = _unchanged(note) if note.is_file() else {}
    if known is None:
        logger.warning("data: what %s holds of split %s is damaged and will be made again", copies, split)
        shutil.rmtree(copies)
    rows = datasets.Dataset.from_parquet(files, cache_dir=str(copies))
    names = [str(Path(file["filename"]).absolute().relative_to(copies)) for file in rows.cache_files]
    if not known or not known.keys() >= set(names):
        write_json(note, {name: checksum(copies / name) for name in names}, writer=str(os.getpid()))
    return rows


def _unchanged(note: Path) -> dict[str, str] | None:
    """Return the checksums of a split's copies by their names, None if one has changed: `datasets` does not look."""
    try:
        known = read_json(note)
        return known if all(checksum(note.parent / name) == sha256 for name, sha256 in known.items()) else None
    except (OSError, ValueError, AttributeError):
        return None
