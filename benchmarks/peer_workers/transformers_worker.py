"""transformers' plain and assisted generation, for `benchmarks/peers.py`."""

import copy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from benchmarks.peer_workers.protocol import answers, serve, settings
from specheads import load_pair


class Generation:
    """transformers' generation from a pair; no token ends a response."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.setup = setup
        self.pair = load_pair(setup["model"], **setup["pair_keys"])
        self.pair.target.generation_config.eos_token_id = self.pair.draft.generation_config.eos_token_id = None
        self._configs: dict[str, Any] = {}

    def generate(self, options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple:
        """Return a response and the seconds of the whole call."""
        chosen = {"max_new_tokens": length, "pad_token_id": 0, "do_sample": not greedy}
        if not greedy:
            chosen |= {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
        if options:
            self.pair.draft.generation_config = self._assistant(options, greedy)
            chosen["assistant_model"] = self.pair.draft
        ids = torch.tensor([prompt])
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = self.pair.target.generate(ids, attention_mask=torch.ones_like(ids), **chosen)
        seconds = time.perf_counter() - start
        return out[0, len(prompt) :].tolist(), seconds

    def _assistant(self, options: Mapping[str, Any], greedy: bool) -> Any:
        """Return the draft's settings, one object for all calls: the heuristic continues from its last length."""
        key = str((sorted(options.items()), greedy))
        if key not in self._configs:
            self._configs[key] = copy.deepcopy(self.pair.draft.generation_config)
            for name, value in options.items():
                setattr(self._configs[key], name, value)
        return self._configs[key]


def main() -> None:
    setup = settings()
    torch.set_num_threads(setup["threads"])
    with answers() as channel:
        generation = Generation(setup)
        serve(channel, {"transformers": transformers.__version__}, generation.generate)


if __name__ == "__main__":
    main()
