"""A head's folder: `config.json` (head.schema.json), `model.safetensors`, `golden.safetensors`, a
card and transformers' loader.

The folder of a trained head has `train_prompts.safetensors`, too, which its config names by a
fingerprint, and what `specheads export` wrote (EXPORTED). The golden vectors are inputs with the
logits that the head computed when it was saved: they show at once if a head is computed
differently.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from specheads.errors import UserError
from specheads.heads import train_prompts
from specheads.heads.card import card
from specheads.heads.config import HeadConfig
from specheads.heads.portable.loaders import CUSTOM_GENERATE, STANDALONE, write_loader
from specheads.heads.portable.network import check_shapes
from specheads.heads.portable.tensor_file import read_tensors, write_tensors
from specheads.heads.train_prompts import TrainPrompts
from specheads.pair.locations import check_available
from specheads.storage.files import read_json, write_json, write_whole

logger = logging.getLogger(__name__)

FILES = ("config.json", "model.safetensors", "golden.safetensors")  # what a head is loaded from
GRAPH = "head.onnx"  # it holds the calibration
LEARNED = "prompts"  # what `train` in the config calls the fingerprint of the train prompts
EXPORTED = (GRAPH, STANDALONE)  # in other formats, for other decoders


@dataclass(frozen=True)
class HeadFiles:
    """The content of a head's folder."""

    config: HeadConfig
    tensors: Mapping[str, Tensor]
    # `inputs` and `logits`; None: a checkpoint of the SpecDec++ authors, which has none
    golden: Mapping[str, Tensor] | None
    train_prompts: TrainPrompts | None
    folder: Path | None = None  # the folder that was read


def write_files(folder: Path, files: HeadFiles) -> Path:
    """Write a head's folder, which is made, or whose files are replaced one by one; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in EXPORTED:  # they belong to the head that this one replaces
        (folder / name).unlink(missing_ok=True)
    write_loader(folder, CUSTOM_GENERATE)
    config = _naming(files.config, files.train_prompts)
    if files.train_prompts is None:
        (folder / train_prompts.FILE).unlink(missing_ok=True)
    else:
        files.train_prompts.write(folder)
    write_whole(folder / "model.safetensors", partial(write_tensors, files.tensors))
    write_whole(folder / "golden.safetensors", partial(write_tensors, files.golden or {}))
    write_whole(folder / "README.md", lambda path: path.write_text(card(config), encoding="utf-8"))
    # Last: a folder with one is complete
    write_json(folder / "config.json", config.to_dict())
    return folder


def store_in_config(
    folder: Path,
    dev_texts: Iterable[str] | None = None,
    **values: Mapping[str, object] | None,
) -> None:
    """Write values that were measured after a head's training into its config and card, and the
    `dev_texts` that it was calibrated on next to those that it learned from.

    Raises UserError for damaged ones.
    """
    path = folder / "config.json"
    try:
        before = read_json(path)
        content = before | values
        text = card(HeadConfig.from_dict(content))
        learned = _read_train_prompts(folder, content)
    except (ValueError, TypeError) as error:
        raise unreadable(folder, error) from None
    if learned is not None and dev_texts is not None:
        replace(learned, dev=TrainPrompts.of(dev_texts).train).write(folder)
    graph = folder / GRAPH
    if before.get("calibration") != content.get("calibration") and graph.exists():
        graph.unlink()
        logger.warning("%s held the earlier calibration and was removed; export it again", graph)
    # The card first: with an old config, a run that was killed in between does both again.
    write_whole(folder / "README.md", lambda temporary: temporary.write_text(text))
    write_json(path, content)


def read_files(location: str | Path, hub: Mapping[str, Any]) -> HeadFiles:
    """Return the content of a head's folder or hub id.

    Raises UserError where there is none, or files cannot be read.

    Checkpoints of the SpecDec++ authors are converted. `hub`: arguments of huggingface_hub's
    snapshot_download.
    """
    folder = _folder(location, hub)
    for name in FILES[:2]:
        if not (folder / name).exists():
            raise UserError(
                f"{folder} has no {name}, so it is no head folder; expected one of specheads train,"
                " with weights as safetensors."
            )
    try:
        values = read_json(folder / "config.json")
        # The config first: the folder may be that of a model, of any size.
        config = None if _is_theirs(values) else HeadConfig.from_dict(values)
        tensors = read_tensors(folder / "model.safetensors")
        if config is None:
            return HeadFiles(*_converted(values, tensors), None, None, folder)
        if not (folder / "golden.safetensors").exists():
            raise ValueError("it has no golden.safetensors")
        golden = read_tensors(folder / "golden.safetensors")
        if sorted(golden) != ["inputs", "logits"]:
            raise ValueError("golden.safetensors must hold inputs and logits")
        learned = _read_train_prompts(folder, values)
        return HeadFiles(config, tensors, golden, learned, folder)
    except ValueError as error:
        raise unreadable(folder, error) from None


def unreadable(folder: object, error: Exception) -> UserError:
    """Return the message about a damaged folder of a head."""
    reason = str(error).rstrip(".")
    return UserError(
        f"{folder} holds no head that can be used: {reason}. Export or train it again."
    )


def _naming(config: HeadConfig, learned: TrainPrompts | None) -> HeadConfig:
    """Return a config that names these train prompts."""
    train = {key: value for key, value in config.train.items() if key != LEARNED}
    if learned is not None:
        train[LEARNED] = learned.fingerprint
    return replace(config, train=train)


def _read_train_prompts(folder: Path, config: Mapping[str, Any]) -> TrainPrompts | None:
    """Return what is in the file, None where there is none and the config names none.

    Raises ValueError for a file that is missing or another head's.
    """
    path = folder / train_prompts.FILE
    named = config.get("train", {}).get(LEARNED)
    learned = TrainPrompts.from_tensors(read_tensors(path)) if path.exists() else None
    # Heads of earlier versions name none
    if named is not None and (learned is None or learned.fingerprint != named):
        what = "it has no" if learned is None else "another head's"
        raise ValueError(
            f"{what} {path.name}, without which evaluations would report on prompts that it was"
            f" trained on (where those are to remain unknown, remove {LEARNED!r} from its"
            " config.json)"
        )
    return learned


def _folder(location: str | Path, hub: Mapping[str, Any]) -> Path:
    folder = Path(location).expanduser()
    if folder.is_dir():
        return folder
    if not hub:
        check_available("head", location)
    try:
        # The config first: an id may be that of a model, of any size.
        first = snapshot_download(str(location), allow_patterns=["config.json"], **hub)
        values = read_json(Path(first, "config.json"))
        if not _is_theirs(values):
            HeadConfig.from_dict(values)
        patterns = [*FILES, train_prompts.FILE]
        return Path(snapshot_download(str(location), allow_patterns=patterns, **hub))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(location)!r} is no local folder, and no head of that name could be loaded from"
            f" the hub: {str(error).splitlines()[0]}. Train one with specheads train, or use"
            " head=latest."
        ) from error


def _is_theirs(config: object) -> bool:
    """Whether the content of a `config.json` belongs to a checkpoint of SpecDec++'s authors."""
    # Keys of heads of this project, or of models
    ours = {"format_version", "inputs", "model_type", "architectures"}
    return isinstance(config, dict) and "hidden_size" in config and not ours & config.keys()


def _converted(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Return config and float32 tensors of the head that computes the same as a checkpoint of
    SpecDec++'s authors.

    Their network is a `Sequential` of blocks `x + SiLU(W x + b)` and a linear layer with two
    logits: 0 rejects, 1 accepts. Where the file holds a single block, as tensors that share memory
    are stored, that block is used `num_layers` times. Raises ValueError for a tensor that is
    missing, too many or of another shape.

    Source: github.com/Kaffaljidhmah2/SpecDec_pp, specdec_pp/wrap_model.py and train.py; Huang et
    al. 2024.
    """
    size = config["hidden_size"]
    depth = config.get("num_layers", 0)
    ours = HeadConfig(hidden_size=size, depth=depth, predicts="input_token", width=size)
    stored = [place for place in range(depth) if f"model.{place}.linear.weight" in tensors]
    places = stored * depth if len(stored) == 1 else range(depth)
    shapes = {"linear.weight": (size, size), "linear.bias": (size,)}
    expected = {
        f"model.{place}.{part}": shape for place in places for part, shape in shapes.items()
    }
    expected |= {f"model.{depth}.weight": (2, size), f"model.{depth}.bias": (2,)}
    check_shapes(tensors, expected)
    blocks = {
        f"blocks.{block}.{part}": tensors[f"model.{place}.{part}"]
        for block, place in enumerate(places)
        for part in shapes
    }
    reject, accept = zip(
        *(tensors[f"model.{depth}.{part}"].float() for part in ("weight", "bias")), strict=True
    )
    weight, bias = (yes - no for yes, no in zip(accept, reject, strict=True))
    return ours, {
        "input_mean": torch.zeros(size),
        "input_scale": torch.ones(size),
        **{name: tensor.float() for name, tensor in blocks.items()},
        "readout.weight": weight[None],
        "readout.bias": bias[None],
    }
