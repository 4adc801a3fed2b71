"""The data set on disk: one row per response, in Parquet shards of one split each."""

from pathlib import Path

import pyarrow as pa

from specheads.errors import UserError
from specheads.storage.shards import read_manifest

SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "sample": pa.int32(),  # which of the prompt's responses
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
        "rollout_start": pa.list_(pa.int32()),  # see data_gen/rollouts.py; empty where none were asked for
        "rollout_ids": pa.list_(pa.list_(pa.int32())),
        "rollout_accept_prob": pa.list_(pa.list_(pa.float32())),
    }
)


def load_split(folder: Path, split: str):
    """Return one split of a complete cache as a `datasets.Dataset`, mapped from disk."""
    import datasets  # slow to import, and only readers need it

    names = sorted(name for name in read_manifest(folder).get("shards", {}) if name.startswith(f"{split}-"))
    files = [str(folder / name) for name in names]
    if not files:
        raise UserError(f"{folder} has no rows of split {split!r}; ask for some with data.num_{split}=...")
    datasets.disable_progress_bars()
    return datasets.Dataset.from_parquet(files, cache_dir=str(folder / ".arrow"))
