import hashlib
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from fakes import CountingTokenizer, tiny_pair

from specheads.data_gen import run
from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.shard_rows import plan_shards
from specheads.errors import UserError
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt, encode_prompts, unique
from specheads.storage import shards
from specheads.storage.data_set import SCHEMA, load_split
from specheads.storage.files import lock, locked, write_json
from specheads.storage.shards import ShardStore, fingerprint, read_manifest

SETTINGS = DataGeneration(
    warp=Warp(1.0, top_k=5), max_new_tokens=6, max_prompt_tokens=8, batch_size=2, rows_per_shard=3
)
NAMES = [
    "dev-00000.parquet",
    "test-00000.parquet",
    "train-00000.parquet",
    "train-00001.parquet",
    "train-00002.parquet",
]
NUM_ROWS = {"train": 7, "dev": 2, "test": 3}


class Letters:
    """Prompts of the letters a to h, which count how often they are loaded."""

    def __init__(self, seed=0):
        self.seed = seed
        self.loads = 0

    def load(self, chats):
        self.loads += 1
        generator = np.random.default_rng(self.seed)
        for split, count in NUM_ROWS.items():
            for _ in range(count):
                text = "".join(generator.choice(list("abcdefgh"), size=generator.integers(4, 9)))
                yield Prompt(hashlib.sha256(text.encode()).hexdigest()[:16], split, text)


@pytest.fixture(scope="module", autouse=True)
def eager():
    """Compiling takes longer than all that these tests decode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECHEADS_ENGINE", "eager")
        yield


@pytest.fixture(scope="module")
def pair():
    pair = tiny_pair(8, scale=2.0)
    pair.target.generation_config.eos_token_id = 0
    return pair


@pytest.fixture
def make(pair):
    return lambda root, source=None: generate_data(pair, source or Letters(), SETTINGS, root)


@pytest.fixture(scope="module")
def complete(pair, tmp_path_factory):
    """A cache made in one go, not to be written to."""
    return generate_data(pair, Letters(), SETTINGS, tmp_path_factory.mktemp("complete"))


def labelled(root):
    """The folder of the labels; another one has the responses."""
    (folder,) = (
        path.parent
        for path in root.glob("*/manifest.json")
        if "every draft" not in path.read_text()
    )
    return folder


def content(folder):
    return {name: (folder / name).read_bytes() for name in NAMES}


class Interruption(Exception):
    pass


def interrupt_after(monkeypatch, num_shards):
    """Let the run fail when it reaches shard `num_shards`."""
    made = []

    def label_rows(*args):
        if len(made) == num_shards:
            raise Interruption
        made.append(real(*args))
        return made[-1]

    real = run.label_rows
    monkeypatch.setattr(run, "label_rows", label_rows)


@pytest.fixture
def interrupted(make, tmp_path, monkeypatch):
    """The folder of a run that ended after three of its five shards."""
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(Interruption):
            make(tmp_path)
    folder = labelled(tmp_path)
    assert len(list(folder.glob("*.parquet"))) == 3
    return folder


@pytest.fixture
def made_again(monkeypatch):
    """The texts of the prompts of each shard that is generated from now on."""
    made = []
    real = run.label_rows
    monkeypatch.setattr(
        run,
        "label_rows",
        lambda pair, shard, *rest: (
            made.append([p.text for p, _ in shard.prompts]),
            real(pair, shard, *rest),
        )[1],
    )
    return made


# --- a complete cache


def test_a_complete_cache_has_the_planned_shards_and_nothing_temporary(complete):
    assert sorted(path.name for path in complete.iterdir()) == [
        ".lock",
        *NAMES[:1],
        "manifest.json",
        *NAMES[1:],
    ]


def test_the_manifest_lists_rows_and_checksums_of_every_shard(complete):
    manifest = json.loads((complete / "manifest.json").read_text())
    assert read_manifest(complete)["listed"]
    assert list(manifest["shards"]) == NAMES
    for name, entry in manifest["shards"].items():
        assert entry["sha256"] == hashlib.sha256((complete / name).read_bytes()).hexdigest()
        assert entry["rows"] == pq.read_metadata(complete / name).num_rows
    assert [entry["rows"] for entry in manifest["shards"].values()] == [2, 3, 3, 3, 1]


def test_rows_keep_their_prompt_and_every_list_has_an_entry_per_response_token(complete, pair):
    expected = {p.prompt_id: p for p in Letters().load(chats=False)}
    rows = [row for name in NAMES for row in pq.read_table(complete / name).to_pylist()]
    assert {row["prompt_id"] for row in rows} == set(expected) and len(rows) == 12
    for row in rows:
        prompt = expected[row["prompt_id"]]
        assert (row["prompt"], row["split"]) == (prompt.text, prompt.split)
        assert row["prompt_ids"] == pair.encode_instruction(prompt.text)
        assert (
            row["finished"] == (row["response_ids"][-1] == 0) and 0 not in row["response_ids"][:-1]
        )
        assert row["finished"] or len(row["response_ids"]) == 6
        lists = {
            name: value
            for name, value in row.items()
            if isinstance(value, list) and name != "prompt_ids"
        }
        samples = [
            sample for name in ("more_draft_ids", "more_accept_prob") for sample in lists.pop(name)
        ]
        assert lists.pop("draft_depth") == []  # the draft reads tokens alone
        assert {len(value) for value in [*lists.values(), *samples]} == {len(row["response_ids"])}
        assert len(lists) == 3 and len(samples) == 2 * 3
    assert {row["finished"] for row in rows} == {True, False}


# --- an interrupted run


def spoil(path, damage):
    if damage == "deleted":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if damage == "changed" else data[: len(data) // 2])


def test_a_restart_makes_only_what_is_missing_and_ends_like_an_uninterrupted_run(
    make, complete, interrupted, made_again
):
    stamps = {path: path.stat().st_mtime_ns for path in interrupted.glob("*.parquet")}
    assert make(interrupted.parent) == interrupted
    assert len(made_again) == 2
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert content(interrupted) == content(complete)
    assert read_manifest(interrupted) == read_manifest(complete)


@pytest.mark.parametrize("damage", ["truncated", "changed", "deleted"])
def test_a_damaged_shard_counts_as_missing_and_is_made_again_to_the_byte(
    make, complete, interrupted, made_again, damage, caplog
):
    name = sorted(read_manifest(interrupted)["shards"])[1]
    store = ShardStore(interrupted, read_manifest(interrupted)["provenance"])
    assert store.has(name)
    spoil(interrupted / name, damage)
    assert not store.has(name)
    with caplog.at_level("WARNING"):
        make(interrupted.parent)
    assert f"{name} in {interrupted} is missing or damaged and will be made again" in caplog.text
    assert len(made_again) == 3
    assert content(interrupted) == content(complete)


def test_a_cache_that_was_copied_under_another_name_is_not_trusted(
    make, complete, pair, tmp_path, caplog
):
    other = generate_data(pair, Letters(), SETTINGS.but(seed=1), tmp_path / "other")
    shutil.copytree(other, tmp_path / complete.name)
    with caplog.at_level("WARNING"):
        make(tmp_path)
    assert "manifest.json belongs to another cache" in caplog.text
    assert content(tmp_path / complete.name) == content(complete)


def test_a_file_that_the_manifest_does_not_list_is_not_read(complete, tmp_path):
    shutil.copytree(complete, tmp_path / "cache")
    rows = len(load_split(complete, "train"))
    (tmp_path / "cache" / "train-00099.parquet").write_bytes((complete / NAMES[2]).read_bytes())
    assert len(load_split(tmp_path / "cache", "train")) == rows


def test_an_unreadable_manifest_is_named_and_deleting_it_helps(make, complete, interrupted):
    path = interrupted / "manifest.json"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(UserError, match=r"manifest\.json is not valid JSON.*delete it"):
        make(interrupted.parent)
    path.unlink()
    make(interrupted.parent)
    assert content(interrupted) == content(complete)


def changed(manifest, change):
    content = json.loads(manifest.read_text())
    change(content)
    manifest.write_text(json.dumps(content))


CHANGES = {
    "flag": lambda content: content.update(complete=True),
    "rows": lambda content: content["shards"][NAMES[0]].update(rows=7),
    "fewer shards": lambda content: content["shards"].pop(NAMES[-1]),
    "no shards": lambda content: content.update(shards={}),
    "left out": lambda content: content.update(left_out=3),
    "provenance": lambda content: content["provenance"].update(seed=1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_was_changed_is_refused_by_all_that_reads(make, complete, tmp_path, change):
    folder = tmp_path / complete.name
    shutil.copytree(complete, folder)
    changed(folder / "manifest.json", change)
    for read in (make, lambda root: load_split(folder, "train")):
        with pytest.raises(UserError, match=r"manifest\.json was changed since it was written"):
            read(tmp_path)
    (folder / "manifest.json").unlink()
    make(tmp_path)
    assert content(folder) == content(complete)
    assert read_manifest(folder) == read_manifest(complete)


def as_earlier_versions_wrote(folder, flag):
    """Give a manifest the form of before: with a flag, and without a checksum."""
    changed(folder / "manifest.json", lambda content: content.update(complete=flag))
    changed(folder / "manifest.json", lambda content: content.pop("sha256"))


@pytest.mark.parametrize("flag", [True, False], ids=["flag turned true", "flag as it was"])
def test_an_unfinished_cache_of_an_earlier_version_is_finished(
    make, complete, interrupted, made_again, flag
):
    as_earlier_versions_wrote(interrupted, flag)
    make(interrupted.parent)
    assert len(made_again) == 2 and content(interrupted) == content(complete)


def test_a_complete_cache_of_an_earlier_version_is_used(make, complete, tmp_path, made_again):
    shutil.copytree(complete.parent, tmp_path / "root")
    for folder in (path.parent for path in (tmp_path / "root").glob("*/manifest.json")):
        as_earlier_versions_wrote(folder, True)
    assert make(tmp_path / "root") == tmp_path / "root" / complete.name
    assert made_again == []


# --- the fingerprint


def test_each_argument_of_a_run_changes_the_cache(pair):
    def folder(pair=pair, source=None, settings=SETTINGS, **changed):
        prompts = list((source or Letters()).load(chats=False))
        return fingerprint(
            run.cache_provenance(pair, prompts, settings.but(**changed), labelled=True)
        )

    assert folder() == folder()
    variants = [
        folder(),
        folder(seed=1),
        folder(source=Letters(1)),
        *(
            folder(warp=warp)
            for warp in (
                Warp(0.9, top_k=5),
                Warp(1.0, top_k=6),
                Warp(1.0, 5, 0.9),
                Warp(1.0, 5, min_p=0.1),
            )
        ),
        *(
            folder(**{name: value + 1})
            for name, value in SETTINGS.values().items()
            if name not in ("seed", "warp", "runner")
            and not name.startswith(("vllm", "ray", "server"))
        ),
        *(folder(replace(pair, **{f"{side}_revision": "x"})) for side in ("target", "draft")),
        folder(replace(pair, target=tiny_pair(8).target.float())),
        folder(replace(pair, draft=tiny_pair(8).draft.float())),
    ]
    assert len(set(variants)) == len(variants) == 17
    assert folder(replace(pair, target_id="elsewhere", draft_id="another name")) == folder()
    assert folder(runner="ray", ray_num_workers=7, ray_address="auto") == folder()
    served = folder(runner="server", server_url="http://a", server_concurrency=3, server_seconds=5)
    assert served == folder(runner="server", server_url="http://b") not in variants
    assert folder(runner="server", server_model="x") != served


class ChattingTokenizer(CountingTokenizer):
    chat_template = "b{prompt}c"

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return f"b{messages[0]['content']}c"


def test_the_cache_depends_on_whether_a_pair_chats(pair, tmp_path):
    chatting = replace(pair, tokenizer=ChattingTokenizer(8))
    plain = replace(chatting, chat=False)
    assert chatting.encode_instruction("a") == [1, 0, 2] and plain.encode_instruction("a") == [0]
    settings = SETTINGS.but(max_prompt_tokens=12)
    folders = [generate_data(p, Letters(), settings, tmp_path) for p in (chatting, plain)]
    for folder, p in zip(folders, (chatting, plain), strict=True):
        row = pq.read_table(folder / NAMES[0]).to_pylist()[0]
        assert row["prompt_ids"] == p.encode_instruction(row["prompt"])


# --- prompts and shards


def test_prompts_that_are_repeated_or_too_long_are_left_out(pair):
    texts = [
        ("abc", "train"),
        ("abcabcabc", "train"),
        ("abc", "test"),
        ("abcabcab", "dev"),
        ("h", "test"),
    ]

    class Source:
        def load(self, chats):
            return [Prompt(text, split, text) for text, split in texts]

    kept = encode_prompts(pair, unique(Source().load(chats=False)), SETTINGS.limits)
    assert {(prompt.text, prompt.split) for prompt, _ in kept} == {
        ("abc", "train"),
        ("abcabcab", "dev"),
        ("h", "test"),
    }
    assert all(ids == [ord(letter) - 97 for letter in prompt.text] for prompt, ids in kept)


def test_a_prompt_leaves_space_for_a_response_in_the_window():
    narrow = tiny_pair(8, window=6)
    source = Letters()
    source.load = lambda chats: [Prompt(text, "train", text) for text in ("abcde", "abcdef")]
    assert [
        prompt.text
        for prompt, _ in encode_prompts(narrow, source.load(chats=False), SETTINGS.limits)
    ] == ["abcde"]


def test_no_usable_prompt_is_a_user_error(pair):
    source = Letters()
    source.load = lambda chats: [Prompt("1", "train", "abcdefghh")]
    with pytest.raises(UserError, match="none of 1 prompts has between 1 and 8 tokens"):
        encode_prompts(pair, source.load(chats=False), SETTINGS.limits)


def test_shards_hold_the_rows_of_one_split_in_order():
    prompts = [
        (Prompt(str(i), split, ""), [i])
        for i, split in enumerate(["test", "train", "train", "dev", "train", "train"])
    ]
    plan = plan_shards(prompts, DataGeneration(rows_per_shard=2))
    assert {name: [ids[0] for _, ids in shard.prompts] for name, shard in plan.items()} == {
        "train-00000.parquet": [1, 2],
        "train-00001.parquet": [4, 5],
        "dev-00000.parquet": [3],
        "test-00000.parquet": [0],
    }


def test_train_prompts_get_several_responses_the_first_ones_first():
    prompts = [
        (Prompt(str(i), split, ""), [i])
        for i, split in enumerate(["test", "train", "train", "dev", "train"])
    ]
    plan = plan_shards(prompts, DataGeneration(rows_per_shard=2, responses_per_prompt=2))
    actual = [
        (name, shard.sample, [ids[0] for _, ids in shard.prompts]) for name, shard in plan.items()
    ]
    assert actual == [
        ("train-00000.parquet", 0, [1, 2]),
        ("train-00001.parquet", 0, [4]),
        ("train-00002.parquet", 1, [1, 2]),
        ("train-00003.parquet", 1, [4]),
        ("dev-00000.parquet", 0, [3]),
        ("test-00000.parquet", 0, [0]),
    ]


# --- manifests that name files elsewhere


@pytest.mark.parametrize(
    "name",
    ["../train-00000.parquet", "/etc/passwd", "more/train-00000.parquet", "..", ".", "", "a\0b"],
)
def test_a_manifest_cannot_name_a_file_outside_its_folder(complete, tmp_path, name):
    manifest = json.loads((complete / "manifest.json").read_text())
    manifest["shards"][name] = manifest["shards"][NAMES[0]]
    del manifest["sha256"]  # who changes it can also make it as earlier versions did
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for read in (
        read_manifest,
        lambda folder: load_split(folder, "train"),
        lambda folder: ShardStore(folder, {}),
    ):
        with pytest.raises(
            UserError,
            match=r"manifest\.json names .*must be a file in that folder, not a path or a link",
        ):
            read(tmp_path)


def test_a_shard_that_is_a_link_is_refused(make, complete, interrupted, tmp_path):
    name = NAMES[2]
    (interrupted / name).unlink()
    (interrupted / name).symlink_to(complete / name)
    with pytest.raises(
        UserError, match=f"manifest.json names '{name}', which must be a file in that folder"
    ):
        make(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"shards": ["train-00000.parquet"]},
        {"shards": {"train-00000.parquet": 5}},
        {"shards": {"train-00000.parquet": {"rows": 2}}},
        {"provenance": "text"},
    ],
)
def test_a_manifest_without_checksums_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"manifest\.json does not list shards with their checksums; delete it"
    ):
        read_manifest(tmp_path)


def test_a_link_in_the_place_of_a_temporary_file_or_a_lock_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("kept")
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in (".manifest.json.tmp", ".lock"):
        (folder / name).symlink_to(tmp_path / "precious")
    write_json(folder / "manifest.json", {})
    with pytest.raises(OSError, match="symbolic links"):
        lock(folder / ".lock")
    with pytest.raises(OSError, match="symbolic links"), locked(folder):
        pass
    assert (tmp_path / "precious").read_text() == "kept"
    assert read_manifest(folder) == {} and not (folder / "manifest.json").is_symlink()


# --- reading


def test_columns_are_the_documented_ones(complete):
    schema = pq.read_schema(complete / NAMES[0])
    assert schema.equals(SCHEMA)
    types = {name: str(schema.field(name).type) for name in schema.names}
    assert types.pop("finished") == "bool"
    assert [name for name, kind in types.items() if kind == "string"] == [
        "prompt_id",
        "split",
        "prompt",
    ]
    assert [name for name, kind in types.items() if "int32" in kind] == [
        *("sample", "prompt_ids", "response_ids", "draft_ids", "more_draft_ids", "draft_depth")
    ]
    assert [name for name, kind in types.items() if "float" in kind] == [
        "accept_prob",
        "more_accept_prob",
    ]


def test_a_split_without_rows_is_a_user_error_that_names_the_key(complete, tmp_path):
    (tmp_path / NAMES[0]).write_bytes((complete / NAMES[0]).read_bytes())
    with pytest.raises(UserError, match=r"no rows of split 'test'.*data\.num_test="):
        load_split(tmp_path, "test")


@pytest.mark.parametrize(("free", "warns"), [(10**6, False), (100, True)])
def test_the_size_of_all_rows_is_announced_with_the_first_shard(
    tmp_path, monkeypatch, caplog, free, warns
):
    monkeypatch.setattr(
        "specheads.storage.files.shutil.disk_usage", lambda folder: SimpleNamespace(free=free)
    )
    store = ShardStore(tmp_path, {"is": "a test"})
    with caplog.at_level("INFO"):
        store.announce("rows", [10, 10, 5])
        assert not caplog.messages
        for number in range(2):
            store.put(
                f"{number}",
                10,
                lambda path: path.write_bytes(b"x" * (2000 * 10 + shards.FILE_BYTES)),
            )
    said = [record.message for record in caplog.records if record.levelname == "INFO"]
    assert said == ["rows: about 0.0746 MB on disk for 25 rows"]  # of 2,000 bytes, in three files
    assert (
        f"rows: only 0.0001 MB are free in {tmp_path}; choose another folder with paths.data="
        in caplog.messages
    ) == warns
