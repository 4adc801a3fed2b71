"""The description of a pair: the keys of conf/model/*.yaml, which are also keyword arguments and
keys on command lines.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BeforeValidator, InstanceOf

from specheads.errors import UserError
from specheads.pair.locations import check_available
from specheads.settings import Count, Flag, PositiveNumber, Settings, Text, config_folder, setting

# How weights are stored in fewer bits; quantization.py says what each needs
QUANTIZATIONS = ("int8", "fp8", "int4", "nf4", "llm_int8")
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


_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def _dtype_name(value: object) -> str:
    name = str(value).removeprefix("torch.")  # a dtype of torch, too
    if name not in _DTYPES:
        raise UserError(
            f"model.dtype={value} must be a floating-point type; use {', '.join(_DTYPES[:-1])} or"
            f" {_DTYPES[-1]}."
        )
    return name


def _check_quantization(name: object) -> object:
    if name not in (None, *QUANTIZATIONS):
        raise ValueError(
            f"is not known; expected {', '.join(QUANTIZATIONS)}, or null for the weights as they"
            " are"
        )
    return name


Location = Text | InstanceOf[Path]
Quantization = Annotated[str | None, BeforeValidator(_check_quantization)]
Activations = Literal["float32", "int16", "int8"]


class PairConfig(Settings):
    """The description of a pair."""

    draft: Location = setting(
        "",
        "a folder, a hub id, a GGUF file, embedded:mini/draft or synthetic:llama3.2-1b; also of an"
        " EAGLE-3 draft",
    )
    target: Location = setting("", "the same for the target")
    name: Text | None = setting(None, "what reports call the pair; null: made of the two locations")
    tokenizer: Location | None = setting(None, "the tokenizer's location; null: with the target")
    draft_revision: Text | None = setting(None, "a hub commit or tag")
    target_revision: Text | None = setting(None, "a hub commit or tag")
    dtype: Annotated[str, BeforeValidator(_dtype_name)] = setting(
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
    activations: Activations = setting(
        "float32",
        "what the target's prepacked weights of 8 and 5 bits are multiplied with on a CPU:"
        " activations in float32, or rounded to 16 or 8 bits in groups of 32 (int16, int8; weights"
        " of 8 bits take int16 in place of int8), which verifies more tokens in a step's time",
    )
    draft_activations: Activations = setting(
        "int16", "the same for the draft; the output distribution stays the target's"
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
    draft_layers: tuple[Count, ...] | None = setting(
        None,
        "the target's layers whose inputs an EAGLE-3 draft reads, [2,18,33], in place of those that"
        " its folder names: one that was converted may name others; null: the folder's",
        min_length=1,
    )
    trust_remote_code: Flag | Literal["draft", "target"] = setting(
        False,
        "run code that comes with a model: draft or target for that of one of them (the tokenizer's"
        " is the target's), true for both",
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
