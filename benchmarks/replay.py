"""Does replay say what decoding does, and how long does it take? Both on the same prompts, in one run.

    python benchmarks/replay.py --head outputs/head/<date_time>/heads/next_token-d3-r1 [--prompts 100] [--repeats 4]

Agreement: target calls and discarded tokens per emitted token of five rules, decoded live (each prompt `--repeats` times) and replayed;
the difference in standard errors over prompts, each prompt's difference being one sample. Time: recording, judging by 20 untrained heads
and replaying them at 9 thresholds beside every other rule, against one live pass over the same prompts.
"""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))

from data_gen.run import GenerationSettings
from specheads import AcceptanceHead, HeadConfig, Pair, SpeculativeDecoder, Warp, load_head, load_pair, stopping
from specheads.evaluation.candidates import Tuning, candidates, longest_draft
from specheads.evaluation.find import prompts_of
from specheads.evaluation.offline import Recorded
from specheads.pair import config_folder
from specheads.replay.cost import Costs
from specheads.replay.judge import head_fingerprint, judge
from specheads.replay.record import RecordSettings
from specheads.replay.recording import TRUTH, load_recording, make_recording
from specheads.replay.replay import recorded_head, replay


def five_rules(head: AcceptanceHead) -> dict[str, list[stopping.StoppingRule]]:
    """Return rules by name, as they decode and as they are replayed."""
    both = {
        "fixed K=4": [stopping.FixedLength(4)] * 2,
        "head 0.6": [stopping.HeadThreshold(one, 0.6) for one in (head, recorded_head(head))],
        "max probability 0.4": [stopping.MaxProbability(0.4, 20)] * 2,
        "online logistic 0.7": [stopping.OnlineLogistic(threshold=0.7)] * 2,
        "heuristic": [stopping.Heuristic()] * 2,
    }
    return both


def live_counts(
    pair: Pair, rule: stopping.StoppingRule, warp: Warp, prompts, repeats: int, limit: int, engine: str
) -> np.ndarray:
    """Return tokens, target calls and discards of each prompt (P, 3), sums over repeats."""
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=warp, engine=engine)
    stats = [
        [decoder.generate(ids, limit, seed=1000 * repeat + n).stats for repeat in range(repeats)]
        for n, (_, ids) in enumerate(prompts)
    ]
    names = ("num_tokens", "num_target_calls", "num_discarded")
    return np.array([[sum(getattr(part, name) for part in row) for name in names] for row in stats], dtype=float)


def agreement(live: np.ndarray, replayed: np.ndarray) -> list[tuple[float, float, float]]:
    """Return (live rate, replayed rate, difference in standard errors) of calls and of discards per token."""
    rows = []
    for column in (1, 2):
        rates = [counts[:, column].sum() / counts[:, 0].sum() for counts in (live, replayed)]
        # The error of a ratio of sums, over prompts.
        errors = [(c[:, column] - rate * c[:, 0]) / c[:, 0].mean() for c, rate in zip((live, replayed), rates, strict=True)]
        spread = (errors[0] - errors[1]).std(ddof=1) / len(live) ** 0.5
        rows.append((*rates, (rates[0] - rates[1]) / spread if spread else 0.0))
    return rows


def compare(
    pair: Pair, prompts, warp: Warp, head: AcceptanceHead, arguments: argparse.Namespace, limit: int, folder: Path
) -> None:
    print(f"\n{'greedy' if warp.greedy else 'sampled'}: {len(prompts)} prompts, decoded {arguments.repeats} times each")
    print(f"{'rule':<22}{'calls live':>12}{'replayed':>10}{'z':>7}{'discards live':>16}{'replayed':>10}{'z':>7}")
    settings = RecordSettings(8, 20, 64)
    path = make_recording(pair, prompts, warp, GenerationSettings(limit), settings, 0, folder)
    judge(path, pair, {head_fingerprint(head): head}, truth=False)
    recording = load_recording(path, [head_fingerprint(head)])
    repeats = 1 if warp.greedy else arguments.repeats
    for name, (live, recorded) in five_rules(head).items():
        counts = replay(recording, [recorded])[0].per_prompt(len(prompts))
        replayed = np.stack([counts.tokens, counts.target_calls, counts.discarded], axis=1)
        calls, discards = agreement(live_counts(pair, live, warp, prompts, repeats, limit, arguments.engine), replayed)
        print(
            f"{name:<22}{calls[0]:12.4f}{calls[1]:10.4f}{calls[2]:7.2f}{discards[0]:16.4f}{discards[1]:10.4f}{discards[2]:7.2f}",
            flush=True,
        )


def times(pair: Pair, prompts, warp: Warp, rules: dict, arguments: argparse.Namespace, limit: int, folder: Path) -> None:
    """Print how long every step took, and their sum over one live pass."""
    size, heads = pair.draft_lm.hidden_size, {}
    for number in range(20):
        torch.manual_seed(number)
        heads[f"untrained {number}"] = AcceptanceHead(HeadConfig(size, number % 5)).eval().requires_grad_(False)
    rules["head_threshold"]["threshold"] = [t / 10 for t in range(1, 10)]
    rules.pop("expected_throughput")
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(4), warp=warp, engine=arguments.engine)
    decoder.warm_up()
    marks = [time.perf_counter()]
    for number, (_, ids) in enumerate(prompts):
        decoder.generate(ids, limit, seed=number)
    marks.append(time.perf_counter())
    settings = RecordSettings(arguments.draws, longest_draft(rules), 64)
    path = make_recording(pair, prompts, warp, GenerationSettings(limit), settings, 1, folder)
    marks.append(time.perf_counter())
    judges = {head_fingerprint(head): head for head in heads.values()}
    judge(path, pair, judges, truth=False)
    marks.append(time.perf_counter())
    judge(path, pair, {}, truth=True)
    marks.append(time.perf_counter())
    recording = load_recording(path, [*judges, TRUTH])
    found = candidates(rules, heads, Tuning(recording, {"10": Costs.at_ratio(10)}))
    Recorded.of("test", "test", recording, found, lambda count: None)
    marks.append(time.perf_counter())
    live, *steps = np.diff(marks)
    names = ("record", "judge by 20 heads", "judge by the target", f"replay {len(found)} rules")
    print(f"\none live pass over {len(prompts)} prompts (fixed K=4): {live:.1f} s; {settings.num_draws} draws per response")
    for name, seconds in zip(names, steps, strict=True):
        print(f"{name:<24}{seconds:7.1f} s {seconds / live:6.2f} live passes")
    print(f"{'in all':<24}{sum(steps):7.1f} s {sum(steps) / live:6.2f} live passes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", required=True)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--draws", type=int, default=1, help="acceptance draws per response, where time is taken")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--only", choices=("agreement", "time"), default=None)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("evaluate", overrides=[f"model={arguments.model}", "paths.run=."])
    pair, head, sampled = load_pair(arguments.model), load_head(arguments.head), Warp(**cfg.warp)
    prompts, limit = prompts_of(cfg, pair, "test", arguments.prompts), cfg.max_new_tokens
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.only != "time":
            for warp in (sampled, Warp(0)):
                compare(pair, prompts, warp, head, arguments, limit, folder)
        if arguments.only != "agreement":
            times(pair, prompts, sampled, OmegaConf.to_container(cfg.stopping, resolve=True), arguments, limit, folder)


if __name__ == "__main__":
    main()
