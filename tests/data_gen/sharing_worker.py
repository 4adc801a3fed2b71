"""Make a data set of a tiny pair together with other processes: <folder> <seconds that each shard
takes> [full].

It prints what it labels, shard by shard, and what is logged. With `full`, its disk has no room for
a shard.
"""

import errno
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes import tiny_pair

from specheads.data_gen import run
from specheads.data_gen.settings import DataGeneration
from specheads.errors import user_error
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt
from specheads.storage import shards

label_rows = run.label_rows


def slow(*arguments):
    print("making", *(prompt.text for prompt, _ in arguments[1].prompts), flush=True)
    time.sleep(float(sys.argv[2]))
    return label_rows(*arguments)


class Letters:
    """Eight prompts of four letters."""

    def load(self, chats):
        for number in range(8):
            text = format(number, "04b").translate(str.maketrans("01", "ab"))
            yield Prompt(
                format(number, "016x"), ("train", "train", "dev", "test")[number % 4], text
            )


def full(table, path, compression):
    Path(path).write_bytes(b"as much as there was room for")
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def main():
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
    run.label_rows = slow
    if sys.argv[3:] == ["full"]:
        shards.pq.write_table = full
    settings = DataGeneration(
        warp=Warp(1.0, top_k=5),
        max_new_tokens=6,
        max_prompt_tokens=8,
        batch_size=2,
        rows_per_shard=2,
    )
    try:
        print(
            "folder",
            run.generate_data(tiny_pair(8, scale=2.0), Letters(), settings, Path(sys.argv[1])),
        )
    except OSError as error:
        print("error:", user_error(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
