"""Prompts that the target writes where a user's message begins."""

import copy
import json
from dataclasses import replace

import pytest

from specheads.data_gen.run import write_own_prompts
from specheads.data_gen.settings import DataGeneration, OwnPrompts
from specheads.errors import UserError
from specheads.prompts.data_set import load_tables
from specheads.storage.data_set import load_split

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\ndef {{ m.content }}\n# end\n{% endfor %}"
    "{% if add_generation_prompt %}# reply\n{% endif %}"
)


@pytest.fixture
def chatting(nano):
    tokenizer = copy.deepcopy(nano.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return replace(nano, tokenizer=tokenizer, chat=None, instruction_format=None)


def test_prompts_begin_where_a_users_message_begins(chatting, tmp_path):
    settings = DataGeneration(max_new_tokens=96, batch_size=16)
    wish = OwnPrompts(number=10, openings=("get_", r"set(\n    value,"))
    begun = ("get_", "set(\n    value,")
    file = write_own_prompts(chatting, wish, settings, tmp_path)
    texts = [json.loads(line)["instruction"] for line in file.read_text().splitlines()]
    assert texts and len(texts) == len(set(texts)) <= 10
    assert all(text.startswith(begun) for text in texts)
    rows = load_split(file.parent, "train")
    assert {chatting.decode(ids) for ids in rows["prompt_ids"]} == {
        f"# user\ndef {opening}" for opening in begun
    }
    ended = [
        chatting.decode(ids)
        for ids, finished in zip(rows["response_ids"], rows["finished"], strict=True)
        if finished
    ]
    assert {text.removeprefix("get_").removeprefix(begun[1]) for text in texts} == {
        text.strip() for text in ended
    }
    assert len(load_tables(str(file), None).rows) == len(texts)  # it is a data set
    assert len(list(file.parent.glob("*.parquet"))) == 1  # and not a file for each prompt
    before = (
        file.stat().st_mtime_ns,
        {path: path.stat().st_mtime_ns for path in file.parent.glob("*.parquet")},
    )
    again = write_own_prompts(chatting, wish, settings, tmp_path)
    assert again == file and before[1] == {
        path: path.stat().st_mtime_ns for path in file.parent.glob("*.parquet")
    }


def test_an_instruction_format_says_where_a_message_begins(nano, tmp_path):
    pair = replace(nano, instruction_format="def {instruction}\n# reply\n")
    file = write_own_prompts(
        pair, OwnPrompts(number=4), DataGeneration(max_new_tokens=96), tmp_path
    )
    assert {pair.decode(ids) for ids in load_split(file.parent, "train")["prompt_ids"]} == {"def "}


def test_a_pair_without_a_format_is_refused(nano, tmp_path):
    with pytest.raises(UserError, match="takes no instructions"):
        write_own_prompts(nano, OwnPrompts(number=4), DataGeneration(), tmp_path)


def test_no_prompt_that_ends_is_told(chatting, tmp_path):
    with pytest.raises(UserError, match=r"no prompt that ends within data\.max_new_tokens=1"):
        write_own_prompts(
            chatting,
            OwnPrompts(number=2, openings=("get",)),
            DataGeneration(max_new_tokens=1),
            tmp_path,
        )
