"""Random drafts that read their target, and plain loops over both models."""

from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from specheads.pair.draft_vocabulary import borrow_embedding, set_output
from specheads.pair.feature_draft import FeatureDraft, FeatureDraftConfig
from specheads.pair.pair import Pair
from specheads.pair.reading import read_features
from specheads.pair.sampling import Uniforms
from specheads.pair.unrolled import unrolled


def feature_draft(
    target: PreTrainedModel,
    layers: tuple[int, ...] = (0, 1),
    kept: torch.Tensor | None = None,
    kind: type = LlamaConfig,
    borrows: bool = False,
    seed: int = 0,
    gain: float = 2.0,
    **norms: bool,
) -> FeatureDraft:
    """Return a random draft whose logits have a spread of about `gain`.

    `kept`: the tokens of its output; default: all.
    """
    of_target = target.config.get_text_config()
    size = of_target.hidden_size
    text_config = kind(
        vocab_size=of_target.vocab_size,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=size // 2,
        max_position_embeddings=getattr(of_target, "max_position_embeddings", 64),
        bos_token_id=None,
        eos_token_id=None,
    )
    config = FeatureDraftConfig(
        text_config=text_config,
        target_layers=layers,
        target_hidden_size=size,
        draft_vocab_size=of_target.vocab_size,
        **norms,
    )
    torch.manual_seed(seed)
    model = FeatureDraft._from_config(config, dtype=target.dtype)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(
                weight, std=1.0 if "embed" in name else gain / weight.shape[1] ** 0.5
            )
    if kept is not None:
        set_output(model, model.lm_head.weight.detach()[kept], kept)
    if borrows:
        borrow_embedding(model, target)
    return model.to(target.device).requires_grad_(False).eval()


def reading_pair(pair: Pair, **choices: object) -> Pair:
    """Return a pair whose draft reads its target."""
    draft = feature_draft(pair.target, **choices)
    return replace(pair, draft=draft, draft_id="reads-its-target", draft_revision="r3", said=set())


def taught(pair: Pair, texts: torch.Tensor, num_steps: int = 60) -> Pair:
    """Return a pair whose draft that reads its target has learned from the target along `texts` (B,
    T), at depths up to two.
    """
    target_lm = pair.target_lm
    draft = pair.draft.requires_grad_(True)
    hidden, features = read_features(target_lm, texts, draft.config.target_layers)
    expected = target_lm.logits(hidden).softmax(dim=-1)
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(num_steps):
        loss = torch.zeros(())
        for step, states in zip(range(3), unrolled(draft, texts, features, texts), strict=False):
            logits = draft.lm_head(states[:, step + 1 :])
            loss = loss + cross_entropy(logits.flatten(0, 1), expected[:, step + 1 :].flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    draft.requires_grad_(False)
    return pair


def by_loop(draft: FeatureDraft, tokens, features, num_steps, drafted=None):
    """Return the hidden states (num_steps, T, H) that predict the token after each of `tokens` (T,)
    after 1 to `num_steps` steps, each position by a KV cache of its own; 0 where no pair is.

    Later steps read `drafted` (T,) in place of `tokens`.
    """
    drafted = tokens if drafted is None else drafted
    length = len(tokens)
    nothing = features.new_zeros(draft.config.text_config.hidden_size)
    hidden = [[nothing] * length for _ in range(num_steps)]
    for pair in range(length - 1):
        cache = DynamicCache()
        states = draft.first_states(features[None, : pair + 1])
        output = draft(tokens[None, 1 : pair + 2], states, past_key_values=cache)
        for step in range(min(num_steps, length - 1 - pair)):
            if step:
                read = drafted[None, None, pair + 1 + step]
                output = draft(read, output.state[:, -1:], past_key_values=cache)
            hidden[step][pair + 1 + step] = output.hidden[0, -1]
    return torch.stack([torch.stack(of_step) for of_step in hidden])


def features_of(target: PreTrainedModel, tokens: torch.Tensor, layers: tuple[int, ...]):
    """Return what a draft reads of a target along `tokens` (T,), (T, L H_target)."""
    inputs = target.base_model(tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([inputs[layer][0] for layer in layers], dim=-1)


@torch.no_grad()
def plain_draft(pair, committed, count, warp, uniforms):
    """Return `count` tokens drafted after `committed`: the target reads all but the last token, and
    the draft its states.
    """
    draft = pair.draft
    features = []
    with pair.target_lm.noting_inputs(draft.config.target_layers) as inputs:
        pair.target_lm.hidden_states(torch.tensor([committed[:-1]]), use_cache=False)
        for layer in draft.config.target_layers:
            features.append(inputs[layer])
    cache = DynamicCache()
    tokens = torch.tensor([committed[1:]])
    states = draft.first_states(torch.cat(features, dim=-1))
    drafted = []
    while len(drafted) < count:
        output = draft(tokens, states, past_key_values=cache)
        probs = warp(pair.draft_lm.logits(output.hidden[:, -1]))
        tokens = warp.draw(probs, torch.tensor([uniforms.number()]).double())[None]
        states = output.state[:, -1:]
        drafted.append(int(tokens))
    return drafted


def check_rounds(pair, out, warp, seed=0):
    """Compare the accepted tokens of each round with drafts of a plain loop."""
    uniforms = Uniforms(torch.device("cpu"), seed, 0)
    committed = out.prompt_ids.tolist()
    for each in out.rounds:
        drafted = []
        if each.num_drafted:
            drafted = plain_draft(pair, committed, each.num_drafted, warp, uniforms)
        count = each.num_accepted
        assert drafted[:count] == list(each.tokens[:count])
        if warp.greedy and count < len(each.tokens):  # the rest is another token of the target
            assert drafted[count : count + 1] != [each.tokens[count]]
        committed += each.tokens
