"""An acceptance head on its own: needs torch and safetensors, and the folder's config.json and
model.safetensors.

    head = StandaloneHead.load(".")                       # the folder that this file lies in
    round = DraftRound(head)                              # one for every draft, batch 1
    while not round.stops(features):                      # after each drafted token
        ...

`features` are those of the token just drafted, by the names in `head.inputs`, each (1, size) or
(1,). `drafting_features` computes those of the draft from its logits, the token, `hidden` (the
input of the draft's output embedding from which the logits were computed; the same for both kinds
of head), the draft's input embedding and, of a draft that reads its target, `depth` (how many
tokens of the round were drafted before).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from specheads.heads.calibration import calibrated
from specheads.heads.portable.network import Config, Network, load_tensors
from specheads.heads.portable.tensor_file import read_tensors

FORMAT_VERSION = 2


class StandaloneHead(Network):
    """A head and its config, a dict (see config.json)."""

    def __init__(self, config: Config) -> None:
        """Make a head with random weights from the content of a config.json of the present
        format.
        """
        super().__init__(config)
        self.config = dict(config)
        self._fitted: Tensor | None = None

    @classmethod
    def load(cls, folder: str | Path) -> "StandaloneHead":
        """Return the head of a folder, on the CPU in float32.

        Raises ValueError for another format, or damaged files.
        """
        try:
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            tensors = read_tensors(Path(folder) / "model.safetensors")
            golden = read_tensors(Path(folder) / "golden.safetensors")
            if (version := config.get("format_version")) != FORMAT_VERSION:
                raise ValueError(
                    f"it has head format {version!r}; this file reads {FORMAT_VERSION}."
                )
            head = load_tensors(lambda: cls(config), config, tensors)
            if not head._lines(1, torch.device("cpu")).isfinite().all():
                raise ValueError("its calibration is not of finite numbers")
            head.check_golden(golden["inputs"], golden["logits"])
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{folder} holds no head that can be read ({error}); get its files again."
            ) from error
        return head

    def acceptance(self, features: Mapping[str, Tensor], index: Tensor) -> Tensor:
        """Return the calibrated chances (B,) that tokens at `index` (B,) long in their drafts are
        accepted.
        """
        # A draft may be spread over several devices, its head is on one.
        device = self.readout.weight.device
        index = index.to(device)
        logits = self({name: value.to(device) for name, value in features.items()})
        return calibrated(logits, index, *self._lines(len(index), device)).sigmoid()

    def _lines(self, count: int, device: torch.device) -> Tensor:
        """Return slopes and intercepts (2, count, indices) of the calibration.

        All rows are the same.
        """
        if self._fitted is None or self._fitted.device != device:
            fitted = self.config.get("calibration") or {"slope": [1.0], "intercept": [0.0]}
            self._fitted = torch.tensor([fitted["slope"], fitted["intercept"]], device=device)[
                :, None
            ]
        return self._fitted.expand(2, count, -1)


class Bounds(TypedDict, total=False):
    """Arguments of `bounds_of`, which are those of a draft; None: what the head recommends."""

    threshold: float | None
    min_tokens: int | None
    max_tokens: int | None


def bounds_of(
    config: Config,
    threshold: float | None = None,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the bounds of drafts by name: the arguments, or else what the head's config
    recommends, or else the usual bounds.

    A `min_tokens` that is not given is never above `max_tokens`. Raises ValueError for bounds that
    are not possible.
    """
    usual = {
        "threshold": 0.7,
        "min_tokens": 2 if config["predicts"] == "input_token" else 1,
        "max_tokens": 20,
    }
    recommended = config.get("recommended") or {}
    if not hasattr(recommended, "get"):
        raise ValueError(f"recommended={recommended!r} in config.json must be a set of bounds.")
    given = {"threshold": threshold, "min_tokens": min_tokens, "max_tokens": max_tokens}
    bounds = dict[str, Any]()
    for name, value in usual.items():
        bounds[name] = recommended.get(name, value) if given[name] is None else given[name]
    threshold = bounds["threshold"]
    if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold!r} must be a number from 0 to 1.")
    longest = bounds["max_tokens"] = int(bounds["max_tokens"])
    shortest = int(bounds["min_tokens"])
    if min_tokens is None:
        shortest = min(shortest, longest)
    bounds["min_tokens"] = shortest
    if not 0 < shortest <= longest:
        raise ValueError(
            f"min_tokens={shortest} must be a positive integer of at most max_tokens={longest}."
        )
    return bounds


class DraftRound:
    """Ends a draft once the chance that one of its tokens is rejected exceeds a threshold
    (SpecDec++, section 3.2).
    """

    def __init__(self, head: StandaloneHead, **bounds: Unpack[Bounds]) -> None:
        """Begin a draft. `bounds` are arguments of `bounds_of`, which may raise ValueError."""
        self.head = head
        self.threshold, self.min_tokens, self.max_tokens = bounds_of(head.config, **bounds).values()
        self.num_drafted = 0
        self.survival = 1.0

    @torch.no_grad()
    def stops(self, features: Mapping[str, Tensor]) -> bool:
        """Take the features of the token just drafted.

        Return whether it is the last one of the draft.
        """
        # The index of what the head predicts
        index = self.num_drafted - (self.head.config["predicts"] == "input_token")
        if index >= 0:
            place = torch.tensor([index], device=self.head.readout.weight.device)
            self.survival *= self.head.acceptance(features, place).item()
        self.num_drafted += 1
        stop = 1 - self.survival > self.threshold and self.num_drafted >= self.min_tokens
        return stop or self.num_drafted >= self.max_tokens
