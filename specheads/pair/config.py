"""The description of a pair: the keys of conf/model/*.yaml, which are also keyword arguments and keys on command lines."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml

from specheads.errors import UserError, is_number
from specheads.pair.quantization import check_quantization

INSTRUCTION = "{instruction}"  # where an instruction format takes the text
ROLES = ("draft", "target")
TEXTS = ("draft", "target", "name", "tokenizer", "draft_revision", "target_revision", "device", "device_map")
MISSING = "???"  # marks a key that the user must set


@dataclass(frozen=True)
class PairConfig:
    """The description of a pair. Raises UserError for impossible values.

    Args:
        draft: a folder, a hub id, `embedded:mini/draft` or `synthetic:llama2-7b`; empty if the draft is made from the target.
        target: the same for the target.
        name: what reports call the pair; None: made of the two locations.
        tokenizer: the tokenizer's location; None: with the target.
        draft_revision: a hub commit or tag.
        target_revision: a hub commit or tag.
        dtype: a torch dtype or its name; "auto" takes the checkpoint's on a GPU, and on a CPU bfloat16 or float32, what is
            faster there (`chosen_dtype`).
        quantization: how the target's weights are stored: int8, fp8 or int4 (torchao), nf4 or llm_int8 (bitsandbytes).
        draft_quantization: the same for the draft; the output distribution stays the target's.
        device: where the draft goes, and the target unless `device_map` spreads it; None: cuda if there is one.
        device_map: "auto" spreads the target over all devices.
        chat: whether instructions go through the chat template; None: if the tokenizer has one.
        instruction_format: how instructions are wrapped instead, such as "[INST] {instruction} [/INST]".
        draft_temperature: divides the draft's logits before any warp, and not the target's: a sharper or flatter draft may agree
            more often, and the output stays the target's; None: the one in the draft's config, which a distillation writes, or 1.
        trust_remote_code: run code that comes with a model: draft or target for that of one of them (the tokenizer's is the
            target's), true for both.
    """

    draft: str | Path = ""
    target: str | Path = ""
    name: str | None = None
    tokenizer: str | Path | None = None
    draft_revision: str | None = None
    target_revision: str | None = None
    dtype: str | torch.dtype = "auto"
    quantization: str | None = None
    draft_quantization: str | None = None
    device: str | None = None
    device_map: str | None = None
    chat: bool | None = None
    instruction_format: str | None = None
    draft_temperature: float | None = None
    trust_remote_code: bool | str = False

    def __post_init__(self) -> None:
        for name in TEXTS:
            if not isinstance(value := getattr(self, name), str | Path | None):
                raise UserError(f"model.{name}={value!r} must be text.")
        wrap = self.instruction_format
        if wrap is not None and (not isinstance(wrap, str) or INSTRUCTION not in wrap):
            raise UserError(
                f"model.instruction_format={wrap!r} does not say where the instruction goes; "
                f"write {INSTRUCTION} there, as in '[INST] {INSTRUCTION} [/INST]'."
            )
        temperature = self.draft_temperature
        if temperature is not None and (not is_number(temperature) or temperature <= 0):
            raise UserError(
                f"model.draft_temperature={temperature!r} must be a number above 0, such as 0.85, or null for the draft's own."
            )
        check_quantization("model.quantization", self.quantization)
        check_quantization("model.draft_quantization", self.draft_quantization)
        if not isinstance(self.trust_remote_code, bool) and self.trust_remote_code not in ROLES:
            raise UserError(f"model.trust_remote_code={self.trust_remote_code} must be true, false, draft or target.")
        if self.chat is not None and not isinstance(self.chat, bool):
            raise UserError(f"model.chat={self.chat} must be true, false, or null to use the chat template if there is one.")

    def source(self, role: str) -> "ModelSource":
        """Return the draft or the target as it is to be loaded; only a target is spread over devices.

        Raises:
            UserError: an unknown type, or a device that does not exist here.
        """
        is_draft = role == "draft"
        return ModelSource(
            self.draft if is_draft else self.target,
            self.draft_revision if is_draft else self.target_revision,
            checked_dtype(self.dtype),
            checked_device(self.device),
            None if is_draft else self.device_map,
            self.trust_remote_code in (True, role),
            self.draft_quantization if is_draft else self.quantization,
        )


@dataclass(frozen=True)
class ModelSource:
    """Where a model is and how it is loaded; the keys are those of PairConfig, without the other model's."""

    location: str | Path
    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str = "cpu"
    device_map: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None


def checked_device(device: str | None) -> str:
    """Return the device for models; None is cuda if there is one, and each process of a training run takes its own.

    Raises:
        UserError: the device does not exist here.
    """
    if device is None:
        rank = os.environ.get("LOCAL_RANK")
        return ("cuda" if rank is None else f"cuda:{rank}") if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for unknown names, and for a build without that device
        raise UserError(
            f"device={device!r} cannot be used here ({str(error).splitlines()[0]}); use cpu, or null to choose automatically."
        ) from None
    return device


def checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return "auto" or the torch dtype of a name. Raises UserError for anything else."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto" or (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        return torch_dtype or dtype
    raise UserError(f"dtype={dtype!r} must be a floating-point type; use auto, float32, bfloat16, float16 or float64.")


def config_folder() -> Path:
    """Return the folder of YAML configs: next to the package in a source tree, inside it in an installed wheel."""
    package = Path(__file__).parents[1]
    source_tree = package.parent / "conf"
    return source_tree if (source_tree / "model").is_dir() else package / "conf"


def pair_config(name: str | None = None, **keys: Any) -> PairConfig:
    """Return the config of conf/model/<name>.yaml with `keys` in place of its own, or of `keys` alone.

    A name without a file is what reports call a pair whose draft and target are given. A key that is null has its default.

    Raises:
        UserError: an unknown name or key.
    """
    path = config_folder() / "model" / f"{name}.yaml"
    if name is None or (not path.is_file() and None not in (keys.get("draft"), keys.get("target"))):
        values = {"name": name} | keys
    elif path.is_file():
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid YAML ({' '.join(str(error).split())}).") from None
        if not isinstance(content, dict):
            raise UserError(f"{path} must hold the keys of a pair, such as draft and target.")
        # Hydra alone reads the defaults list, which chooses the prompts that suit the pair.
        values = {key: value for key, value in content.items() if key != "defaults"} | keys
    else:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise UserError(f"there is no model config {name!r}; known: {known}; or give draft= and target=.")
    known_keys = [field.name for field in fields(PairConfig)]
    if unknown := [key for key in values if key not in known_keys]:
        raise UserError(f"model.{unknown[0]}={values[unknown[0]]} is not known; expected one of {', '.join(known_keys)}.")
    return PairConfig(**{key: value for key, value in values.items() if value is not None and value != MISSING})
