"""The description of a pair: the keys of conf/model/*.yaml, which are also keyword arguments and
keys on command lines.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import yaml
from pydantic import BeforeValidator, InstanceOf

from specheads.errors import UserError
from specheads.pair.locations import check_available
from specheads.pair.quantization import FORMS, check_quantization
from specheads.settings import Flag, PositiveNumber, Settings, Text, config_folder, setting

INSTRUCTION = "{instruction}"  # an instruction format takes the text there


def _check_format(value: object) -> object:
    if value is not None and (not isinstance(value, str) or INSTRUCTION not in value):
        raise ValueError(
            f"does not say where the instruction goes; write {INSTRUCTION} there, as in '[INST]"
            f" {INSTRUCTION} [/INST]'"
        )
    return value


def _check_arguments(value: object) -> object:
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(
            f"must hold text, numbers, true, false and lists of them ({error}); put dates in quotes"
        ) from None
    return value


def checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return "auto" or the torch dtype of a name. Raises UserError for anything else."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto" or (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        return torch_dtype or dtype
    raise UserError(
        f"dtype={dtype!r} must be a floating-point type; use auto, float32, bfloat16, float16 or"
        " float64."
    )


Location = Text | InstanceOf[Path]
Quantization = Annotated[str | None, BeforeValidator(check_quantization)]


class PairConfig(Settings):
    """The description of a pair."""

    draft: Location = setting(
        "", "a folder, a hub id, a GGUF file, embedded:mini/draft or synthetic:llama3.2-1b"
    )
    target: Location = setting("", "the same for the target")
    name: Text | None = setting(None, "what reports call the pair; null: made of the two locations")
    tokenizer: Location | None = setting(None, "the tokenizer's location; null: with the target")
    draft_revision: Text | None = setting(None, "a hub commit or tag")
    target_revision: Text | None = setting(None, "a hub commit or tag")
    dtype: Annotated[str | torch.dtype, BeforeValidator(checked_dtype)] = setting(
        "auto",
        "a torch dtype or its name; auto takes the checkpoint's on a GPU, and on a CPU bfloat16 or"
        " float32, what is faster there",
    )
    quantization: Quantization = setting(
        None,
        "how the target's weights are stored: int8, int4 (torchao on a GPU; on a CPU rounded to"
        " GGUF's Q8_0, Q4_1), fp8 (torchao, GPUs), nf4 or llm_int8 (bitsandbytes)",
    )
    draft_quantization: Quantization = setting(
        None, "the same for the draft; the output distribution stays the target's"
    )
    device: Text | None = setting(
        None,
        "where the draft goes, and the target unless device_map spreads it; null: cuda if there"
        " is one",
    )
    device_map: Text | None = setting(None, "auto spreads the target over all devices")
    chat: Flag | None = setting(
        None, "whether instructions go through the chat template; null: if the tokenizer has one"
    )
    instruction_format: Annotated[str | None, BeforeValidator(_check_format)] = setting(
        None, "how instructions are wrapped instead, such as [INST] {instruction} [/INST]"
    )
    chat_template_kwargs: Annotated[Mapping[str, object], BeforeValidator(_check_arguments)] = (
        setting(
            {},
            "the arguments of the chat template, such as {enable_thinking: false},"
            " {reasoning_effort: low}",
        )
    )
    draft_temperature: PositiveNumber | None = setting(
        None,
        "divides the draft's logits before any warp, and not the target's: a sharper or flatter"
        " draft may agree more often, and the output stays the target's; null: the one in the"
        " draft's config, which a distillation writes, or 1",
    )
    trust_remote_code: Flag | Literal["draft", "target"] = setting(
        False,
        "run code that comes with a model: draft or target for that of one of them (the tokenizer's"
        " is the target's), true for both",
    )

    def source(self, role: str) -> "ModelSource":
        """Return where the draft or the target is and how it is loaded.

        Raises UserError for a device that does not exist here.
        """
        is_draft = role == "draft"
        return ModelSource(
            self.draft if is_draft else self.target,
            self.draft_revision if is_draft else self.target_revision,
            self.dtype,
            checked_device(self.device),
            None if is_draft else self.device_map,
            self.trust_remote_code in (True, role),
            self.draft_quantization if is_draft else self.quantization,
        )

    def check_available(self, draft: bool) -> None:
        """Raise UserError, within seconds, for a target (and with `draft`, a draft) that is neither
        here nor on the hub.
        """
        for role in ("target", "draft") if draft else ("target",):
            check_available(role, getattr(self, role), getattr(self, f"{role}_revision"))


class _Model(Settings):
    """What gives the keys of a pair their names in messages."""

    model: PairConfig


@dataclass(frozen=True)
class ModelSource:
    """Where a model is and how it is loaded.

    The keys are those of PairConfig, without the other model's.
    """

    location: str | Path
    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str = "cpu"
    device_map: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None

    @property
    def rounded_form(self) -> str | None:
        """The GGUF name of the form to which weights are rounded, in place of a package that stores
        them.
        """
        on_cpu = torch.device(self.device).type == "cpu" and not (
            self.device_map and torch.cuda.is_available()
        )
        return FORMS.get(self.quantization or "") if on_cpu else None


def checked_device(device: str | None) -> str:
    """Return the device for models; None is cuda if there is one, and each process's own.

    Raises UserError for an unknown one.
    """
    if device is None:
        rank = os.environ.get("LOCAL_RANK")
        return ("cuda" if rank is None else f"cuda:{rank}") if torch.cuda.is_available() else "cpu"
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("its tensors have no numbers")
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # what torch raises for unknown names, and for a build without that device
        raise UserError(
            f"device={device!r} cannot be used here ({str(error).splitlines()[0]}); use cpu, or"
            " null to choose automatically."
        ) from None
    return device


def pair_config(name: str | None = None, **keys: object) -> PairConfig:
    """Return the config of conf/model/<name>.yaml with `keys` in place of the file's, or of `keys`
    alone; null is a key's default.

    A name without a file is what reports call a pair whose target is given. Raises UserError for an
    unknown name or key.
    """
    path = config_folder() / "model" / f"{name}.yaml"
    if name is None or (not path.is_file() and keys.get("target") is not None):
        values = {"name": name} | keys
    elif path.is_file():
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        # Hydra alone reads the defaults list, which chooses the prompts that suit the pair.
        values = {key: value for key, value in content.items() if key != "defaults"} | keys
    else:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise UserError(
            f"there is no model config {name!r}; known: {known}; or give draft= and target=."
        )
    return _Model(
        model={key: value for key, value in values.items() if value is not None and value != "???"}
    ).model
