"""Where a model lies and which version of it that is: a hash of its weights and config, and the
hub's commit.

A model in GGUF, llama.cpp's file format, is converted once into a kept folder of float32, which
everything else reads.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import extract_commit_hash

from specheads.errors import UserError, is_out_of_memory
from specheads.pair.locations import unabbreviated
from specheads.pair.synthetic import is_synthetic
from specheads.storage.files import amount, cache_folder, hash_of, locked, read_json

logger = logging.getLogger(__name__)

_GGUF = ".gguf"
_DRAFT_TEMPERATURE = "draft_temperature"  # a key of a draft's config.json: what divides its logits


def resolve(location: str | Path) -> str:
    """Return the folder of a location, which may begin with `~`, `embedded:` or `package:`, or a
    hub id unchanged.

    A GGUF file is converted into a folder. Raises UserError for a package that is not installed,
    and as `converted`.
    """
    location = unabbreviated(location)
    file = gguf_file(location)
    return location if file is None else str(converted(file))


def file_of(location: str | Path, name: str, revision: str | None = None) -> str | None:
    """Return the path of a file of a folder or hub id; None if there is none."""
    path: str | None = cached_file(
        resolve(location), name, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return path


def gguf_file(location: str) -> Path | None:
    """Return the GGUF file that a location is, or the only model in its folder, else None.

    Raises UserError for several.
    """
    path = Path(location)
    if path.suffix.lower() == _GGUF:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob(f"*{_GGUF}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(
            f"{location} has {len(files)} GGUF files ({names}); give one of them, for example"
            f" {files[0]}."
        )
    return files[0] if files else None


def converted(file: Path) -> Path:
    """Return the folder of a GGUF file's model and tokenizer, made on the first call.

    Raises UserError if it cannot be read.
    """
    if not file.is_file():
        raise UserError(f"there is no GGUF file {file}; give the path of one, or a model's folder.")
    parent = cache_folder() / "gguf"
    folder = parent / f"{file.stem}-{hash_of(file)[:16]}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with locked(parent):
        if not folder.is_dir():  # another process may have made it
            temporary = folder.with_name(f".{folder.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            _convert(file, temporary)
            os.replace(temporary, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    if not transformers.utils.is_gguf_available():
        raise UserError(
            f"{file} is a GGUF file, and reading it needs the package gguf: pip install gguf."
        )
    logger.info("converting %s, once, into a folder of weights in float32", file)
    try:
        read = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:
        raise UserError(
            f"{file} cannot be read: {' '.join(str(error).split())[:300]}. Give the model's folder"
            " in transformers' format, or its hub id; not every architecture can be read from"
            " GGUF."
        ) from error
    # transformers does not save a model that it has dequantised, so its weights go into a new one.
    dropped = ("quantization_config", "_name_or_path")
    config = type(read.config)(
        **{key: value for key, value in read.config.to_dict().items() if key not in dropped}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logger.info(
        "converted: %s in %s",
        amount(sum(each.stat().st_size for each in folder.iterdir())),
        folder.parent,
    )


def from_pretrained(
    loader: Any,
    location: str | Path,
    revision: str | None = None,
    what: str = "model",
    **kwargs: object,
) -> Any:
    """Return what a transformers `loader` class reads from a folder or the hub.

    A config, or that of a model, knows its commit.

    Raises UserError where `what` (a model, a tokenizer) is missing, gated, brings code that is not
    trusted, or cannot be read.
    """
    try:
        with without_bars():
            loaded = loader.from_pretrained(
                resolve(location), revision=revision or "main", **kwargs
            )
    except Exception as error:
        if _is_gated(error):
            raise UserError(
                f"the {what} {str(location)!r} is gated, so: accept the licence at"
                f" https://huggingface.co/{location}, then log in here with `hf auth login`, or set"
                " HF_TOKEN."
            ) from error
        if is_out_of_memory(error):
            raise
        if "custom code" in str(error):
            raise UserError(
                f"the {what} {str(location)!r} comes with Python code, which runs only if you trust"
                " it: read the code, then set model.trust_remote_code to draft, to target, or to"
                " true for both."
            ) from error
        raise UserError(
            f"the {what} {str(location)!r} could not be loaded; expected a local folder, or a hub"
            f" id that is reachable or cached. Reason: {_reason(location, what, error)}"
        ) from error
    # Output_loading_info=True asks for what was read, too
    main = loaded[0] if isinstance(loaded, tuple) else loaded
    config = getattr(main, "config", main)
    if isinstance(config, PreTrainedConfig) and getattr(config, "_commit_hash", None) is None:
        # Transformers 5.23 does not say it
        config._commit_hash = _cached_commit(location, revision)
    return loaded


def _cached_commit(location: str | Path, revision: str | None = None) -> str | None:
    """Return the commit of the hub that a model in the cache, or a folder of the cache, is of.

    None for any other folder.
    """
    file = Path(resolve(location)) / "config.json"
    if file.is_file():
        return extract_commit_hash(str(file.absolute()), None)
    try:
        cached = try_to_load_from_cache(str(location), "config.json", revision=revision)
    except HFValidationError:  # a folder that does not exist
        return None
    return extract_commit_hash(cached, None) if isinstance(cached, str) else None


def _is_gated(error: BaseException | None) -> bool:
    """Whether an error comes from a repository whose licence this account has not accepted."""
    while error is not None and not isinstance(error, GatedRepoError):
        error = error.__cause__ or error.__context__
    return error is not None


def _reason(location: str | Path, what: str, error: Exception) -> str:
    """Return why a model or tokenizer could not be loaded, in a sentence or two."""
    folder = Path(resolve(location))
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return (
            "it is a PEFT adapter; merge it into its model (peft's merge_and_unload) and save that"
            " with the tokenizer."
        )
    if what == "tokenizer" and folder.is_dir() and not any(folder.glob("tokenizer*")):
        return (
            "the folder has no tokenizer; save it there (tokenizer.save_pretrained), or give its"
            " folder by model.tokenizer=."
        )
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def without_bars() -> Iterator[None]:
    """Silence the progress bars of transformers while the block runs: they count tensors, which
    takes no time worth showing.
    """
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence transformers' warnings while the block runs: what it misses in a checkpoint is read
    elsewhere.
    """
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def draft_temperature(config: PreTrainedConfig) -> float:
    """Return the number that divides a draft's logits, and no target's: `draft_temperature` of its
    config, or else 1.
    """
    return float(getattr(config.get_text_config(), _DRAFT_TEMPERATURE, 1.0))


def set_draft_temperature(draft: PreTrainedModel, temperature: float) -> None:
    """Write a temperature into the draft's config, with which it is saved.

    A pair's `draft_lm` of before keeps its own.
    """
    setattr(draft.config.get_text_config(), _DRAFT_TEMPERATURE, float(temperature))


def revision_of(
    config: PreTrainedConfig,
    location: str | Path,
    quantization: str | None = None,
    layers: Sequence[int] | None = None,
) -> str:
    """Return the version of a model by its config: `content_of` its files, its temperature, how its
    weights are stored, and which layers of its target it reads in place of those that these name.
    """
    revision = content_of(location, commit_of(config))
    temperature = draft_temperature(config)
    revision = revision if temperature == 1 else f"{revision} at temperature {temperature:g}"
    if layers is not None:
        revision = f"{revision} of layers {', '.join(map(str, layers))}"
    return revision if quantization is None else f"{revision}-{quantization}"


def revision_at(location: str | Path) -> str:
    """Return `revision_of` a model that is not loaded. Raises UserError if it cannot be found."""
    return revision_of(from_pretrained(AutoConfig, location), location)


def commit_of(config: PreTrainedConfig) -> str | None:
    """Return the hub's commit of a model; None where it is not from the hub."""
    return getattr(config, "_commit_hash", None)


_OF_NO_NUMBER = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    _DRAFT_TEMPERATURE,
}


def content_of(location: str | Path, commit: str | None = None) -> str:
    """Return a hash of a model's weights and config, the same wherever it lies.

    Raises UserError for a folder without weights.
    """
    folder = Path(resolve(location))
    if commit and not folder.is_dir():
        cached = (
            None
            if is_synthetic(location)
            else try_to_load_from_cache(str(location), "config.json", revision=commit)
        )
        if not isinstance(cached, str):
            return commit
        folder = Path(cached).parent
    files = _weight_files(folder)
    if not files:
        raise UserError(
            f"{location} holds no .safetensors or .bin weights, so its version cannot be"
            " determined; save the model there."
        )
    config = read_json(folder / "config.json")
    for key in _OF_NO_NUMBER:
        config.pop(key, None)
    parts = [
        json.dumps(config, sort_keys=True),
        *(f"{file.name} {hash_of(file)}" for file in files),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads weights from.

    A repository may have the same weights in other formats, too.
    """
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (index := folder / f"{stem}.index.json").is_file():
            return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        if (folder / stem).is_file():
            return [folder / stem]
    return sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", ".bin"))
