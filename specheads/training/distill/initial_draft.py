"""Drafts before training that are not the pair's: some of the target's own layers, or random weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specheads.errors import UserError, is_count
from specheads.pair.language_model import place_of_layers

LISTS_BY_LAYER = ("layer_types",)  # lists in a config that have an entry for each layer


@dataclass(frozen=True)
class TargetLayers:
    """A draft made of the target's embeddings and some of its layers.

    Args:
        layers: which, in order; or how many, spread evenly; None: a quarter of them.
    """

    layers: Sequence[int] | int | None = None

    @property
    def name(self) -> str:
        """What the draft is called before it is saved."""
        return f"the target's layers {'spread evenly' if self.layers is None else _listed(self.layers)}"

    def make(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return the draft. Raises UserError for layers that the target does not have."""
        count = target.config.get_text_config().num_hidden_layers
        layers = max(1, count // 4) if self.layers is None else self.layers
        return with_layers(target, evenly_spread(count, layers) if isinstance(layers, int) else layers)


@dataclass(frozen=True)
class RandomDraft:
    """A draft with random weights.

    Args:
        config: what differs from the target's config.
        seed: of the weights.
    """

    config: Mapping[str, Any]
    seed: int = 0

    @property
    def name(self) -> str:
        """What the draft is called before it is saved."""
        return "fresh: " + ", ".join(f"{key}={value}" for key, value in self.config.items())

    def make(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return the draft. Raises UserError for a config that makes no model."""
        return with_random_weights(target, self.config, self.seed)


InitialDraft = TargetLayers | RandomDraft


def with_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a smaller model of the target's family, made of its embeddings and of `layers`, in that order.

    Raises:
        UserError: layers that the target does not have.
    """
    count = target.config.get_text_config().num_hidden_layers
    if not layers or any(not is_count(layer) or layer >= count for layer in layers):
        raise UserError(
            f"init_layers={_listed(layers)} are not layers of {type(target).__name__}, which has the layers 0 to {count - 1}; "
            f"give for example init_layers=[0,{count - 1}]."
        )
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = len(layers)
    for name in LISTS_BY_LAYER:
        if (values := getattr(text_config, name, None)) is not None:
            setattr(text_config, name, [values[layer] for layer in layers])
    model, prefix = _new_model(config, target.dtype, seed=0), f"{place_of_layers(target)}."
    states = {}
    for name, tensor in target.state_dict().items():
        if not name.startswith(prefix):
            states[name] = tensor
            continue
        number, rest = name.removeprefix(prefix).split(".", 1)
        states |= {f"{prefix}{new}.{rest}": tensor for new, layer in enumerate(layers) if layer == int(number)}
    model.load_state_dict(states)
    return model.to(target.device)


def evenly_spread(count: int, num_layers: int) -> list[int]:
    """Return `num_layers` of `count` layers; the first and the last are among them if there are two or more."""
    if not is_count(num_layers, least=1) or num_layers > count:
        raise UserError(f"init_layers={num_layers} must be an integer from 1 to {count}, the number of the target's layers.")
    return [0] if num_layers == 1 else [round(number * (count - 1) / (num_layers - 1)) for number in range(num_layers)]


def with_random_weights(target: PreTrainedModel, changes: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """Return a model with random weights whose config is the target's with `changes`.

    Raises:
        UserError: keys that the config does not have, or values that make no model.
    """
    text_config = target.config.get_text_config()
    if unknown := [key for key in changes if not hasattr(text_config, key)]:
        raise UserError(f"init_config.{unknown[0]} is no key of {type(text_config).__name__}; see the target's config.json.")
    values = text_config.to_dict() | dict(changes)
    try:
        for name in LISTS_BY_LAYER if "num_hidden_layers" in changes else ():
            if (by_layer := values.get(name)) is not None:
                values[name] = [by_layer[number % len(by_layer)] for number in range(values["num_hidden_layers"])]
        model = _new_model(AutoConfig.for_model(**values), target.dtype, seed).to(target.device)
        with torch.no_grad():
            model(torch.zeros((1, 4), dtype=torch.long, device=target.device))  # some wrong sizes fail only here
        return model
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, LookupError, StrictDataclassError) as error:
        raise UserError(f"init_config={dict(changes)} makes no model: {str(error).splitlines()[0]}") from error


def _new_model(config: PretrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Return a model with random weights, which `seed` decides; the random state of the process stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _listed(layers: Sequence[int] | int) -> str:
    """Return layers as text, "[0, 3, 5]", whatever sequence holds them."""
    return str(layers if isinstance(layers, int) else list(layers))
