"""Models in GGUF, llama.cpp's file format: converted once into a kept folder of float32, which everything else reads."""

import logging
import os
import shutil
from pathlib import Path

from specheads.errors import UserError
from specheads.storage.files import amount, cache_folder, hash_of, locked

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"


def gguf_file(location: str) -> Path | None:
    """Return the GGUF file that a location is, or the only model in its folder, else None. Raises UserError for several."""
    path = Path(location)
    if path.suffix.lower() == SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{location} has {len(files)} GGUF files ({names}); give one of them, for example {files[0]}.")
    return files[0] if files else None


def converted(file: Path) -> Path:
    """Return the folder of a GGUF file's model and tokenizer, made on the first call. Raises UserError if it cannot be read."""
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
    import torch  # transformers takes seconds to import, and most models are no GGUF files
    import transformers
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        raise UserError(f"{file} is a GGUF file, and reading it needs the package gguf: pip install gguf.")
    logger.info("converting %s, once, into a folder of weights in float32", file)
    try:
        read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise UserError(
            f"{file} cannot be read: {' '.join(str(error).split())[:300]}. Give the model's folder in transformers' format, or "
            "its hub id; not every architecture can be read from GGUF."
        ) from error
    # transformers does not save a model that it has dequantised, so its weights go into a new one.
    known = read.config.to_dict()
    config = type(read.config)(
        **{key: value for key, value in known.items() if key not in ("quantization_config", "_name_or_path")}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logger.info("converted: %s in %s", amount(sum(each.stat().st_size for each in folder.iterdir())), folder.parent)
