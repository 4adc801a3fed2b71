"""Files that are removed while a command is running, after they were verified: the message names
them.
"""

import numpy as np
import pytest

from specheads.errors import user_error
from specheads.replay.recording import load_recording
from specheads.storage.data_set import load_split
from specheads.storage.journal import Journal
from specheads.storage.row_store import RowStore
from specheads.storage.runs import finish, run_folder
from tests.mutations import kinds

READERS = {
    "data set": (
        kinds.make_data_set,
        "data/train-*.parquet",
        lambda folder: load_split(folder / "data", "train"),
    ),
    "tensor shards": (
        kinds.make_tensors,
        "features/*/*.safetensors",
        lambda folder: RowStore(
            folder / "features", {"seed": 0}, {"a": np.array([1, 1])}, "features"
        ).row("a", 0),
    ),
    "recording": (
        kinds.record,
        "recordings/*/*.parquet",
        lambda folder: load_recording(next(folder.glob("recordings/*"))),
    ),
    "manifest": (
        kinds.record,
        "recordings/*/manifest.json",
        lambda folder: load_recording(next(folder.glob("recordings/*"))),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_gone_is_named(name, tmp_path):
    make, pattern, read = READERS[name]
    make(tmp_path)
    read(tmp_path)
    gone = sorted(tmp_path.glob(pattern))
    for path in gone:
        path.unlink()
    with pytest.raises(Exception) as raised:  # noqa: PT011  # which is what this is about
        read(tmp_path)
    message = user_error(raised.value)
    assert message is not None and (
        gone[0].name in str(message) or str(gone[0].parent) in str(message)
    ), repr(raised.value)


def test_a_folder_that_is_gone_is_named(tmp_path):
    run = run_folder(tmp_path / "outputs", "key")
    journal = Journal(run / "generations.jsonl", {})
    for path in sorted(run.iterdir()):
        path.unlink()
    run.rmdir()
    for write in (lambda: journal.add(0, {}), lambda: finish(run)):
        with pytest.raises(FileNotFoundError) as raised:
            write()
        assert str(run) in str(user_error(raised.value))
