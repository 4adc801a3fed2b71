"""Where distillation starts: from the pair's draft, from some of the target's own layers, or from random weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specheads.decoding.drafting.layer_skip import place_of_layers
from specheads.errors import UserError, is_count

STARTS = ("draft", "layers", "fresh")
PER_LAYER = ("layer_types",)  # lists in a config that have an entry for each layer


@dataclass(frozen=True)
class Start:
    """What the draft is when distillation begins.

    Args:
        init: "draft", the pair's own; "layers", some of the target's; "fresh", random weights.
        layers: of the target, in order; or how many, spread evenly; None: a quarter.
        config: what differs from the target's config in a fresh draft's.
        seed: of random weights.
    """

    init: str = "draft"
    layers: Sequence[int] | int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.init not in STARTS:
            raise UserError(f"init={self.init} is not known; use one of {', '.join(STARTS)}.")
        if self.init == "fresh" and not self.config:
            raise UserError(
                "init=fresh needs init_config: what makes it smaller than the target, for example "
                "'init_config={num_hidden_layers: 2, hidden_size: 512}'."
            )
        unused = {"layers": self.layers is not None, "fresh": bool(self.config)}
        for init, key in (("layers", "init_layers"), ("fresh", "init_config")):
            if unused[init] and self.init != init:
                raise UserError(f"{key} is for init={init}, but init={self.init}.")

    @property
    def name(self) -> str:
        """What the draft is called before it is saved."""
        if self.init == "fresh":
            return "fresh: " + ", ".join(f"{key}={value}" for key, value in self.config.items())
        return "the target's layers " + ("spread evenly" if self.layers is None else str(self.layers))

    def make(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return the draft."""
        if self.init == "fresh":
            return fresh(target, self.config, self.seed)
        count = target.config.get_text_config().num_hidden_layers
        layers = max(1, count // 4) if self.layers is None else self.layers
        return of_layers(target, layers if isinstance(layers, list | tuple) else evenly_spread(count, layers))


def of_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a smaller model of the target's family, made of its embeddings and of `layers`, in that order.

    Raises:
        UserError: layers that the target does not have.
    """
    count = target.config.get_text_config().num_hidden_layers
    if not layers or any(not is_count(layer) or layer >= count for layer in layers):
        raise UserError(
            f"init_layers={list(layers)} are not layers of {type(target).__name__}, which has 0 to {count - 1}; for example init_layers=[0,{count - 1}]."
        )
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    for name in PER_LAYER:
        if (kinds := getattr(text, name, None)) is not None:
            setattr(text, name, [kinds[layer] for layer in layers])
    model, place = new_model(config, target.dtype, seed=0), place_of_layers(target)
    states = {}
    for name, tensor in target.state_dict().items():
        if not name.startswith(f"{place}."):
            states[name] = tensor
            continue
        number, rest = name.removeprefix(f"{place}.").split(".", 1)
        states |= {f"{place}.{new}.{rest}": tensor for new, layer in enumerate(layers) if layer == int(number)}
    model.load_state_dict(states)
    return model.to(target.device)


def evenly_spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` of `count` layers, the first and the last among them where there are two."""
    if not is_count(wanted, least=1) or wanted > count:
        raise UserError(f"init_layers={wanted} is no count from 1 to the target's {count} layers.")
    return [0] if wanted == 1 else [round(number * (count - 1) / (wanted - 1)) for number in range(wanted)]


def fresh(target: PreTrainedModel, changes: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """Return a model with random weights whose config is the target's with `changes`.

    Raises:
        UserError: keys that the config does not have, or values that make no model.
    """
    text = target.config.get_text_config()
    if unknown := [key for key in changes if not hasattr(text, key)]:
        raise UserError(f"init_config.{unknown[0]} is no key of {type(text).__name__}; look at the target's config.json.")
    facts = text.to_dict() | dict(changes)
    try:
        for name in PER_LAYER if "num_hidden_layers" in changes else ():
            if (kinds := facts.get(name)) is not None:
                facts[name] = [kinds[number % len(kinds)] for number in range(facts["num_hidden_layers"])]
        model = new_model(AutoConfig.for_model(**facts), target.dtype, seed).to(target.device)
        with torch.no_grad():
            model(torch.zeros((1, 4), dtype=torch.long, device=target.device))  # some sizes only fail here
        return model
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, LookupError, StrictDataclassError) as error:
        raise UserError(f"init_config={dict(changes)} makes no model: {str(error).splitlines()[0]}") from error


def new_model(config: PretrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Return a model with random weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
