"""Prompts by the target itself: it writes what follows where its chat template has a user's message (Magpie, Xu et al. 2024)."""

import json
from dataclasses import replace
from pathlib import Path

from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.pair.config import INSTRUCTION
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt, text_id
from specheads.settings import Count, Settings, Text, setting
from specheads.storage.data_set import load_split
from specheads.storage.files import write_whole


class OwnPrompts(Settings):
    """What the target is asked to write in place of users."""

    number: Count = setting(
        0, "how many prompts the target writes itself, and no data: a file for data.path=", key="own_prompts.number"
    )
    openings: tuple[Text, ...] = setting(
        (), "texts that its prompts begin with, in turn, '[Write,Explain]'; none: as it likes", key="own_prompts.openings"
    )


def write_own_prompts(pair: Pair, wish: OwnPrompts, settings: DataGeneration, root: Path) -> Path:
    """Return a JSON-lines file of different prompts, `{"instruction": ...}`, that the pair's target has written.

    A text that does not end within `data.max_new_tokens` is no prompt. Raises UserError for a target without a format in which a
    user's message begins, and where no text has ended.
    """
    opened = replace(pair, instruction_format=_beginning(pair) + INSTRUCTION)
    openings = wish.openings or ("",)
    # An id of its own each: several responses to one prompt would each be in a file of their own.
    turns = [openings[number % len(openings)] for number in range(wish.number)]
    prompts = [Prompt(text_id(f"{number} {opening}"), "train", opening) for number, opening in enumerate(turns)]
    settings = settings.but(responses_per_prompt=1, warp=Warp(1.0))
    folder = generate_data(opened, prompts, settings, root, ("train",), labelled=False)
    rows = load_split(folder, "train")
    columns = zip(rows["prompt"], rows["prompt_ids"], rows["response_ids"], rows["finished"], strict=True)
    # Decoded with what precedes it: some tokenizers drop a space at the beginning.
    whole = ((opening, pair.decode(ids), pair.decode([*ids, *response])) for opening, ids, response, ended in columns if ended)
    texts = dict.fromkeys((opening + text[len(before) :]).strip() for opening, before, text in whole)
    kept = [text for text in texts if text]
    if not kept:
        raise UserError(
            f"{pair.target_id} has written no prompt that ends within data.max_new_tokens={settings.max_new_tokens}; raise it, "
            "or take prompts from a data set (data.path=)."
        )
    file = folder / "own_prompts.jsonl"
    lines = "".join(json.dumps({"instruction": text}) + "\n" for text in kept)
    write_whole(file, lambda temporary: temporary.write_text(lines, encoding="utf-8"))
    return file


def _beginning(pair: Pair) -> str:
    """Return what precedes a user's message in the pair's format."""
    if not pair.chats:
        raise UserError(
            f"own_prompts.number: {pair.target_id} takes no instructions, so no message of a user begins anywhere; give "
            "model.instruction_format, or take prompts from a data set (data.path=)."
        )
    if pair.instruction_format is not None:
        return pair.instruction_format.partition(INSTRUCTION)[0]
    return pair.render([{"role": "user", "content": INSTRUCTION}]).partition(INSTRUCTION)[0]
