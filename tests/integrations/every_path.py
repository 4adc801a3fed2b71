"""Run by test_wheel.py where only a wheel is installed: every way to decode with a head, on the
same prompts.

    python every_path.py <folder>

Trains nothing: heads with random weights. Prints JSON: by way, for each prompt the greedy tokens
and the lengths of the drafts.
"""

import importlib.util
import json
import sys
from pathlib import Path

import onnxruntime
import torch
from torch import nn

import specheads
from specheads.commands import export
from specheads.decoding.stopping import HeadThreshold
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.integrations.transformers import assist
from specheads.prompts.sources import NanoSource

NUM_PROMPTS = 20
NUM_TOKENS = 20
THRESHOLD = 0.6
LONGEST = 7
KINDS = {
    "next_token": {
        "depth": 2,
        "width": 24,
        "calibration": {"slope": [1.5, 1.0], "intercept": [1.5, 1.0]},
    },
    "input_token": {"depth": 1},
}


def new_head(pair, kind, folder):
    torch.manual_seed(1)
    who = {"draft": {"id": pair.draft_id, "revision": pair.draft_revision}}
    head = AcceptanceHead(
        HeadConfig(hidden_size=pair.draft_lm.hidden_size, predicts=kind, **KINDS[kind], **who)
    )
    nn.init.normal_(head.readout.weight, std=0.1)
    nn.init.constant_(head.readout.bias, 1.5)
    return save_head(head, folder)


@torch.no_grad()
def verified(pair, text, drafted):
    """Return the tokens that greedy verification emits: the target's tokens up to the first that
    differs or ends the response.
    """
    best = (
        pair.target(torch.tensor([text + drafted])).logits[0, len(text) - 1 :].argmax(-1).tolist()
    )
    agreed = next((i for i, token in enumerate(drafted) if token != best[i]), len(drafted))
    ended = next((i for i, token in enumerate(best) if token in pair.stop_tokens), len(best))
    return best[: min(agreed, ended) + 1]


@torch.no_grad()
def decoded(pair, prompt, begin):
    """Decode greedily without caches.

    `begin()` returns a function of a drafted token's features that decides whether to stop.
    """
    text = list(prompt)
    lengths = []
    ends = pair.stop_tokens
    while len(text) < len(prompt) + NUM_TOKENS and not ends & set(text[len(prompt) :]):
        drafted = []
        stops = begin()
        while len(drafted) < len(prompt) + NUM_TOKENS - len(text) - 1:
            tokens = torch.tensor([text + drafted])
            hidden = pair.draft_lm.hidden_states(tokens)[:, -1]
            distribution = pair.draft_lm.logits(hidden).softmax(-1)
            token = distribution.argmax(-1)
            drafted.append(int(token))
            entropy = -(distribution * distribution.clamp_min(1e-38).log()).sum(-1)
            features = {
                "hidden": hidden,
                "embedding": pair.draft_lm.embed(token),
                "draft_prob": distribution[:, token[0]],
            }
            if (
                stops(features | {"max_prob": distribution.max(-1).values, "entropy": entropy})
                or drafted[-1] in ends
            ):
                break
        lengths.append(len(drafted))
        text += verified(pair, text, drafted)
    return text[len(prompt) :], lengths


def threshold_on(predicts, chance):
    """The rule's definition, with `chance(features, index)` of a token: stop once a rejection is
    likelier than the threshold.
    """

    def begin():
        survival = 1.0
        count = 0

        def stops(features):
            nonlocal survival, count
            index = count - (predicts == "input_token")
            survival *= float(chance(features, torch.tensor([index]))) if index >= 0 else 1.0
            count += 1
            return (
                1 - survival > THRESHOLD and count >= (2 if predicts == "input_token" else 1)
            ) or count >= LONGEST

        return stops

    return begin


def ways(pair, kind, folder):
    """Return, by name, functions of a prompt that return tokens and draft lengths."""
    head = load_head(folder)
    for form in ("standalone", "onnx"):
        print(export.run([f"head={folder}", f"format={form}"]), file=sys.stderr)
    bounds = {"threshold": THRESHOLD, "max_tokens": LONGEST}
    decoder = specheads.SpeculativeDecoder(
        pair, stopping=HeadThreshold(head, **bounds), warp=specheads.Warp(0.0)
    )

    def ours(prompt):
        out = decoder.generate(prompt, NUM_TOKENS)
        return out.tokens.tolist(), [each.num_drafted for each in out.rounds]

    def given(prompt):
        ids = torch.tensor([prompt])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "max_new_tokens": NUM_TOKENS,
        }

    def assisted(prompt):
        with assist(pair.target, pair.draft, folder, **bounds) as handle:
            generated = pair.target.generate(**given(prompt), assistant_model=pair.draft)
        return generated[0, len(prompt) :].tolist(), [drafted for drafted, _ in handle.rounds]

    def custom(prompt):
        lengths = []  # forward passes of the draft: one for each drafted token
        hook = pair.draft.register_forward_hook(lambda *_: lengths.append(1))
        generated = pair.target.generate(
            **given(prompt),
            custom_generate=str(folder),
            trust_remote_code=True,
            draft_model=pair.draft,
            **bounds,
        )
        hook.remove()
        return generated[0, len(prompt) :].tolist(), len(lengths)

    spec = importlib.util.spec_from_file_location("acceptance_head", folder / "acceptance_head.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    alone = module.StandaloneHead.load(folder)
    session = onnxruntime.InferenceSession(folder / "head.onnx", providers=["CPUExecutionProvider"])

    def in_onnx(features, index):
        known = {name: features[name].numpy() for name in head.config.inputs}
        return session.run(["acceptance"], known | {"index": index.numpy()})[0][0]

    return {
        "decoder": ours,
        "transformers": assisted,
        "custom_generate": custom,
        "standalone": lambda prompt: decoded(
            pair, prompt, lambda: module.DraftRound(alone, **bounds).stops
        ),
        "onnx": lambda prompt: decoded(pair, prompt, threshold_on(kind, in_onnx)),
    }


def main():
    torch.set_num_threads(1)
    pair = specheads.load_pair("nano")
    prompts = [
        pair.encode_instruction(prompt.text)
        for prompt in NanoSource(NUM_PROMPTS, 0, 0).load(pair.chats)
    ]
    report = {"specheads": specheads.__file__}
    for kind in KINDS:
        folder = new_head(pair, kind, Path(sys.argv[1]) / kind)
        # All prompts for the kind that specheads train makes; the paper's, which few paths treat
        # differently, on some.
        some = prompts if kind == "next_token" else prompts[:5]
        report[kind] = {
            name: [way(prompt) for prompt in some] for name, way in ways(pair, kind, folder).items()
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
