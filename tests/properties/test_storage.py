"""Shards and journals are the same in whatever order, by however many workers and after whatever
interruptions they are made.
"""

import tempfile
import threading
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from fakes import tiny_pair
from hypothesis import example, given
from hypothesis import strategies as st
from properties.strategies import probabilities, tries

from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt, text_id
from specheads.storage import files, journal, shards
from specheads.storage.journal import Journal
from specheads.storage.row_store import RowStore
from specheads.storage.shards import ShardStore

LISTS = {"ids": pa.list_(pa.int32()), "probs": pa.list_(pa.float32())}
SCHEMA = pa.schema({"number": pa.int32(), "text": pa.string(), **LISTS})
PROVENANCE = {"target": ["t", "r"], "seed": 0}
numbers = st.integers(-(2**31), 2**31 - 1)
rows = st.fixed_dictionaries(
    {
        "number": numbers,
        "text": st.text(max_size=5),
        "ids": st.lists(numbers, max_size=4),
        "probs": st.lists(st.floats(width=32, allow_nan=False), max_size=3),
    }
)


@st.composite
def planned_shards(draw):
    """Return rows in consecutive shards, by name."""
    parts = draw(st.lists(st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=5))
    return {f"train-{number:05d}.parquet": part for number, part in enumerate(parts)}


@contextmanager
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def content(folder):
    """Return the bytes of all files, but for those that may stay without harm.

    They are unfinished manifests, as another worker may be writing one, and notes of shards that a
    manifest lists by now.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    harmless = (".manifest.json.*.tmp", ".[!.]*.json")
    kept = [path for path in paths if not any(path.match(pattern) for pattern in harmless)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def make(folder, plan, order=None, pause=lambda: None):
    """Write the shards of a plan that are missing, as data generation does."""
    store = ShardStore(folder, PROVENANCE, SCHEMA)
    if store.is_complete():
        return
    with store.missing(order or list(plan)) as missing:
        for name in missing:
            pause()
            store.write(name, plan[name])
        store.complete(list(plan))


def made_alone(plan):
    with folder() as alone:
        make(alone, plan)
        return content(alone)


# --- interruptions


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(step, share=0.5):
    """Let the process end at this step of writing files: before and after each file is written, and
    each is renamed.

    `share`: of the file's bytes that have reached the disk.
    """
    left = [step]

    def reached():
        left[0] -= 1
        return left[0] == -1

    def write_whole(path, write, writer=""):
        def write_and_end(temporary):
            if reached():
                raise Killed
            write(temporary)
            if reached():
                temporary.write_bytes(
                    temporary.read_bytes()[: int(share * temporary.stat().st_size)]
                )
                raise Killed

        if reached():
            raise Killed
        whole(path, write_and_end, writer)
        if reached():
            raise Killed

    whole = files.write_whole
    with pytest.MonkeyPatch.context() as patch:
        for module in (files, shards, journal):
            patch.setattr(module, "write_whole", write_whole)
        with suppress(Killed):
            yield


interruptions = st.lists(st.tuples(st.integers(0, 30), probabilities()), min_size=1, max_size=3)
ROW = {"number": 1, "text": "a", "ids": [2], "probs": [0.5]}


@tries(3)
@given(planned_shards(), interruptions)
# While its checksum is noted: that unfinished file stayed.
@example({"train-00000.parquet": [ROW]}, [(10, 0.5)])
def test_a_cache_that_is_resumed_after_any_interruptions_has_the_same_bytes(plan, interruptions):
    with folder() as here:
        for step, share in interruptions:
            with killed_at(step, share):
                make(here, plan)
        make(here, plan)
        assert content(here) == made_alone(plan)


@tries(2)
@given(
    planned_shards(),
    st.lists(st.permutations(range(5)), min_size=2, max_size=3),
    st.none() | st.integers(0, 40),
    probabilities(),
    st.lists(st.sampled_from([0.0, 0.01])),
)
def test_several_workers_write_the_bytes_of_one_and_finish_what_one_that_died_was_making(
    plan, orders, step, share, pauses
):
    ended = []
    left = iter([*pauses, *[0.0] * 20])

    def work(order):
        names = [list(plan)[number] for number in order if number < len(plan)]
        with suppress(Killed):
            make(here, plan, names, lambda: threading.Event().wait(next(left)))
            ended.append(order)

    with folder() as here:
        with nullcontext() if step is None else killed_at(step, share):
            workers = [threading.Thread(target=work, args=(order,)) for order in orders]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert len(ended) >= len(orders) - (step is not None)
        assert content(here) == made_alone(plan)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), interruptions)
def test_a_store_of_tensors_has_the_same_bytes_after_any_interruptions(counts, interruptions):
    sizes = {f"{number}-": np.ones(count, dtype=int) for number, count in enumerate(counts)}

    def make_all(folder):
        store = RowStore(folder, PROVENANCE, sizes, "rows")
        store.fill(
            lambda start, rows: [{"hidden": torch.full((row + 1, 2), float(row))} for row in rows],
            "no memory",
        )
        return store

    with folder() as here, folder() as alone:
        for step, share in interruptions:
            with killed_at(step, share):
                make_all(here)
        store = make_all(here)
        same = make_all(alone)
        assert content(store.folder) == content(same.folder)
        for number, count in enumerate(counts):
            assert [len(store.row(f"{number}-", row)["hidden"]) for row in range(count)] == list(
                range(1, count + 1)
            )


class Letters:
    def load(self, chats):
        texts = ["abc", "ba", "cab", "dddd", "ac", "bbad"]
        return [
            Prompt(text_id(text), ("train", "train", "dev")[number % 3], text)
            for number, text in enumerate(texts)
        ]


@tries(0.2)
@given(interruptions, st.integers(1, 3))
def test_generated_data_has_the_same_bytes_after_any_interruptions(interruptions, rows_per_shard):
    sizes = {"max_new_tokens": 5, "max_prompt_tokens": 8, "batch_size": 2}
    settings = DataGeneration(warp=Warp(1.0, top_k=3), rows_per_shard=rows_per_shard, **sizes)
    pair = tiny_pair(4, scale=2.0)
    with folder() as here, folder() as alone:
        for step, share in interruptions:
            with killed_at(step, share):
                generate_data(pair, Letters(), settings, here)
        made, whole = (generate_data(pair, Letters(), settings, each) for each in (here, alone))
        assert made.name == whole.name and content(here) == content(alone)


entries = st.dictionaries(
    st.text(max_size=3),
    st.integers() | st.text(max_size=4) | st.lists(st.floats(allow_nan=False)),
    max_size=3,
)


@tries(3)
@given(
    st.lists(entries, max_size=5),
    st.lists(st.tuples(probabilities(), st.integers(0, 6)), max_size=3),
)
def test_a_journal_that_was_cut_anywhere_has_its_first_entries_and_goes_on(texts, cuts):
    """At any share of its bytes, and while it is opened again."""
    with folder() as here:
        path = here / "sweep.jsonl"
        for share, step in [*cuts, (1.0, 99)]:
            known = None
            with killed_at(step, share):
                known = Journal(path, PROVENANCE)
            if known is None:
                continue
            count = len(known.entries)
            assert known.entries == dict(enumerate(texts[:count]))
            for number, entry in enumerate(texts[count:], start=count):
                known.add(number, entry)
            path.write_bytes(path.read_bytes()[: int(np.ceil(share * path.stat().st_size))])
        assert Journal(path, PROVENANCE).entries == dict(enumerate(texts))
        assert len(list(here.iterdir())) == 1 + sum(
            path.name.startswith("sweep-") for path in here.iterdir()
        )
