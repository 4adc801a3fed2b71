"""What is a head worth inside vLLM? Tokens per second with some requests at once, next to vLLM alone and to fixed lengths.

    python benchmarks/vllm_heads.py --vllm-python .vllm/bin/python --model nano --head <folder> [--greedy-head <folder>]

Every way to draft is a process of its own; they are asked in turn and stand still meanwhile. Prompts of a level come at once, and
their responses have the same length. The heads' threshold is chosen on the train prompts, like the fixed length that is called
best; both are reported on dev prompts.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_workers.processes import Command, Workers
from benchmarks.peers import Setting, best_of_lines, saved
from benchmarks.results import Column, Table, Value, add_keep_option, prompt_record, text_of, write_result
from specheads import load_pair
from specheads.prompts.sources import NanoSource

PLAIN, FIXED, ON_VLLM = "vLLM alone", "draft model, K=", "head, on vLLM's draft model"
# By name whether the target decodes greedily, and how vLLM drafts.
MODES = {"greedy": (True, "greedy"), "sampled": (False, "greedy"), "sampled_drafts": (False, "probabilistic")}
LENGTHS, LONGEST = (1, 2, 4, 8), 12
MOST_REQUESTS = 1024
FEWEST = 8  # prompts of a level; fewer requests at once answer them one after the other


def ways(head: str, thresholds: Sequence[float], method: str = "greedy") -> list[Setting]:
    """Return vLLM alone, its draft model with every length, and the head on it; the options are how its process is started.

    K=0: vLLM has a draft model, which reads along, but its bound for this number of requests lets it draft nothing. `method`:
    whether drafts are the draft's most likely tokens (greedy) or sampled (probabilistic).
    """
    made = [Setting(PLAIN, "", "", {"drafted": 0})]
    made.append(Setting(f"{FIXED}0", "", "", {"drafted": 1, "bounds": [[1, MOST_REQUESTS, 0]]}))
    made += [Setting(f"{FIXED}{length}", "", "", {"method": method, "drafted": length}) for length in LENGTHS]
    chosen = {"drafted": LONGEST, "head": head, "method": method}
    return made + [Setting(ON_VLLM, f"threshold {value}", "", chosen | {"threshold": value}) for value in thresholds]


def seconds_of(workers: Workers, way: Setting, prompts: Sequence[list[int]], level: int, greedy: bool, length: int) -> float:
    """Return the seconds of answering prompts, `level` of them at once."""
    total = 0.0
    for start in range(0, len(prompts), level):
        part = prompts[start : start + level]
        request = {"do": "together", "greedy": greedy, "prompts": part, "length": length}
        total += workers.ask(way.name, request | {"seeds": list(range(start, start + len(part)))})["seconds"][0]
    return total


def speeds(
    workers: Workers, asked: Sequence[Setting], prompts: Sequence[list[int]], level: int, greedy: bool, length: int, repeats: int
) -> dict[str, float]:
    """Return the median tokens per second of every way, which are asked in turn."""
    count = max(level, FEWEST)
    taken: dict[str, list[float]] = {way.name: [] for way in asked}
    for repeat in range(repeats + 1):  # the first warms up
        for way in asked[:: 1 if repeat % 2 else -1]:
            seconds = seconds_of(workers, way, prompts[:count], level, greedy, length)
            if repeat:
                taken[way.name].append(count * length / seconds)
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="an embedded pair")
    parser.add_argument("--head", required=True, help="a folder that train.py exported")
    parser.add_argument("--greedy-head", help="the same for greedy decoding; default: --head")
    parser.add_argument("--vllm-python", default=".vllm/bin/python", help="an interpreter with vLLM")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 16, 64], help="requests at once")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), metavar="MODE")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every process")
    add_keep_option(parser, "vllm_heads")
    given = parser.parse_args()
    pair, most = load_pair(given.model), max(*given.levels, FEWEST)
    loaded = list(NanoSource(2 * most, 2 * most, 0).load(pair.chats))
    prompts = {split: [each for each in loaded if each.split == split][:most] for split in ("train", "dev")}
    encoded = {split: [pair.encode_instruction(each.text) for each in of_split] for split, of_split in prompts.items()}
    rows: list[list[Value]] = []
    with tempfile.TemporaryDirectory() as folder:
        dtype = str(pair.target.dtype).removeprefix("torch.")
        setup = {"dtype": dtype, "window": 512, "requests": max(given.levels), "threads": given.threads}
        setup |= saved(pair, Path(folder))
        for mode in given.modes:
            greedy, method = MODES[mode]
            head = str(Path((given.greedy_head if greedy else None) or given.head).resolve())
            tried = ways(head, given.thresholds, method)
            commands = {way.name: Command(given.vllm_python, "vllm_worker.py", {**setup, **way.options}) for way in tried}
            with Workers(commands) as workers:
                for level in given.levels:
                    how = (level, greedy, given.new_tokens)
                    of_train = speeds(workers, tried, encoded["train"], *how, 1)
                    chosen = best_of_lines(tried, of_train)
                    of_dev = speeds(workers, chosen, encoded["dev"], *how, given.repeats)
                    rows += rows_of(mode.replace("_", ", with "), level, chosen, of_dev)
                    print(text_of(Table("speed", "", COLUMNS, rows[-len(chosen) :])), flush=True)
                versions = workers.versions
    title = f"{given.model} in vLLM, tokens per second; medians of {given.repeats}"
    table = Table("speed", title, COLUMNS, rows)
    read = {split: prompt_record(each.prompt_id for each in of_split) for split, of_split in prompts.items()}
    notes = ", ".join(f"{name} {version}" for name, version in versions.items())
    write_result("vllm_heads", [table], split="dev", seeds=[0], prompts=read, notes=f"{notes}, eager.", keep=given.keep)


def rows_of(mode: str, level: int, chosen: Sequence[Setting], of_dev: Mapping[str, float]) -> list[list[Value]]:
    """Return the speeds of a level, over vLLM alone and over the fastest fixed length."""
    alone = next(of_dev[way.name] for way in chosen if way.line == PLAIN)
    fixed = max(of_dev[way.name] for way in chosen if way.line.startswith(FIXED))
    return [
        [mode, level, way.line, way.choice, of_dev[way.name], of_dev[way.name] / alone, of_dev[way.name] / fixed]
        for way in chosen
    ]


COLUMNS = [
    *(Column("decoding"), Column("requests at once", "fixed:0"), Column("drafts"), Column("chosen")),
    *(Column("tokens/s", "fixed:0"), Column("over vLLM alone", "ratio:2"), Column("over the best K", "ratio:2")),
]


if __name__ == "__main__":
    main()
