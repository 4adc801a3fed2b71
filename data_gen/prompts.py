"""Where prompts come from: nano's held-out functions, or any data set that `datasets` loads, through a template."""

import hashlib
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specheads.errors import UserError
from specheads.nano import corpus

SPLITS = ("train", "dev", "test")
DEV_FILES = 0.12  # share of the held-out "dev" files whose prompts are the head's dev set


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text` goes through the pair's chat template where it has one; `prompt_id` is stable across runs."""

    prompt_id: str
    split: str
    text: str


@dataclass(frozen=True)
class NanoSource:
    """`data=nano`: functions of this machine's standard library that the embedded pair was not trained on.

    Its dev files give the head's train and dev prompts, its test files the test prompts; always split by file.
    """

    num_train: int
    num_dev: int
    num_test: int

    def load(self) -> Iterator[Prompt]:
        """Yield up to the wanted number of prompts per split, in an order that looks random but is fixed."""
        wanted = {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}
        found: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
        for side in ("dev", "test"):
            for function in corpus.standard_library(side):
                split = "test" if side == "test" else "dev" if _share(function.source) < DEV_FILES else "train"
                found[split].append(Prompt(_id(function.prompt), split, function.prompt))
        for split in SPLITS:
            distinct = {prompt.prompt_id: prompt for prompt in found[split]}
            yield from sorted(distinct.values(), key=lambda prompt: prompt.prompt_id)[: wanted[split]]


@dataclass(frozen=True)
class DatasetSource:
    """`data=alpaca` and the like: rows of a hub data set or a local file, formatted by a template such as "{instruction}".

    The first `num_train` rows are the train prompts, the next the dev prompts, the next the test prompts.
    """

    path: str
    template: str
    split: str
    num_train: int
    num_dev: int
    num_test: int

    def load(self) -> Iterator[Prompt]:
        """Yield prompts; raises UserError for a data set that cannot be loaded and for fields that it lacks."""
        rows = self._rows()
        fields = [name for _, name, _, _ in string.Formatter().parse(self.template) if name]
        for name in fields:
            if name not in rows.column_names:
                raise UserError(f"data.template names the field {name!r}, but {self.path} has {', '.join(rows.column_names)}.")
        start = 0
        for split, count in zip(SPLITS, (self.num_train, self.num_dev, self.num_test), strict=True):
            for index in range(min(start, len(rows)), min(start + count, len(rows))):
                row = rows[index]
                text = self.template.format(**{name: row[name] for name in fields}).strip()
                if text:
                    yield Prompt(_id(text), split, text)
            start += count

    def _rows(self):
        import datasets  # slow to import, and nano does without

        path = Path(self.path)
        kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
        try:
            if path.suffix in kinds and path.exists():
                return datasets.load_dataset(kinds[path.suffix], data_files=str(path), split="train")
            return datasets.load_dataset(self.path, split=self.split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise UserError(
                f"data.path={self.path!r} could not be loaded: {str(error).splitlines()[0]}. Give a local JSON, JSONL, CSV, Parquet or text "
                "file, or a hub data set that is reachable or cached; without either, use data=nano."
            ) from error


def unique(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts without repeated ids; a text stays in the first split that has it."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.prompt_id, prompt)
    return list(first.values())


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _share(name: str) -> float:
    return int.from_bytes(hashlib.sha256(b"head " + name.encode()).digest()[:4], "big") / 2**32
