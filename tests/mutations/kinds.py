"""The kinds of files that this project reads: how a small one is made, and all that reads it."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import yaml
from fakes import release_runs, tiny_pair
from feature_drafts import feature_draft
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import save_file
from torch import Tensor

from specheads.commands import export
from specheads.commands.compose import command_config, model_config, source_of
from specheads.commands.help import composition_error
from specheads.decoding.decoder import recommended_rules
from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError, user_error
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.heads.head_folder import store_in_config
from specheads.heads.portable.standalone_head import DraftRound, StandaloneHead
from specheads.heads.train_prompts import TrainPrompts
from specheads.pair.config import config_folder, pair_config
from specheads.pair.eagle_formats import (
    is_feature_draft,
    read_feature_draft,
    write_safeailab,
    write_speculators,
)
from specheads.pair.feature_draft import FeatureLM
from specheads.pair.language_model import LanguageModel, load_model, load_tokenizer
from specheads.pair.revisions import resolve
from specheads.pair.sampling import Warp
from specheads.pair.source import ModelSource
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.head_scores import add_predictions, head_fingerprint
from specheads.replay.recording import Recorder, load_recording
from specheads.replay.response_tree import RecordSettings
from specheads.storage import runs
from specheads.storage.data_set import SCHEMA, load_split
from specheads.storage.journal import Journal
from specheads.storage.row_store import RowStore
from specheads.storage.shards import ShardStore
from specheads.training.trainer import differences


@dataclass(frozen=True)
class Kind:
    """Files in a folder.

    `read` returns what the library makes of them, with everything that uses it.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], Any]
    # Files (patterns) of which no change goes unnoticed: what is read is what was written, or an
    # error. The values of others are the user's, or were measured, and another valid value is
    # another file.
    checked: tuple[str, ...] = ()
    refusals: tuple[type[Exception], ...] = (UserError,)
    files: tuple[str, ...] = ("**/*",)  # those that are mutated
    share: float = 1.0  # of the mutations that other kinds get: for those that take longer to read


def _plain(value: Any) -> Any:
    """Return tensors and arrays as bytes, for comparisons."""
    if not isinstance(value, Tensor):
        return value
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return value.shape, value.dtype, data.numpy().tobytes()


def _weights(head: torch.nn.Module) -> dict[str, Any]:
    return {name: _plain(tensor) for name, tensor in head.state_dict().items()}


# --- heads

HEAD = HeadConfig(
    hidden_size=8,
    depth=1,
    warp={"temperature": 1.0, "top_k": 50, "top_p": 1.0},
    draft={"id": "tiny-draft", "revision": "r2"},
    target={"id": "tiny-target", "revision": "r1"},
    calibration={"slope": [1.0, 0.9], "intercept": [0.0, 0.1]},
    recommended={"threshold": 0.5, "min_tokens": 1, "max_tokens": 8, "verification": "token"},
    train={"num_prompts": 7, "test": {"auroc": 0.75}},
)


def _head(config: HeadConfig = HEAD) -> AcceptanceHead:
    torch.manual_seed(0)
    head = AcceptanceHead(config)
    for tensor in head.state_dict().values():
        tensor.normal_(std=0.5)
    return head


def make_head(folder: Path) -> None:
    head = _head()
    head.train_prompts = TrainPrompts.of(["a", "b", "c"], ["d"])
    save_head(head, folder, torch.randn(16, HEAD.input_size))


def read_head(folder: Path) -> Any:
    head = load_head(folder)
    known = head.train_prompts
    seen = _weights(head) | {"config": vars(head.config)}
    seen["prompts"] = None if known is None else (known.train.tolist(), known.dev.tolist())
    assert head.score(torch.randn(3, head.config.input_size)).isfinite().all()
    export.run([f"head={folder}"])
    store_in_config(folder, recommended=head.config.recommended)
    HeadThreshold(head, 0.5)
    if head.config.recommended:
        recommended_rules(head)
    return seen


def read_standalone(folder: Path) -> Any:
    head = StandaloneHead.load(folder)
    size = head.config["hidden_size"]
    features = {"hidden": torch.ones(1, size), "embedding": torch.ones(1, size)}
    features |= {name: torch.full((1,), 0.5) for name in ("draft_prob", "max_prob", "entropy")}
    DraftRound(head).stops(features)
    return _weights(head)


def make_authors_head(folder: Path) -> None:
    shapes = {"0.linear.weight": (8, 8), "0.linear.bias": (8,), "1.weight": (2, 8), "1.bias": (2,)}
    torch.manual_seed(0)
    weights = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "num_layers": 1}))


def read_authors_head(folder: Path) -> Any:
    return _weights(load_head(folder))


# --- shards

NAMES = ("dev-00000.parquet", "train-00000.parquet", "train-00001.parquet")


def _rows(name: str) -> list[dict[str, Any]]:
    probs = [
        key for key in SCHEMA.names if SCHEMA.field(key).type == SCHEMA.field("accept_prob").type
    ]
    row = {"sample": 0, "split": name.partition("-")[0], "finished": True, "draft_ids": [5, 6]}
    row |= {"response_ids": [3, 4], **{name: [0.25, 0.5] for name in probs}}
    return [
        {
            **row,
            "prompt_id": f"{number:016x}",
            "prompt": f"{name} {number}",
            "prompt_ids": [1, 2, number],
        }
        for number in range(2)
    ]


def make_data_set(folder: Path) -> None:
    store = ShardStore(folder / "data", {"seed": 0}, SCHEMA)
    if store.is_complete():
        return
    with store.missing(NAMES) as missing:
        for name in missing:
            store.write(name, _rows(name))
        store.complete(NAMES)


def make_unfinished_data_set(folder: Path) -> None:
    store = ShardStore(folder / "data", {"seed": 0}, SCHEMA)
    for name in NAMES[:2]:
        store.write(name, _rows(name))


def read_data_set(folder: Path) -> Any:
    make_data_set(folder)  # as every command does before it reads
    return [list(load_split(folder / "data", split)) for split in ("dev", "train")]


def make_tensors(folder: Path) -> RowStore:
    def compute(start: str, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        return [
            {"hidden": torch.full((length, 4), float(length)), "ids": torch.arange(length)}
            for length in (2, 3)
        ]

    sizes = {name: np.array([1, 1]) for name in "ab"}
    store = RowStore(folder / "features", {"seed": 0}, sizes, "features")
    store.fill(compute, "no memory")
    return store


def read_tensors(folder: Path) -> Any:
    store = make_tensors(folder)
    rows = [store.row(name, row) for name in "ab" for row in (0, 1)]
    return [{key: value.tolist() for key, value in row.items()} for row in rows]


@cache
def _pair() -> Any:
    return tiny_pair(8, scale=2.0)


def record(folder: Path) -> Any:
    pair = _pair()
    prompts = [(Prompt(f"{number:04x}", "test", ""), [1, 2, number]) for number in range(2)]
    recorder = Recorder(pair, Warp(1.0), ResponseLimits(4), RecordSettings(1, 4), 0, folder)
    made = recorder.record([prompts])[0]
    head = _head(HeadConfig(hidden_size=16, depth=0, inputs=("hidden",)))
    heads = {head_fingerprint(head): head}
    return load_recording(made, add_predictions(made, pair, heads, ground_truth=True))


def read_recording(folder: Path) -> Any:
    recording = record(folder)
    values = {name: _plain(value) for name, value in vars(recording).items() if name != "features"}
    return values | {name: _plain(value) for name, value in recording.features.items()}


# --- journals, reports, profiles, costs


def read_journal(folder: Path) -> Any:
    journal = Journal(folder / "generations.jsonl", {"seed": 0, "prompts": [[1, 2], [3]]})
    for number in range(3):  # as a resumed sweep does
        if number not in journal.entries:
            stats = {"num_tokens": number, "num_drafted": 4, "seconds": 0.5}
            journal.add(number, {"stats": [[stats]], "rounds": [[[1, 2, 0.5]]]})
    return {number: journal.entries[number] for number in sorted(journal.entries)}


# --- checkpoints, run folders

PROVENANCE = {"data": "rows", "seed": 0}


def make_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    content = {"provenance": PROVENANCE, "state_dict": {"weight": torch.randn(20, 20)}}
    torch.save(content, folder / "last.ckpt")


def read_checkpoint(folder: Path) -> Any:
    try:
        changed = differences(folder / "last.ckpt", PROVENANCE)
    except Exception as error:  # noqa: BLE001 - as where a run is resumed
        raise UserError(f"training starts again: {error}") from None
    if changed:  # training starts again, and says so
        return None
    saved = torch.load(folder / "last.ckpt", weights_only=True)  # as Lightning does
    return _plain(saved["state_dict"]["weight"]), saved["provenance"]


def make_run(folder: Path) -> None:
    runs.run_folder(folder, "key")
    (run,) = folder.iterdir()
    runs.begin(run, "key")
    release_runs()


def read_run(folder: Path) -> Any:
    run = runs.run_folder(folder, "key")
    runs.begin(run, "key")
    runs.is_resumed(run), runs.has_ended(run / "head", folder)
    runs.finish(run)
    release_runs()
    return runs.read_state(run)["key"]


# --- prompts and configs

ROWS = [
    {"instruction": f"Say {number}.", "input": "", "turns": ["a", "b"], "output": str(number)}
    for number in range(3)
]


def _write_prompts(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "rows.json").write_text(json.dumps(ROWS, indent=1))
    lines = [f'"{row["instruction"]}",{row["output"]}\n' for row in ROWS]
    (folder / "rows.csv").write_text("".join(["instruction,output\n", *lines]))
    (folder / "rows.txt").write_text("".join(f"{row['instruction']}\n" for row in ROWS))
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(folder / "rows.parquet"))
    table.save_to_disk(str(folder / "saved"))


def read_prompts(folder: Path) -> Any:
    said: list[str] = []
    prompts = []
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.parquet", "saved"):
        template = "{text}" if name == "rows.txt" else "{instruction}"
        given = (str(folder / name), None, "train", None, template, None, 1, 1, 1)
        try:
            source = DatasetSource(*given, response_template=None)
            prompts += [prompt.text for prompt in source.load(chats=True)]
        except UserError as error:
            said.append(str(error))
    if said:
        raise UserError(said[0])
    return prompts


def make_config(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "data").mkdir()
    pair = {"draft": "embedded:nano/draft", "target": "embedded:nano/target"}
    pair |= {"tokenizer": "embedded:nano", "dtype": "float32"}
    (folder / "model" / "tiny.yaml").write_text(yaml.safe_dump(pair))
    text = (config_folder() / "data" / "alpaca.yaml").read_text()
    (folder / "data" / "own.yaml").write_text(text.replace("tatsu-lab/alpaca", "someone/something"))


def read_config(folder: Path) -> Any:
    words = [f"hydra.searchpath=['file://{folder}']", "model=tiny", "data=own"]
    try:
        cfg = command_config("data_gen", words)
        return str(model_config(cfg)), str(source_of(cfg))
    except Exception as error:  # as the entry points do
        if (message := user_error(error) or composition_error(error, "data_gen", words)) is None:
            raise
        raise message from None
    finally:
        GlobalHydra.instance().clear()


# --- models


def make_model(folder: Path) -> None:
    place = Path(resolve(pair_config("nano").draft))
    for path in filter(Path.is_file, [*place.iterdir(), *place.parent.glob("tokenizer*.json")]):
        shutil.copy(path, folder)


def read_model(folder: Path) -> Any:
    load_tokenizer(folder, None)
    lm = LanguageModel(load_model(ModelSource(folder, dtype=torch.float32)))
    lm.check()
    return lm.vocab_size


def make_feature_draft(folder: Path) -> None:
    draft = feature_draft(_pair().target, kept=torch.tensor([0, 2, 3, 6]))
    write_speculators(draft, folder, "tiny", ["LlamaForCausalLM"], num_tokens=3)


def make_flat_draft(folder: Path) -> None:
    target = _pair().target
    draft = feature_draft(target, (1,), kept=torch.tensor([0, 2, 3, 6]))
    write_safeailab(draft, folder, target.config.num_hidden_layers)


def read_draft_folder(folder: Path) -> Any:
    is_feature_draft(folder)
    draft = read_feature_draft(folder, _pair().target.config)
    FeatureLM(draft).check()
    return _weights(draft) | {"layers": draft.config.target_layers}


KINDS = {
    "head": Kind(make_head, read_head, checked=("model.safetensors", "train_prompts.safetensors")),
    "head, standalone": Kind(
        make_head,
        read_standalone,
        checked=("model.safetensors",),
        refusals=(ValueError,),
        files=("*.json", "model*", "golden*"),
    ),
    "head of the SpecDec++ authors": Kind(make_authors_head, read_authors_head),
    "data set": Kind(read_data_set, read_data_set, checked=("**/*",), share=0.3),
    "data set, unfinished": Kind(
        make_unfinished_data_set, read_data_set, checked=("**/*",), share=0.3
    ),
    "tensor shards": Kind(make_tensors, read_tensors, checked=("**/*",), share=0.3),
    "recording": Kind(record, read_recording, checked=("**/*",), share=0.3),
    "journal": Kind(read_journal, read_journal, checked=("**/*",)),
    "checkpoint": Kind(make_checkpoint, read_checkpoint),
    "run folder": Kind(make_run, read_run),
    "prompts": Kind(_write_prompts, read_prompts),
    "configs": Kind(make_config, read_config, share=0.3),
    "model": Kind(make_model, read_model, share=0.3),
    "draft that reads its target": Kind(make_feature_draft, read_draft_folder),
    "the same, in SafeAILab's format": Kind(make_flat_draft, read_draft_folder),
}
