"""This project's decoders, for `benchmarks/peers.py`."""

import sys
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.peer_workers.protocol import answers, serve, settings
from specheads import SpeculativeDecoder, Warp, load_head, load_pair
from specheads.decoding.decoder import Baseline
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.decoding.verification import BlockVerification, TokenVerification


class Decoders:
    """One pair with all the decoders that were asked for; those of a warp share their memory."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.setup = setup
        self.pair = load_pair(setup["model"], **setup["pair_keys"])
        self._made: dict[str, SpeculativeDecoder | Baseline] = {}

    @cached_property
    def head(self) -> torch.nn.Module:
        """The head of the `head` rule."""
        return load_head(self.setup["head"]).requires_grad_(False)

    def generate(self, options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple:
        """Return a response and the seconds of the whole call."""
        decoder = self.decoder(options, greedy)
        start = time.perf_counter()
        out = decoder.generate(prompt, length, seed=seed, stop_tokens=())
        seconds = time.perf_counter() - start
        return out.tokens.tolist(), seconds

    def decoder(self, options: Mapping[str, Any], greedy: bool) -> SpeculativeDecoder | Baseline:
        """Return the decoder that `options` describe, warm."""
        key = str((sorted(options.items()), greedy))
        if key not in self._made:
            self._made[key] = self._new(options, greedy)
            self._made[key].warm_up()
        return self._made[key]

    def _new(self, options: Mapping[str, Any], greedy: bool) -> SpeculativeDecoder | Baseline:
        basis = self._basis(greedy)
        verification = BlockVerification() if options.get("verification") == "block" else TokenVerification()
        match options["rule"]:
            case "alone":
                return Baseline(self.pair, basis.warp, basis.target_engine)
            case "fixed":
                return basis.with_stopping(FixedLength(options["length"]), verification)
            case "head":
                return basis.with_stopping(HeadThreshold(self.head, options["threshold"]), verification)
        raise ValueError(f"rule {options['rule']!r} is not known")

    def _basis(self, greedy: bool) -> SpeculativeDecoder:
        """Return the decoder whose engines all others of its warp share."""
        key = f"basis {greedy}"
        if key not in self._made:
            warp = Warp(temperature=0) if greedy else Warp(top_k=50)
            self._made[key] = SpeculativeDecoder(self.pair, warp=warp, engine=self.setup["engine"])
        return self._made[key]


def main() -> None:
    setup = settings()
    torch.set_num_threads(setup["threads"])
    with answers() as channel:
        decoders = Decoders(setup)
        serve(channel, {"torch": torch.__version__}, decoders.generate)


if __name__ == "__main__":
    main()
