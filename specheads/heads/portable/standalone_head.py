"""An acceptance head on its own: needs torch and safetensors, and the folder's config.json and model.safetensors.

    head = StandaloneHead.load(".")                       # the folder that this file lies in
    round = DraftRound(head)                              # one for every draft, batch 1
    while not round.stops(features):                      # after each drafted token
        ...

`features` are those of the token just drafted, by the names in `head.inputs`, each (1, size) or (1,): `hidden`, what the draft's output embedding
read when it gave the token's law (for predicts=input_token: when it had read the token); `embedding`, the draft's input embedding of the token;
`draft_prob`, `max_prob` and `entropy` (nats), the token's probability, the largest one and the entropy of the draft's softmax without temperature
or cuts; `index`, of the token in its draft, from 0; `target_hidden`, what the target's output embedding read for the last token before the draft.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specheads.heads.calibration import calibrated
from specheads.heads.portable.network import Network

FORMAT_VERSION = 2


class StandaloneHead(Network):
    """A head and its config, a dict (see config.json)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        sizes = {
            "hidden": config["hidden_size"],
            "embedding": config.get("embedding_size") or config["hidden_size"],
            "target_hidden": config.get("target_size"),
        }
        input_size = sum(sizes.get(name, 1) for name in config["inputs"])
        projected = config["predicts"] == "next_token" or input_size != config["width"]
        super().__init__(config["inputs"], input_size, config["width"], config["depth"], projected)
        self.config = dict(config)

    @classmethod
    def load(cls, folder: str | Path) -> "StandaloneHead":
        """Return the head of a folder, on the CPU in float32.

        Raises:
            ValueError: another format; a tensor that is missing, too many or of another shape; golden vectors that do not come out.
        """
        config = json.loads((Path(folder) / "config.json").read_text())
        if config.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"{folder} has head format {config.get('format_version')!r}; this file reads {FORMAT_VERSION}.")
        head, found = cls(config), load_file(Path(folder) / "model.safetensors")
        expected = head.state_dict()
        for name in sorted(expected.keys() | found.keys()):
            ours, theirs = (tuple(some[name].shape) if name in some else "no such tensor" for some in (expected, found))
            if ours != theirs:
                raise ValueError(f"{folder}/model.safetensors: tensor {name!r} is {theirs}, expected {ours} from config.json.")
        head.load_state_dict(found)
        head.requires_grad_(False).eval()
        golden = load_file(Path(folder) / "golden.safetensors")
        difference = (head.score(golden["inputs"]) - golden["logits"]).abs().max().item()
        if not difference < 1e-3 * (1 + golden["logits"].abs().max().item()):
            raise ValueError(
                f"{folder}: outputs differ from golden.safetensors by {difference:.3g}; the files are damaged, get them again."
            )
        return head

    def acceptance(self, features: Mapping[str, Tensor], index: Tensor) -> Tensor:
        """Return the calibrated chances (B,) that tokens at `index` (B,) long in their drafts are accepted."""
        device = self.readout.weight.device  # a draft may be spread over several, and its head is on one
        index = index.to(device)
        known = {name: value.to(device) for name, value in features.items()} | {"index": index.clamp_min(0)}
        fitted = self.config.get("calibration") or {"slope": [1.0], "intercept": [0.0]}
        rows = (torch.tensor(fitted[name], device=index.device)[None].expand(len(index), -1) for name in ("slope", "intercept"))
        return calibrated(self(known), index, *rows).sigmoid()


def bounds_of(
    config: Mapping[str, Any], threshold: float | None = None, min_tokens: int | None = None, max_tokens: int | None = None
) -> dict[str, Any]:
    """Return when drafts end: what is given, else what the head's config recommends, else 0.7, 1 (2 for a head that judges its input token) and 20.

    A `min_tokens` that was not given is never above `max_tokens`.

    Raises:
        ValueError: a threshold outside [0, 1], or lengths that bound no draft.
    """
    usual = {"threshold": 0.7, "min_tokens": 2 if config["predicts"] == "input_token" else 1, "max_tokens": 20}
    known = {name: value for name, value in (config.get("recommended") or {}).items() if name in usual}
    given = {"threshold": threshold, "min_tokens": min_tokens, "max_tokens": max_tokens}
    found = usual | known | {name: value for name, value in given.items() if value is not None}
    if not isinstance(found["threshold"], int | float) or not 0 <= found["threshold"] <= 1:
        raise ValueError(
            f"threshold={found['threshold']!r} is outside [0, 1]; it is the chance of a rejection from which a draft ends."
        )
    longest = found["max_tokens"] = int(found["max_tokens"])
    found["min_tokens"] = int(found["min_tokens"]) if min_tokens is not None else min(int(found["min_tokens"]), longest)
    if not 0 < found["min_tokens"] <= longest:
        raise ValueError(
            f"min_tokens={found['min_tokens']} and max_tokens={longest} bound no draft; use 1 or more, the larger one last."
        )
    return found


class DraftRound:
    """Says when one draft is long enough: once the chance that some token of it is rejected exceeds a threshold (SpecDec++, section 3.3)."""

    def __init__(self, head: StandaloneHead, **bounds: float | None) -> None:
        """`bounds`, and what is raised, are those of `bounds_of`."""
        self.head = head
        self.threshold, self.min_tokens, self.max_tokens = bounds_of(head.config, **bounds).values()
        self.num_drafted, self.survival = 0, 1.0

    @torch.no_grad()
    def stops(self, features: Mapping[str, Tensor]) -> bool:
        """Take in a token that was just drafted; return whether it is the draft's last one."""
        index = self.num_drafted - (self.head.config["predicts"] == "input_token")  # which token the head speaks of
        if index >= 0:
            place = torch.tensor([index], device=self.head.readout.weight.device)
            self.survival *= self.head.acceptance(features, place).item()
        self.num_drafted += 1
        stop = 1 - self.survival > self.threshold and self.num_drafted >= self.min_tokens
        return stop or self.num_drafted >= self.max_tokens
