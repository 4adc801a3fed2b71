"""Heads as files: a folder of `config.json` (head.schema.json), `model.safetensors`, `golden.safetensors`, a card and transformers' loader.

A trained head's folder has `train_prompts.safetensors`, too. Loading is strict. The golden vectors are inputs with the outputs that the head gave when it was saved, so that a file that
was damaged or is read differently shows at once.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specheads.errors import UserError
from specheads.heads import specdecpp, train_prompts
from specheads.heads.card import card
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.heads.portable.loaders import CUSTOM_GENERATE, write_loader
from specheads.heads.train_prompts import TrainPrompts
from specheads.pair import Pair
from specheads.storage.files import write_whole
from specheads.storage.runs import has_ended

NUM_GOLDEN = 32
FILES = ("config.json", "model.safetensors", "golden.safetensors")  # what a head is loaded from
CONSTANT = 1e-6  # a spread of golden logits below this is a head that says the same of every token


def save_head(head: AcceptanceHead, folder: Path, golden_inputs: torch.Tensor | None = None) -> Path:
    """Write a head to `folder` (made, or replaced file by file).

    `golden_inputs` is (N, input_size), real assembled inputs; default those that the head was loaded with, or random ones of its scale.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = copy.deepcopy(head).cpu().eval()  # the one that is given may be decoding
    golden_inputs = head.golden_inputs if golden_inputs is None else golden_inputs
    inputs = (_random_inputs(head) if golden_inputs is None else golden_inputs)[:NUM_GOLDEN].float().cpu().contiguous()
    with torch.no_grad():
        outputs = head.score(inputs)
    files = {
        "model.safetensors": lambda path: save_file(_tensors(head), path),
        "golden.safetensors": lambda path: save_file({"inputs": inputs, "logits": outputs}, path),
        "README.md": lambda path: path.write_text(card(head.config)),
        "config.json": lambda path: path.write_text(json.dumps(head.config.to_dict(), indent=2) + "\n"),
    }
    write_loader(folder, CUSTOM_GENERATE)
    if head.train_prompts is None:
        (folder / train_prompts.FILE).unlink(missing_ok=True)  # another head's, which this one replaces
    else:
        head.train_prompts.write(folder)
    for name, write in files.items():  # the config last: a folder with one is complete
        write_whole(folder / name, write)
    return folder


def load_head(location: str | Path, any_draft: bool = False, **hub: Any) -> AcceptanceHead:
    """Load a head from a folder or hub id, on CPU in float32; one of the SpecDec++ authors' is read, too.

    With `any_draft` it no longer says for which draft and target it was trained, so that it decodes with any of its size: a draft that was
    distilled a little further, for example. What it then predicts is not what it learnt. `hub`: of huggingface_hub's snapshot_download, such as
    `revision` and `token`.

    Raises:
        UserError: no such folder or hub id; a missing, extra or wrongly shaped tensor; golden vectors that do not come out.
    """
    folder = _folder(location, hub)
    config = _read_json(folder / "config.json")
    if specdecpp.is_theirs(config):
        return specdecpp.head_from(config, _read_tensors(folder / "model.safetensors"), folder)
    config = HeadConfig.from_dict(config, str(folder / "config.json"))
    if any_draft:
        config = replace(config, draft={}, target={})
    head = AcceptanceHead(config)
    expected, found = _tensors(head), _read_tensors(folder / "model.safetensors")
    for name in sorted(expected.keys() | found.keys()):
        ours, theirs = (tuple(t[name].shape) if name in t else "no such tensor" for t in (expected, found))
        if ours != theirs:
            raise UserError(
                f"{folder}/model.safetensors: tensor {name!r} is {theirs}, expected {ours} from config.json; export it again."
            )
    head.load_state_dict(found)
    head.requires_grad_(False).eval()
    golden = _read_tensors(folder / "golden.safetensors")
    if golden.keys() != {"inputs", "logits"}:
        raise UserError(
            f"{folder}/golden.safetensors holds {', '.join(sorted(golden))}, expected inputs and logits; export the head again."
        )
    if golden["inputs"].shape != (len(golden["logits"]), head.config.input_size):
        raise UserError(
            f"{folder}/golden.safetensors: inputs are {tuple(golden['inputs'].shape)} for {tuple(golden['logits'].shape)} logits of a head that "
            f"reads {head.config.input_size} numbers; the files are damaged, export the head again."
        )
    difference = (head.score(golden["inputs"]) - golden["logits"]).abs().max().item()
    if not difference < 1e-3 * (1 + golden["logits"].abs().max().item()):
        raise UserError(
            f"{folder}: outputs differ from the golden vectors by {difference:.3g}; the files are damaged, export the head again."
        )
    if golden["logits"].std().item() < CONSTANT:
        raise UserError(
            f"{folder}: this head predicts a constant, so no threshold tells drafts apart; train it longer or on more prompts."
        )
    head.golden_inputs = golden["inputs"]
    if (prompts := folder / train_prompts.FILE).exists():
        head.train_prompts = TrainPrompts.from_tensors(_read_tensors(prompts), str(prompts))
    return head


def latest_head(outputs: Path, pair: Pair) -> Path:
    """Return the newest head folder `**/heads/<name>` under `outputs` that was trained for the pair, of runs that were finished.

    Raises:
        UserError: there is none.
    """
    found = sorted(outputs.glob("**/heads/*/config.json"), key=_trained_at, reverse=True)
    ours = {"draft": pair.draft_revision, "target": pair.target_revision}
    for path in found:
        if not has_ended(path, outputs):
            continue  # it may yet be calibrated, or be the first of a learning curve
        try:
            config = json.loads(path.read_text())
        except json.JSONDecodeError:
            continue  # a folder that was never finished is no candidate
        if all(config.get(role, {}).get("revision") == revision for role, revision in ours.items()):
            return path.parent
    others = f" ({len(found)} for other pairs)" if found else ""
    raise UserError(
        f"there is no head for draft {pair.draft_id} with target {pair.target_id} under {outputs}{others}; "
        f"train one with python train.py model={pair.name}."
    )


def _trained_at(config: Path) -> float:
    """Return when a head's weights were written; an evaluation may have written into its config since."""
    weights = config.with_name("model.safetensors")
    return (weights if weights.exists() else config).stat().st_mtime


def _random_inputs(head: AcceptanceHead) -> torch.Tensor:
    sample = torch.randn(NUM_GOLDEN, head.config.input_size, generator=torch.Generator().manual_seed(0))
    return sample / head.input_scale + head.input_mean


def _tensors(head: AcceptanceHead) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in head.state_dict().items()}


def _folder(location: str | Path, hub: Mapping[str, Any]) -> Path:
    folder = Path(location)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(location).startswith(".") or str(location).count("/") != 1:
        raise UserError(f"there is no head folder {str(location)!r}; train one with python train.py, or use head=latest.")
    try:
        # A look at what it is first: an id may be that of a model, of any size.
        config = _read_json(Path(snapshot_download(str(location), allow_patterns=["config.json"], **hub)) / "config.json")
        if not specdecpp.is_theirs(config):
            HeadConfig.from_dict(config, f"{location}/config.json")
        return Path(snapshot_download(str(location), allow_patterns=[*FILES, train_prompts.FILE], **hub))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(location)!r} is no local folder, and no head of that name could be loaded from the hub: "
            f"{str(error).splitlines()[0]}. Train one with python train.py, or use head=latest."
        ) from error


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}, so it is no head folder; expected one written by train.py.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON ({error}); export the head again.") from None


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        pickled = (
            " Its weights are a pickle, which is not read: save them as safetensors." if list(path.parent.glob("*.bin")) else ""
        )
        raise UserError(f"{path.parent} has no {path.name}; export the head again.{pickled}") from None
    except SafetensorError as error:
        raise UserError(
            f"{path} cannot be read ({error}); it is cut off or no safetensors file, export the head again."
        ) from None
