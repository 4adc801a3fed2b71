"""A deeper model from a trained one, which computes the same until it trains."""

import torch
from transformers import LlamaForCausalLM


@torch.no_grad()
def grow(model: LlamaForCausalLM, trained: LlamaForCausalLM) -> None:
    """Give `model` the weights of `trained`, which may have fewer layers and is equal to it in everything else.

    Each layer of `trained` is followed by its share of the further layers. They are copies of it whose last maps are zero, so
    that they add nothing to the residual stream at first.

    Source: Chengyue Wu et al., "LLaMA Pro: Progressive LLaMA with Block Expansion" (2024), section 3.
    """
    depth, further = trained.config.num_hidden_layers, model.config.num_hidden_layers
    origins = [place * depth // further for place in range(further)]
    for place, (layer, origin) in enumerate(zip(model.model.layers, origins, strict=True)):
        layer.load_state_dict(trained.model.layers[origin].state_dict())
        if place > 0 and origins[place - 1] == origin:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.load_state_dict(trained.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(trained.model.norm.state_dict())
