"""What rounds of vLLM take, by one short trial of a pair: costs for a probe's predictions.

Draft lengths take turns every few rounds, so that a slow moment slows all of them; a second process
has no draft.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from specheads.decoding.responses import ResponseLimits
from specheads.decoding.step_costs import RuleCosts
from specheads.decoding.step_times import TARGET, VERIFIED, StepTimes, step_costs
from specheads.errors import UserError
from specheads.evaluation.probe.prediction import HEAD, LiveCheck
from specheads.evaluation.sweep import Overheads
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead, save_head
from specheads.integrations.vllm_responses import lines_of
from specheads.pair.pair import Pair
from specheads.pair.revisions import resolve
from specheads.pair.sampling import Warp

SERVED = (0, 1, *VERIFIED)  # drafted tokens
Way = tuple[int | None, bool]  # drafted tokens, None without a draft, and whether a head watches
ALONE: Way = (None, False)


@dataclass(frozen=True)
class Server:
    """Where vLLM is: the interpreter that has it, and what gives the arguments of vllm.LLM for a
    pair and its requests.
    """

    python: str
    model_of: Callable[[Pair, list[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Trial:
    """Rounds of vLLM by the way to draft."""

    at_once: int  # requests, at most
    width: int  # of the head
    rounds: Mapping[
        Way, Mapping[str, Sequence[float]]
    ]  # their `seconds`, those `drafting`, all `tokens`, and the `requests`

    def _drafting(self, watched: bool) -> tuple[float, float]:
        """Return the seconds of a draft step and of what the first one takes more, for each
        request, by least squares.
        """
        medians = [self._median("drafting", (length, watched)) for length in SERVED[1:]]
        step, first = np.polyfit(SERVED[1:], medians, 1)
        return float(step), float(first)

    def _median(self, name: str, way: Way) -> float:
        return statistics.median(self.rounds[way][name]) / statistics.mean(
            self.rounds[way]["requests"]
        )

    def times(self, here: StepTimes) -> StepTimes:
        """Return the times of steps for each request.

        Where vLLM has no head, heads add what they add `here`.
        """
        step, first = self._drafting(False)
        rest = {
            n: self._median("seconds", (n, False)) - self._median("drafting", (n, False))
            for n in SERVED
        }
        # A round without drafted tokens has its draft read what is new, too.
        rest[0] += self._median("drafting", (0, False)) - first
        alone = self.rounds[ALONE]["seconds"]
        spread = {TARGET: statistics.mean(alone) / statistics.median(alone)}
        costs = step_costs(step, rest, spread, first)
        rules = {
            name: RuleCosts(each.step_seconds / self.at_once) for name, each in here.rules.items()
        }
        if (SERVED[1], True) in self.rounds:
            watched_step, watched_first = self._drafting(True)
            more = watched_step - step - rules[f"{HEAD}{self.width}"].step_seconds
            for name, each in rules.items():
                if name.startswith(HEAD):
                    rules[name] = RuleCosts(
                        max(0.0, each.step_seconds + more), max(0.0, watched_first - first)
                    )
        return StepTimes(replace(costs, at_once=self.at_once), rules)

    def check(self, length: int, times: StepTimes) -> LiveCheck:
        """Return what was decoded with the length that is the nearest to `length`, and what rounds
        take besides steps.
        """
        nearest = min(SERVED[1:], key=lambda each: abs(each - length))
        timed = self.rounds[ALONE], self.rounds[nearest, False]
        alone, speed = (sum(rounds["tokens"]) / sum(rounds["seconds"]) for rounds in timed)
        more = self._median("seconds", ALONE) - times.costs.target_seconds
        return LiveCheck(
            f"vLLM, {self.at_once} at once",
            nearest,
            alone,
            speed,
            Overheads(times.costs.round_seconds, more),
        )


def served_rounds(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    warp: Warp,
    limits: ResponseLimits,
    at_once: int,
    width: int,
    server: Server,
    folder: Path,
) -> Trial:
    """Time rounds of vLLM while it answers prompts (ids), `at_once` at a time.

    Raises UserError if it has several processes.

    On a CPU all is greedy: vLLM 0.32 cannot sample with a draft there. A head `width` wide watches
    if specheads is there, too.
    """
    greedy = warp.greedy or not torch.cuda.is_available()
    law = (
        {"temperature": 0.0}
        if greedy
        else {"temperature": warp.temperature, "top_k": warp.top_k, "top_p": warp.top_p}
    )
    most = min(limits.max_new_tokens, pair.window - max(map(len, prompts)) - max(SERVED))
    params = {**law, "stop_token_ids": sorted(pair.stop_tokens), "max_tokens": most}
    requests = [{"ids": list(ids), "params": params} for ids in prompts]
    drafts = {} if greedy else {"draft_sample_method": "probabilistic"}
    speculative = {
        "method": "draft_model",
        "model": resolve(pair.draft_id),
        "num_speculative_tokens": max(SERVED),
        **drafts,
    }
    model = {"max_num_seqs": at_once, **server.model_of(pair, requests)}
    model["max_model_len"] += max(SERVED)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if model.get(name, 1) != 1:
            raise UserError(
                "serving=vllm times rounds inside one process of vLLM, but vllm.options has"
                f" {name}={model[name]}; leave it out, and probe a pair that one device holds."
            )
    found = dict[Way, Mapping[str, Any]]()
    with TemporaryDirectory() as temporary:
        head = AcceptanceHead(
            HeadConfig(pair.draft_lm.hidden_size, width=width, vocab_size=pair.vocab_size)
        )
        save_head(head.eval().requires_grad_(False), Path(temporary) / "head")
        # It never ends a draft, so that there are as many steps as without it.
        given = {
            "head": str(Path(temporary) / "head"),
            "any_draft": True,
            "threshold": 1.0,
            "max_tokens": max(SERVED),
        }
        drafting = {
            "speculative_config": speculative,
            "additional_config": {"specheads": given},
            "async_scheduling": False,
        }
        ways = [
            (length, watched)
            for length in SERVED
            for watched in (False, True)
            if length or not watched
        ]
        for tried, more in ((ways, drafting), ([ALONE], {})):
            content = {
                "model": model | more,
                "requests": requests,
                "ways": tried,
                "at_once": at_once,
            }
            with closing(lines_of(server.python, content, folder / "vllm.log")) as lines:
                for line in lines:
                    found[tuple(line["way"])] = line
                    if line["last"]:
                        break
    return Trial(at_once, width, found)
