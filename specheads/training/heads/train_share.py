"""Which train prompts heads learn from: the first ones, so that a larger share includes every smaller one."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset


def first_rows(prompt_ids: Sequence[str], share: float) -> list[int]:
    """Return the numbers of the rows that belong to the first `share` of the prompts; `prompt_ids` are those of all rows.

    All responses to a prompt belong to it; at least one prompt is kept.
    """
    numbers = {prompt_id: number for number, prompt_id in enumerate(dict.fromkeys(prompt_ids))}
    count = max(1, round(share * len(numbers)))
    return [row for row, prompt_id in enumerate(prompt_ids) if numbers[prompt_id] < count]


class Rows(Dataset):
    """Some rows of a split, under their numbers in the split: samples and features of a row are the same in every share."""

    def __init__(self, data: Dataset, rows: Sequence[int]) -> None:
        self.data, self.rows = data, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, number = key
        return self.data[epoch, self.rows[number]]
