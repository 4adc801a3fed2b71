"""Does an evaluation recommend the same on other prompts? Whole evaluations, each on other random
dev and test prompts of the pair, and with another seed.

    specheads train warp.temperature=0.5 heads=lookahead
    python -m benchmarks.recommendations [--sets 10] warp.temperature=0.5 WORDS...

WORDS are those of `specheads evaluate`. Each set is a random part of the dev prompts and of the
test prompts; final prompts are not read.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from specheads.commands.command import register_resolver
from specheads.commands.compose import command_config, load_configured_pair
from specheads.commands.evaluate import evaluation_settings, prompt_data
from specheads.evaluation.conclusions import change, times
from specheads.evaluation.evaluate import evaluate
from specheads.evaluation.keys import Kind
from specheads.evaluation.presentation import write_report
from specheads.evaluation.report import Report
from specheads.heads.head import find_heads
from specheads.prompts.prompt import Prompt
from specheads.prompts.sources import PromptSource

MOST = {"num_dev": 1000, "num_test": 300}  # of nano's prompts, without final ones


@dataclass(frozen=True)
class Shuffled:
    """The prompts of a source in another random order for each seed."""

    source: PromptSource
    seed: int

    def load(self, chats: bool, responses: bool = False) -> Iterator[Prompt]:
        """Yield all prompts of the source."""
        prompts = list(self.source.load(chats, responses))
        random.Random(self.seed).shuffle(prompts)
        yield from prompts

    def check_final(self) -> None:
        self.source.check_final()

    def provenance(self) -> dict[str, str]:
        """Return what decides the prompts together with the keys of data."""
        return {**self.source.provenance(), "order": str(self.seed)}


def line_of(report: Report) -> str:
    """Return a report's recommendation in a line, with the best of each kind."""
    answer = report.answer
    assert answer is not None and report.ratio is not None
    found = [f"{answer.kind}: {answer.setting} (ratio {report.ratio.value:.1f})"]
    if answer.is_tie:
        found.append(f"a tie with the {answer.comparison.fastest}")
    for kind, choice in answer.comparison.choices.items():
        if kind != Kind.ALONE:
            gain = f", {change(choice.gain)}" if choice.gain is not None else ""
            found.append(f"{kind} {choice.name} {times(choice.speedup)}{gain}")
    decoded = [f"{row.name} {times(row.speedup)}" for row in report.live]
    doubts = [*answer.disagreements, *answer.doubts] or ["none"]
    return "; ".join([*found, f"decoded {', '.join(decoded)}", f"doubts: {' '.join(doubts)}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=10, help="the number of evaluations")
    parser.add_argument("words", nargs="*", help="words of `specheads evaluate`")
    arguments = parser.parse_args()
    register_resolver()
    cfg = command_config("evaluate", arguments.words)
    pair = load_configured_pair(cfg)
    data = prompt_data(cfg)
    source = replace(data.source, **MOST)
    settings = evaluation_settings(cfg).for_pair(pair)
    used: Counter[str] = Counter()
    for number in range(1, arguments.sets + 1):
        others = replace(data, source=Shuffled(source, number))
        folder = Path("outputs/recommendations") / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        heads = find_heads(
            settings.head, pair, Path(cfg.paths.outputs), settings.warp, settings.any_draft
        )
        report = evaluate(
            pair, heads, settings.but(seed=number), others, (Path(cfg.paths.data), folder)
        )
        write_report(report, folder)
        assert report.answer is not None
        used[str(report.answer.kind)] += 1
        print(f"{number}: {line_of(report)}", flush=True)
    print(f"recommended: {dict(used)}")


if __name__ == "__main__":
    main()
