"""A draft before training that is not the pair's: the target's embeddings and some of its
layers.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.errors import UserError, is_count
from specheads.pair.language_model import place_of_layers


@dataclass(frozen=True)
class TargetLayers:
    """Makes a draft of the target's embeddings and the given layers, in order, or of as many
    layers, spread evenly.
    """

    layers: Sequence[int] | int

    @property
    def name(self) -> str:
        """What the draft is called before it is saved."""
        return (
            "the target's layers"
            f" {self.layers if isinstance(self.layers, int) else list(self.layers)}"
        )

    def numbers(self, count: int) -> list[int]:
        """Return the numbers of the layers, of `count`.

        Raises UserError for layers that the target does not have.
        """
        if isinstance(self.layers, int):
            if not is_count(self.layers, least=1) or self.layers > count:
                raise UserError(
                    f"init_layers={self.layers} must be an integer from 1 to {count}, the number of"
                    " the target's layers."
                )
            return [
                round(number * (count - 1) / max(1, self.layers - 1))
                for number in range(self.layers)
            ]
        if not self.layers or any(not is_count(layer) or layer >= count for layer in self.layers):
            raise UserError(
                f"init_layers={list(self.layers)} are not layers of a target that has the layers 0"
                f" to {count - 1}; give for example init_layers=[0,{count - 1}]."
            )
        return list(self.layers)

    def make(self, target: PreTrainedModel) -> PreTrainedModel:
        """Return the draft. Raises UserError for layers that the target does not have."""
        config = copy.deepcopy(target.config)
        text_config = config.get_text_config()
        layers = self.numbers(text_config.num_hidden_layers)
        text_config.num_hidden_layers = len(layers)
        if (types := getattr(text_config, "layer_types", None)) is not None:
            text_config.layer_types = [types[layer] for layer in layers]
        with torch.random.fork_rng(devices=[]):  # its random weights are replaced
            model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
        prefix = f"{place_of_layers(target)}."
        states = {}
        for name, tensor in target.state_dict().items():
            if not name.startswith(prefix):
                states[name] = tensor
                continue
            number, rest = name.removeprefix(prefix).split(".", 1)
            for new, layer in enumerate(layers):
                if layer == int(number):
                    states[f"{prefix}{new}.{rest}"] = tensor
        model.load_state_dict(states)
        return model.to(target.device)
