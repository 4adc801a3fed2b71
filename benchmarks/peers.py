"""How fast is decoding next to the peers: transformers, llama.cpp and vLLM, on the same weights?

    python benchmarks/peers.py [--model nano] [--dtype float32] [--head outputs/head/<date_time>/heads/<name>]
        [--llama-python PYTHON] [--llama-bin FOLDER] [--vllm-python PYTHON] [--prompts 8] [--repeats 5]

Everything runs on the CPU, each peer in a process of its own, with the same number of threads. One process runs at a time, all
others stand still; in each repeat all settings decode the same prompts in turn. Before its turn counts, a setting decodes the
first prompt once. Where a peer has several settings (drafted tokens per round, a threshold), the fastest on other prompts is
reported. Responses have the same number of tokens everywhere: no token ends them. Seconds are those of whole calls.

A peer that is not installed is left out, with a line that says how to get it.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_processes import Workers
from benchmarks.peer_settings import SAMPLED, Peers, Setting, all_peers, pair_keys
from benchmarks.results import Column, Table, add_keep_option, prompt_record, text_of, write_result
from specheads import load_pair
from specheads.pair import Pair
from specheads.prompts.nano_source import NanoSource
from specheads.prompts.prompt import Prompt

PLAIN, ALONE = "transformers, plain", "this decoder, alone"
ROWS = (1, 2, 3, 5, 9)


@dataclass
class Measured:
    """What a setting made in each repeat, and its responses of the first."""

    speeds: list[float]
    responses: list[list[int]]

    @property
    def speed(self) -> float:
        """Tokens per second, the median over repeats."""
        return statistics.median(self.speeds)


def measure(
    workers: Workers, settings: Sequence[Setting], greedy: bool, prompts: Sequence[list[int]], length: int, repeats: int
) -> dict[str, Measured]:
    """Return what every setting made of the prompts, repeat by repeat in turn."""
    measured = {setting.name: Measured([], []) for setting in settings}
    for repeat in range(repeats):
        first = repeat % len(settings)
        for setting in (*settings[first:], *settings[:first]):
            seeds = [0, *(1000 * repeat + number for number in range(len(prompts)))]
            request = {"do": "generate", "options": setting.options, "greedy": greedy, "length": length}
            answer = workers.ask(setting.worker, request | {"prompts": [prompts[0], *prompts], "seeds": seeds})
            responses, seconds = answer["responses"][1:], answer["seconds"][1:]
            if wrong := [len(response) for response in responses if len(response) != length]:
                raise ValueError(f"{setting.name} made {wrong[0]} tokens, not {length}")
            measured[setting.name].speeds.append(length * len(prompts) / sum(seconds))
            measured[setting.name].responses = measured[setting.name].responses or responses
    return measured


def fastest(workers: Workers, settings: Sequence[Setting], **how: object) -> list[Setting]:
    """Return the fastest setting of each line."""
    lines: dict[str, list[Setting]] = {}
    for setting in settings:
        lines.setdefault(setting.line, []).append(setting)
    several = [setting for line in lines.values() if len(line) > 1 for setting in line]
    measured = measure(workers, several, **how) if several else {}
    for name, made in measured.items():
        print(f"    tuning: {name}: {made.speed:,.0f} tokens/s", file=sys.stderr, flush=True)
    return [max(line, key=lambda setting: measured[setting.name].speed) if len(line) > 1 else line[0] for line in lines.values()]


def speed_table(measured: dict[str, Measured], greedy: bool) -> Table:
    """Return how fast each setting is, and in greedy decoding how many of its responses are those of the target alone."""
    plain, alone = (measured[name].speed if name in measured else None for name in (PLAIN, ALONE))
    rows = []
    for name, made in measured.items():
        ratios = [made.speed / basis if basis else None for basis in (plain, alone)]
        row = [name, made.speed, min(made.speeds), max(made.speeds), *ratios]
        rows.append([*row, same_tokens(made, measured[ALONE])] if greedy else row)
    columns = [Column("setting"), *(Column(name, "fixed:0") for name in ("tokens/s", "slowest", "fastest"))]
    columns += [Column("over transformers", "ratio"), Column("over this decoder alone", "ratio")]
    if greedy:
        return Table("greedy", "Greedy", [*columns, Column("tokens as alone", "percent:1")], rows)
    return Table("sampled", f"Sampled at temperature {SAMPLED.temperature:g}, top-k {SAMPLED.top_k}", columns, rows)


def same_tokens(made: Measured, alone: Measured) -> float:
    """Return the share of tokens before the first that differs: float sums in another order may swap two near equals."""
    counted = shared = 0
    for ours, theirs in zip(alone.responses, made.responses, strict=True):
        counted += len(ours)
        shared += next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    return shared / counted


def forward_table(workers: Workers, names: Sequence[str], prompts: Sequence[list[int]], length: int, repeats: int) -> Table:
    """Time one forward pass over several tokens."""
    taken: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in names for rows in ROWS}
    for repeat in range(repeats + 1):  # the first warms up
        for rows in ROWS:
            for name in names[:: 1 if repeat % 2 else -1]:
                request = {"do": "forward", "rows": rows, "prompt": prompts[repeat % len(prompts)], "length": length}
                seconds = workers.ask(name, request)["seconds"]
                if repeat and seconds:
                    taken[name, rows].append(statistics.median(seconds))
    medians = {key: statistics.median(values) for key, values in taken.items()}
    table = []
    for rows in ROWS:
        row = [rows]
        for name in names:
            row += [medians[name, rows], medians[name, rows] / medians[name, 1]]
        table.append([*row, medians[names[0], rows] / medians[names[1], rows]] if len(names) > 1 else row)
    columns = [Column("tokens")]
    for name in names:
        name = {"specheads": "this decoder"}.get(name, name)
        columns += [Column(name, "ms:3"), Column(f"{name}, over one token", "ratio")]
    columns += [Column("this decoder over llama.cpp", "ratio")] if len(names) > 1 else []
    title = "One forward pass of the target with the logits of all its tokens; this decoder's with its verification, greedy"
    return Table("forward", title, columns, table)


def prompts_of(pair: Pair, arguments: argparse.Namespace) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts that are reported and as many others for tuning."""
    counts = {"num_train": 0, "num_dev": 0, "num_test": 0} | {f"num_{arguments.split}": 2 * arguments.prompts}
    loaded = list(NanoSource(**counts).load(pair.chats))
    return loaded[: arguments.prompts], loaded[arguments.prompts :]


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="a file of conf/model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: that of the model's config")
    parser.add_argument("--head", help="a folder that train.py exported")
    parser.add_argument("--engine", default="auto", help="of this decoder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every process")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter with llama-cpp-python")
    parser.add_argument("--llama-bin", help="the folder of llama-server; default: that of PATH")
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument(
        "--vllm-eager", action="store_true", help="vLLM does not compile its models: starts sooner, decodes slower"
    )
    parser.add_argument("--folder", help="where the files that peers read are written and kept")
    parser.add_argument("--window", type=int, default=1024, help="positions that peers have memory for")
    parser.add_argument("--split", choices=("train", "dev"), default="train", help="of the prompts")
    parser.add_argument("--prompts", type=int, default=8, help="that are reported; as many others choose the settings")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tuning-repeats", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=("greedy", "sampled"), default=("greedy", "sampled"))
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="lines that contain one of these, and those of ratios")
    add_keep_option(parser, "peers")
    return parser.parse_args()


def compare(peers: Peers, pair: Pair, arguments: argparse.Namespace) -> tuple[list[Table], dict, list[str]]:
    """Return the tables, the records of prompts, and the versions of the peers with their warnings."""
    reported, tuning = prompts_of(pair, arguments)
    encoded, others = ([pair.encode_instruction(prompt.text) for prompt in part] for part in (reported, tuning))
    settings = [setting for setting in peers.settings if is_asked(setting, arguments.only)]
    length, tables = arguments.new_tokens, []
    with Workers(peers.commands) as workers:
        for greedy in [mode == "greedy" for mode in arguments.modes]:
            possible = [setting for setting in settings if not (greedy and setting.sampled_only)]
            how = {"greedy": greedy, "length": length}
            chosen = fastest(workers, possible, prompts=others, repeats=arguments.tuning_repeats, **how)
            workers.keep([setting.worker for setting in chosen])
            measured = measure(workers, chosen, prompts=encoded, repeats=arguments.repeats, **how)
            keep(tables, speed_table(measured, greedy))
        names = [name for name in ("specheads", "llama.cpp") if name in {setting.worker for setting in settings}]
        keep(tables, forward_table(workers, names, encoded, length, arguments.repeats))
    records = {
        name: prompt_record(each.prompt_id for each in part) for name, part in (("reported", reported), ("tuning", tuning))
    }
    versions = ", ".join(f"{name} {version}" for name, version in workers.versions.items())
    return tables, records, [f"{versions}.", *sorted({f"{line}." for line in workers.warnings})]


def is_asked(setting: Setting, only: Sequence[str] | None) -> bool:
    """Return whether a setting takes part."""
    return only is None or setting.line in (PLAIN, ALONE) or any(text in setting.line for text in only)


def keep(tables: list[Table], table: Table) -> None:
    """Print a table and put it to the others."""
    print(f"\n{table.title}\n\n{text_of(table)}", flush=True)
    tables.append(table)


def main() -> None:
    arguments = parsed_arguments()
    torch.set_num_threads(arguments.threads)
    pair = load_pair(arguments.model, **pair_keys(arguments))
    with tempfile.TemporaryDirectory() as folder:
        peers = all_peers(pair, arguments, Path(arguments.folder or folder))
        for line in peers.left_out:
            print(line, file=sys.stderr)
        tables, records, remarks = compare(peers, pair, arguments)
    dtype = str(pair.target.dtype).removeprefix("torch.")
    notes = [f"{pair.name} in {dtype}, {arguments.new_tokens} tokens, medians of {arguments.repeats} repeats."]
    notes += [*remarks, *peers.left_out]
    seeds = [1000 * repeat for repeat in range(arguments.repeats)]
    write_result("peers", tables, split=arguments.split, seeds=seeds, prompts=records, notes=notes, keep=arguments.keep)


if __name__ == "__main__":
    main()
