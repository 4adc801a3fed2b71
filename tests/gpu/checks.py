"""What the checks on a GPU share: pairs there, heads for them, and references by transformers."""

import torch
from families import VOCAB_SIZE, family_pair
from feature_drafts import reading_pair

from specheads import AcceptanceHead, HeadConfig

ENGINES = ("eager", "cuda_graph")


def moved(pair, device):
    """Return the pair with both models on the device."""
    pair.target.to(device)
    pair.draft.to(device)
    return pair


def with_angles_of_the_cpu(pair):
    """Return the pair with rotary angles from the CPU: they are in float32, whose cosines differ
    from a GPU's in the last bit.
    """
    for model in (pair.target, pair.draft):
        rotary = getattr(model, "model", model).rotary_emb
        there = rotary.inv_freq.device
        compute = rotary.cpu().forward

        def forward(x, position_ids, compute=compute, there=there):
            return tuple(angles.to(there) for angles in compute(x.cpu(), position_ids.cpu()))

        rotary.forward = forward
    return pair


def family_there(name, device):
    """Return a pair of a family on the device."""
    return moved(family_pair(name), device)


def with_reading_draft(pair):
    """Return a pair with a random draft that reads its target, on the target's device."""
    return reading_pair(pair, layers=(0, 1), norm_output=True, fc_norm=True)


def random_prompt(length, seed=0, vocab_size=VOCAB_SIZE):
    """Return `length` token ids."""
    return torch.randint(
        vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def plain_greedy(pair, prompt, count):
    """Return transformers' plain greedy response, without a token that would end it."""
    ids = torch.tensor([prompt], device=pair.target_lm.device)
    out = pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=-1,
    )
    return out[0, len(prompt) :].tolist()


def random_head(pair, predicts="next_token"):
    """Return an untrained head whose predictions differ from token to token."""
    torch.manual_seed(0)
    size = pair.draft.get_input_embeddings().weight.shape[1]
    head = AcceptanceHead(
        HeadConfig(pair.draft_lm.hidden_size, embedding_size=size, depth=1, predicts=predicts)
    )
    torch.nn.init.normal_(head.readout.weight, std=0.3)
    return head.to(pair.draft_lm.device).requires_grad_(False)
