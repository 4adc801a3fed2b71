"""What does a step of the target read per second, what do a verification and a draft step cost, and what of a round is neither?

    python -m benchmarks.gpu.round [--device cuda] [--tiny]

The pair has the shapes of Llama 3.1 8B and Llama 3.2 1B, random weights, and an untrained head. Steps are timed as steps.py times
them: in random order, each after a run of the same model. Rounds accept drafted tokens at a given rate, whatever the models say.
"""

import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from benchmarks.decoding import Stopwatch
from benchmarks.gpu.build_pairs import made_up_prompts, pair_of
from benchmarks.gpu.script import Part, Setup, run_script
from benchmarks.gpu.timeline import traced
from benchmarks.steps import ALONE, DRAFT, DRAFT_WITH_HEAD, bandwidth, seconds_of, steps_of
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp
from specheads.decoding.records import DecodeStats
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.decoding.verification import SyntheticVerification

VERIFIED = tuple(range(1, 21))  # tokens that a verification reads
CONTEXT, WINDOW = 256, 1024
ACCEPTANCE = 0.8  # the rate of synthetic verification
LENGTHS = (4, 8)  # of the drafts of timed rounds
WARPS = {"sampled": Warp(top_k=50), "greedy": Warp(temperature=0)}


class Rounds:
    """One pair, and what was measured with it so far."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.pair = setup, pair_of(setup)
        self.context, self.window = (32, 128) if setup.tiny else (CONTEXT, WINDOW)
        self.seconds: dict[str, float] = {}  # of each step, when sampled
        head = AcceptanceHead(HeadConfig(self.pair.draft_lm.hidden_size))
        self.head = head.to(setup.device).requires_grad_(False)

    def parts(self) -> list[Part]:
        """Return what is measured; later parts need the first."""
        return [self.sampled_steps, self.rounds, self.timeline, self.greedy_steps]

    def sampled_steps(self) -> dict[str, Any]:
        """Time the steps of sampling."""
        content, self.seconds = self._steps("sampled")
        alone, verification = self.seconds[ALONE], self.seconds["verification of 8"]
        share = next(row["of_bandwidth"] for row in content["rows"] if row["step"] == ALONE)
        return content | {"goals": {"target_alone": share, "verification_of_8": verification / alone}}

    def greedy_steps(self) -> dict[str, Any]:
        """Time the steps of greedy decoding."""
        return self._steps("greedy")[0]

    def _steps(self, mode: str) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the rows of all steps, and their seconds by name."""
        device, verified = self.setup.device, VERIFIED[7:9] if self.setup.tiny else VERIFIED
        decoder = self._decoder(HeadThreshold(self.head), WARPS[mode])
        decoder.generate(self.prompt, 2)  # the eager engine has no memory before it has read something
        steps = steps_of(decoder, self.context, verified)
        copied = bandwidth(device)
        seconds = seconds_of(steps, device, self.setup.repeats)
        rows = []
        for name, taken in seconds.items():
            speed = steps[name][1] / taken
            shares = {"of_bandwidth": speed / self.setup.limits.bytes_per_second, "of_a_large_copy": speed / copied}
            rows.append({"step": name, "seconds": taken, "bytes": steps[name][1], "over_alone": taken / seconds[ALONE]} | shares)
        return {"context": self.context, "copy_bytes_per_second": copied, "rows": rows}, seconds

    def _decoder(self, rule: HeadThreshold | FixedLength, warp: Warp, **choices: Any) -> SpeculativeDecoder:
        return SpeculativeDecoder(self.pair, stopping=rule, warp=warp, engine=self.setup.engine, window=self.window, **choices)

    @cached_property
    def decoder(self) -> SpeculativeDecoder:
        """A decoder whose drafts are accepted at a given rate, warmed up."""
        verification = SyntheticVerification(ACCEPTANCE)
        made = self._decoder(FixedLength(max(LENGTHS)), WARPS["sampled"], verification=verification)
        made.warm_up()
        return made

    @property
    def prompt(self) -> list[int]:
        """A prompt that is as long as the steps' context."""
        return made_up_prompts(self.pair, 1, self.context)[0]

    @property
    def num_tokens(self) -> int:
        """The length of a timed response."""
        return 16 if self.setup.tiny else 256

    def rounds(self) -> dict[str, Any]:
        """Time whole rounds next to their forward passes alone."""
        rules = {f"fixed K={length}": FixedLength(length) for length in LENGTHS}
        rules["head"] = HeadThreshold(self.head, 1.0, 1, LENGTHS[0])
        rows = [self._rounds_of(name, rule) for name, rule in rules.items()]
        return {"acceptance": ACCEPTANCE, "rows": rows, "goals": {"round": rows[0]["over_forward_passes"]}}

    def _rounds_of(self, name: str, rule: HeadThreshold | FixedLength) -> dict[str, Any]:
        """Return the seconds of a rule's rounds: whole, over forward passes that run alone, and as the device saw them."""
        decoder = self.decoder.with_stopping(rule)
        decoder.warm_up()
        device, drafter, verifier = self.setup.device, decoder._drafter, decoder._verifier
        drafter._step = draft = Stopwatch(drafter._step, device)
        verifier._compiled_step = verify = Stopwatch(verifier._compiled_step, device)
        decoder.generate(self.prompt, self.num_tokens)
        for watch in (draft, verify):
            watch.take()
        out = decoder.generate(self.prompt, self.num_tokens, seed=1)
        stats, watched = DecodeStats.of(out.rounds), {"draft": draft.take(), "verify": verify.take()}
        step = self.seconds[DRAFT_WITH_HEAD if isinstance(rule, HeadThreshold) else DRAFT]
        alone = stats.num_draft_calls * step + stats.num_target_calls * self.seconds["verification of 8"]
        return {
            "rule": name,
            "round_seconds": stats.decode_seconds / stats.num_target_calls,
            "tokens_per_round": stats.block_efficiency,
            "over_forward_passes": stats.decode_seconds / alone,
            **{f"{stage}_seconds": taken / stats.num_target_calls for stage, taken in watched.items()},
            "not_a_forward_pass": 1 - sum(watched.values()) / stats.decode_seconds,
        }

    def timeline(self) -> dict[str, Any]:
        """Trace some rounds with the profiler."""
        decoder = self.decoder.with_stopping(FixedLength(LENGTHS[0]))
        decoder.warm_up()
        decoder.generate(self.prompt, self.num_tokens)
        return traced(decoder, self.prompt, 8 if self.setup.tiny else 16)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return the exit code."""
    random.seed(0)
    with torch.no_grad():
        return run_script("round", __doc__, lambda setup: Rounds(setup).parts(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
