"""Does `specheads probe` predict what training and evaluation find?

    python benchmarks/probe_check.py --heads mini=outputs/.../next_token-d3-r1 nano=outputs/.../next_token-d3-r1

Every pair is probed on its dev prompts. Then its head, given or trained here, and the rules without one are evaluated on test
prompts: by replay at the costs that were measured then, and by decoding. `--random` adds two pairs of random weights: `random`,
whose draft has nothing to do with its target, and `random halves`, whose draft is the target's first half. What is in `--out`
already is not run again.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, text_of, write_result
from specheads.evaluation.probe.prediction import BLOCK, FIXED_NAME, HEAD, LOGISTIC
from specheads.revisions import resolve

RULES = {FIXED_NAME: "fixed_length", LOGISTIC: "logistic", BLOCK: BLOCK, "ceiling": "ceiling", "oracle": "oracle"}
HEAD_RULE = "head_threshold"
FEW = ["data.num_train=100", "generation.responses_per_prompt=1", "data.max_new_tokens=64"]  # of random pairs
RANDOM = {"random": False, "random halves": True}


def random_pair(folder: Path, first_half: bool) -> list[str]:
    """Write the folders of a pair of random weights; return the words of a command that name it."""
    torch.manual_seed(0)
    tokenizer = Path(resolve("embedded:nano"))
    sizes = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
    sizes |= {"tie_word_embeddings": True, "max_position_embeddings": 1024, "initializer_range": 0.3}
    target, draft = (LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers)) for layers in (8, 4))
    if first_half:
        draft.load_state_dict(target.state_dict(), strict=False)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, folder / name)
    return ["model=mine", f"model.draft={folder / 'draft'}", f"model.target={folder / 'target'}", "data=nano", "model.device=cpu"]


def run(*words: str) -> None:
    """Run a command of this project; its output goes on to standard error."""
    print(" ".join(words), file=sys.stderr, flush=True)
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=sys.stderr)


def trained(pair: Sequence[str], folder: Path) -> str:
    """Train a head; return its folder."""
    if not list(folder.glob("**/heads/*/config.json")):
        run("train.py", *pair, f"paths.run={folder}", f"paths.data={folder / 'data'}", *FEW)
    return str(next(folder.glob("**/heads/*/config.json")).parent)


def probed(pair: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what a probe of a pair predicts."""
    if not (folder / "probe.json").is_file():
        run("-m", "specheads", "probe", *pair, f"paths.run={folder}", f"paths.data={folder / 'data'}")
    return json.loads((folder / "probe.json").read_text())


def evaluated(pair: Sequence[str], head: str, folder: Path) -> dict[str, Any]:
    """Return the report of an evaluation of the rules that a probe predicts, some of them decoded."""
    words = ["stopping=[fixed_length,head_threshold,logistic]", "repeats=3", f"head={head}"]
    if not (folder / "report.json").is_file():
        run("evaluate.py", *pair, f"paths.run={folder}", f"paths.data={folder / 'data'}", *words)
    return json.loads((folder / "report.json").read_text())


def outcomes(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by rule the speed-up and the gain over the best fixed length that test prompts showed, and the decoded speed-up."""
    test = next(each for each in report["data_sets"] if each["role"] == "test")
    winners = {each["family"]: each for each in test["winners"] if each["ratio"] == "measured"}
    live: dict[str, Any] = {}
    for row in report["live"]:
        by_block, of_fixed = "block" in row["name"], row["name"].startswith("fixed")
        if not by_block or of_fixed:  # a threshold that was found by itself is a family of its own
            live.setdefault(BLOCK if by_block else row["family"].removesuffix(" auto"), row["speedup"])
    made = {name: {"speedup": each["speedup"], "gain": each["gain"], "live": live.get(name)} for name, each in winners.items()}
    return made | {BLOCK: {"speedup": None, "gain": None, "live": live.get(BLOCK)}}  # decoded, not replayed


def rows_of(pair: str, width: int, probe: Mapping[str, Any], report: Mapping[str, Any]) -> list[list[Value]]:
    """Return a row for each way to decode that was both predicted and found; the head has this width."""
    measured, rows = outcomes(report), []
    for option in probe["options"]:
        name = HEAD_RULE if option["name"] == f"{HEAD}{width}" else RULES.get(option["name"])
        if name not in measured:
            continue
        there = measured[name]
        gains = (None, None) if name == "fixed_length" else (less_one(option["gain"]), less_one(there["gain"]))
        rows.append([pair, option["name"], option["speedup"], there["speedup"], there["live"], *gains])
    return rows


def less_one(interval: Mapping[str, float] | None) -> dict[str, float] | None:
    return interval and {name: value - 1 for name, value in interval.items()}


COLUMNS = [
    *(Column("pair"), Column("way to decode"), Column("speed-up, predicted", "ratio"), Column("found", "ratio")),
    *(Column("decoded", "ratio"), Column("gain, predicted", "signed_percent"), Column("found ", "signed_percent")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", default=[], metavar="PAIR=FOLDER", help="embedded pairs with a head for each")
    parser.add_argument("--random", action="store_true", help="two pairs of random weights, too")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "probe_check")
    add_result_option(parser, "probe_check")
    given = parser.parse_args()
    pairs = {name: ([f"model={name}"], folder) for name, _, folder in (each.partition("=") for each in given.heads)}
    if given.random:
        for name, first_half in RANDOM.items():
            pairs[name] = (random_pair(given.out / name.replace(" ", "_"), first_half), "")
    rows: list[list[Value]] = []
    answers: list[list[Value]] = []
    for name, (words, head) in pairs.items():
        folder = given.out / name.replace(" ", "_")
        probe = probed(words, folder / "probe")
        head = head or trained(words, folder / "head")
        width = json.loads((Path(head) / "config.json").read_text())["width"]
        rows += rows_of(name, width, probe, evaluated(words, head, folder / "evaluate"))
        answers.append([name, probe["answer"]["text"], "; ".join(probe["doubts"])])
    tables = [
        Table("predictions", "Predicted on dev prompts, found on test prompts; 95 % intervals over prompts", COLUMNS, rows),
        Table("answers", "What the probe said", [Column("pair"), Column("answer"), Column("doubts")], answers),
    ]
    print("\n".join(map(text_of, tables)))
    write_result(given.result, tables, split="dev (probe), test (found)", seeds=[0])


if __name__ == "__main__":
    main()
