"""What a worker and the script that asks it say to each other: one JSON object per line. Needs the standard library alone.

A worker prints `{"ready": {package: version}}` and then answers each request:

    {"do": "generate", "options": {...}, "greedy": true, "prompts": [[1, 2]], "length": 8, "seeds": [0]}
        -> {"responses": [[3, 4]], "seconds": [0.1]}
    {"do": "together", "greedy": true, "prompts": [[1, 2], [3]], "length": 8, "seeds": [0, 1]}
        -> {"responses": [[3, 4], [5, 6]], "seconds": [0.1]}
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

Request = Mapping[str, Any]
Generate = Callable[[Mapping[str, Any], bool, list[int], int, int], tuple[list[int], float]]


def settings() -> dict[str, Any]:
    """Return what the script told this process at its start."""
    return json.loads(sys.argv[1])


@contextmanager
def answers() -> Iterator[TextIO]:
    """Yield where answers go; what libraries print goes to standard error from here on."""
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        yield channel


def serve(
    channel: TextIO,
    versions: Mapping[str, str],
    generate: Generate | None = None,
    together: Callable[[Request], tuple[list[list[int]], float]] | None = None,
) -> None:
    """Answer requests until standard input ends.

    Args:
        channel: where answers go.
        versions: of the packages that do the work.
        generate: (options, greedy, prompt, length, seed) -> response and seconds of the whole call.
        together: (request) -> the responses to prompts that come at once, and the seconds of all of them.
    """
    _say(channel, {"ready": dict(versions)})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "together":
                responses, seconds = together(request)
                answer = {"responses": responses, "seconds": [seconds]}
            else:
                pairs = zip(request["prompts"], request["seeds"], strict=True)
                made = [
                    generate(request["options"], request["greedy"], prompt, request["length"], seed) for prompt, seed in pairs
                ]
                answer = {"responses": [tokens for tokens, _ in made], "seconds": [seconds for _, seconds in made]}
        except Exception:  # noqa: BLE001 - whatever the peer raises is answered
            answer = {"error": traceback.format_exc()}
        _say(channel, answer)


def _say(channel: TextIO, answer: Mapping[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()
