"""Kill every command that writes at random moments, start it again, and compare what it wrote with
an undisturbed run.

    python -m tests.kills [--kills 4] [--commands train evaluate] [--signal KILL] [--folder F]

Each trial runs one command in a folder of its own, sends it the signal at a moment drawn uniformly
from its work, and runs the same command again. Two undisturbed runs are compared first: what
differs between them depends on time and is left out. All other values of all files must be the
same: lines of texts, values of JSON, the bytes of everything else. Dates and seconds are replaced
by signs; checkpoints, locks, logs and copies that can be made again are left out. The exit code is
1 where anything differed.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAIR = ["model=nano", "data=nano", "data.max_new_tokens=16"]
PAIR += ["data.num_train=32", "data.num_dev=8", "data.num_test=8"]
SHARDS = ["generation.batch_size=8", "generation.rows_per_shard=8"]
REPLAYED = ["num_prompts=8", "num_dev_prompts=8", "fixed_lengths=[1,2,4]", "live=none"]
REPLAYED += ["stopping=[fixed_length,head_threshold]", "thresholds=[0.3,0.6]"]
TRAINED = ["checkpoint.every_steps=3", "trainer.log_every_n_steps=1", "loader.batch_size=8"]
DISTILLED = ["trainer.max_epochs=2", "validation.num_prompts=4"]
CUT = ["model.draft=null", "init_layers=1", "draft_vocabulary=200", "embedding=target"]
CALIBRATED = ["trainer.max_epochs=1", "data.num_dev=48", "data.max_new_tokens=32"]
CALIBRATED += ["calibration=48", "heads=lookahead"]
DECODED = ["verification=block", "fixed_lengths=[1,2,4]", "thresholds=[0.5]", "num_live_prompts=6"]
DECODED += ["timing_seconds=2"]
PROBED = ["num_prompts=8", "generation.batch_size=4"]
WRITTEN = ("data", "outputs")


@dataclass(frozen=True)
class Trial:
    """A command line, the folders that it needs from a run of `train`, and which values depend on
    measured times.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    timed: re.Pattern = re.compile("^$")


TRIALS = {
    "data": Trial(("data", *PAIR, *SHARDS)),
    "train": Trial(
        ("train", *PAIR, *SHARDS, *TRAINED, "trainer.max_epochs=4", "calibration=8"), ("data",)
    ),
    "calibration": Trial(("train", *PAIR, *SHARDS, *TRAINED, *CALIBRATED)),
    "train, reading": Trial(
        ("train", *PAIR, "model.draft=draft", *SHARDS, *TRAINED, "calibration=8"), ("draft",)
    ),
    "distill": Trial(("distill", *PAIR, *SHARDS, *TRAINED, *DISTILLED), ("data",)),
    "distill, cut": Trial(("distill", *PAIR, *SHARDS, *TRAINED, *DISTILLED, *CUT), ("data",)),
    "distill, reading": Trial(
        ("distill", *PAIR, *SHARDS, *TRAINED, *DISTILLED, "draft_kind=eagle3"), ("data",)
    ),
    "evaluate": Trial(("evaluate", *PAIR, *SHARDS, *REPLAYED), WRITTEN),
    "evaluate, decoded": Trial(
        ("evaluate", *PAIR, *SHARDS, *DECODED),
        WRITTEN,
        timed=re.compile(
            r"report\.html |report\.json 0\.answer\.|generations\.jsonl"
            r" \S+\.rounds\.\d+\.\d+\.[34]"
        ),
    ),
    "probe": Trial(
        ("probe", *PAIR, *PROBED),
        timed=re.compile(
            r"probe\.json 0\.(answer|options|live|doubts)|overheads\.jsonl \S+\.(rounds|load)\."
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kills", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=4, help="trials of each command")
    parser.add_argument("--commands", nargs="*", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--signal", choices=["KILL", "TERM", "INT"], default="KILL")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the moments at which commands are killed"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs/kills"))
    given = parser.parse_args()
    folder = given.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    undisturbed(Trial(TRIALS["train"].words), folder / "prepared", folder / "prepared")
    write_draft(folder / "prepared" / "draft")
    return min(1, sum(differs(command, folder, given) for command in given.commands))


def write_draft(folder: Path) -> None:
    """Write a random draft of the pair that reads its target."""
    from specheads.pair.eagle_formats import write_speculators
    from specheads.pair.initial_draft import NewFeatureDraft
    from specheads.pair.pair import load_pair

    pair = load_pair("nano", new_draft=NewFeatureDraft("eagle3"))
    write_speculators(pair.draft, folder, pair.target_id, ["LlamaForCausalLM"], 3)


def differs(command: str, folder: Path, given: argparse.Namespace) -> bool:
    """Run the trials of one command, print what they found, and return whether a value differed."""
    trial = TRIALS[command]
    prepared = folder / "prepared"
    place = folder / command.replace(", ", "_")
    seconds = min(undisturbed(trial, place / name, prepared) for name in ("whole", "again"))
    whole = values_of(place / "whole")
    again = values_of(place / "again")
    compared = {
        name for name in whole if whole[name] == again.get(name) and not trial.timed.search(name)
    }
    print(
        f"{command:<18}{seconds:>10.1f} s, {len(compared)} of {len(whole)} values do not depend on"
        " time",
        flush=True,
    )
    generator = random.Random(f"{given.seed} {command}")
    found = False
    for number in range(given.kills):
        code = 0
        while code == 0:  # it ended before the signal, so the trial is repeated with another moment
            shutil.rmtree(place / str(number), ignore_errors=True)
            moment = generator.uniform(0, seconds)
            code = killed(
                trial, place / str(number), prepared, moment, getattr(signal, f"SIG{given.signal}")
            )
        undisturbed(trial, place / str(number), prepared)
        differing = differences(values_of(place / str(number)), whole, compared)
        found |= bool(differing)
        print(
            f"{command:<18}{number:>6}{moment:>10.1f} s  exit code {code}, {len(differing)}"
            " differences",
            flush=True,
        )
        print("".join(f"    {name}\n" for name in differing[:5]), end="", flush=True)
    return found


@contextlib.contextmanager
def started(trial: Trial, folder: Path, prepared: Path) -> Iterator[subprocess.Popen]:
    """Start a command in `folder`, with a copy of what it needs; it does not survive the block.

    The block begins when the command has written a file: a kill during the imports before that
    would test nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part in trial.needs:
        if not (folder / part).exists():
            shutil.copytree(prepared / part, folder / part)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"WANDB_MODE": "disabled", "SPECHEADS_ENGINE": "eager", "HF_HUB_OFFLINE": "1"}
    before = files_of(folder)
    with (folder / "said.log").open("a") as said:
        words = [sys.executable, "-m", "specheads", *trial.words]
        process = subprocess.Popen(
            words, cwd=folder, env=environment, start_new_session=True, stdout=said, stderr=said
        )
    try:
        while process.poll() is None and files_of(folder) <= before:
            time.sleep(0.02)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def files_of(folder: Path) -> set[Path]:
    """Return what a command has written so far."""
    return {path for part in WRITTEN for path in (folder / part).rglob("*")}


def undisturbed(trial: Trial, folder: Path, prepared: Path) -> float:
    """Run a command to its end and return the seconds that its work took."""
    with started(trial, folder, prepared) as process:
        begin = time.perf_counter()
        code = process.wait()
    if code != 0:
        raise SystemExit(
            f"specheads {' '.join(trial.words)} failed in"
            f" {folder}:\n{(folder / 'said.log').read_text()[-3000:]}"
        )
    return time.perf_counter() - begin


def killed(trial: Trial, folder: Path, prepared: Path, moment: float, number: int) -> int:
    """Start a command, send the signal `moment` seconds after its work began, and return its exit
    code.
    """
    with started(trial, folder, prepared) as process:
        time.sleep(moment)
        if process.poll() is None:
            os.killpg(process.pid, number)
        return process.wait()


# --- what a command wrote

DATE = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(-\d+)?")
LEFT_OUT = re.compile(r"\.lock$|\.log$|\.ckpt$|/run\.json$|/\.arrow/|/\.hydra/|/wandb/")
# In texts; those of a load are lines.
SECONDS = re.compile(r"\d+(\.\d+)? s\b|(?<=^  start: )[\d.]+|(?<=^  end: )[\d.]+")
TEXTS = (".csv", ".yaml", ".md", ".txt", ".html")


def values_of(folder: Path) -> dict[str, Any]:
    """Return all values that a command wrote by their names: the file, and the place in it."""
    files = sorted(
        path for path in files_of(folder) if path.is_file() and not LEFT_OUT.search(str(path))
    )
    dates = {match[0] for path in files for match in DATE.finditer(str(path))}
    runs = {date: f"<run {number}>" for number, date in enumerate(sorted(dates))}

    def plain(text: str) -> str:
        text = DATE.sub(lambda match: runs.get(match[0], "<a date>"), text)
        return SECONDS.sub("<time>", text.replace(str(folder), "."))

    return {
        plain(f"{path.relative_to(folder)} {place}"): plain(value)
        for path in files
        for place, value in values_in(path)
    }


def values_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the places in a file with their values."""
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        for number, line in enumerate(lines):
            yield from flat(json.loads(line), str(number))
    elif path.suffix in TEXTS:
        for number, line in enumerate(content.decode().splitlines()):
            yield str(number), line
    else:
        yield "", hashlib.sha256(content).hexdigest()


def flat(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield the places in nested JSON with their values."""
    if isinstance(value, dict | list) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(each, f"{place}.{key}")
    elif isinstance(value, float) and (place.endswith("seconds") or ".load." in place):
        yield place, "<time>"
    else:
        yield place, value if isinstance(value, str) else repr(value)


def differences(values: dict[str, Any], whole: dict[str, Any], compared: set[str]) -> list[str]:
    """Return which of the compared values of an undisturbed run another has not, and files that it
    should not have.
    """
    files = {name.partition(" ")[0] for name in whole}
    extra = {file for name in values if (file := name.partition(" ")[0]) not in files}
    differing = [name for name in compared if values.get(name) != whole[name]]
    return sorted(differing + [f"{file} should not be there" for file in extra])


if __name__ == "__main__":
    raise SystemExit(main())
