"""The data set on disk: one row per response, in Parquet shards that each belong to one split."""

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from specheads.errors import UserError
from specheads.storage.shards import read_manifest

if TYPE_CHECKING:
    import datasets

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
        "more_draft_ids": pa.list_(pa.list_(pa.int32())),
        "more_accept_prob": pa.list_(pa.list_(pa.float32())),
        "draft_depth": pa.list_(pa.int32()),  # empty for drafts that read tokens alone
    }
)


def load_split(folder: Path, split: str) -> "datasets.Dataset":
    """Return one split of a complete cache, mapped from disk.

    Raises UserError if it has no rows.
    """
    import datasets  # slow to import, and only readers need it

    names = sorted(
        name for name in read_manifest(folder).get("shards", {}) if name.startswith(f"{split}-")
    )
    files = [str(folder / name) for name in names]
    if not files:
        raise UserError(
            f"{folder} has no rows of split {split!r}; data.num_{split}= must be above 0 to"
            " generate some."
        )
    datasets.disable_progress_bars()
    # `datasets` writes the rows once more, in a form that can be mapped into memory.
    return datasets.Dataset.from_parquet(files, cache_dir=str(folder.absolute() / ".arrow"))
