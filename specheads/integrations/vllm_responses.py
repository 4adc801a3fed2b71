"""Answers many prompts with vLLM, or times its rounds, in a process of its own: `python -P
vllm_responses.py <requests.json>`.

The file holds `model` (arguments of vllm.LLM) and `requests`, one per prompt: `ids`, and `params`
(arguments of vllm.SamplingParams). Standard output gets one line of JSON for each response as soon
as it has ended: `request`, its place in the list, `ids` and `finished`. With `ways` to draft that
take turns, each [tokens, whether a head watches], or [[null, false]] for no draft, it gets one line
for each of them instead: `way`, whether it is the `last`, and of rounds with about `at_once`
requests the `seconds`, those `drafting`, the `tokens`, and the `requests`. The process ends when
its standard input is closed, so never outlives the one that started it. Needs nothing but vLLM, so
it runs in an environment without specheads, where no head watches.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from itertools import count, cycle
from pathlib import Path
from typing import IO, Any, cast

ON_A_CPU = {  # environment variables of vLLM, where the user has not set them
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; it would take most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one needs Triton
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process between this one and the model
}

ROUNDS, TURNS, UNSTEADY = (
    12,
    6,
    2,
)  # timed rounds of a way in a row, how often, and those that follow another way
LARGEST_UNUSED = 100  # rounds of a way that are not timed, until there seems to be no end


def lines_of(python: str, content: dict[str, Any], log_path: Path) -> Generator[dict[str, Any]]:
    """Yield the lines of a process that runs on a request file with `content`.

    UserError where it ends before the caller.
    """
    from specheads.errors import UserError  # not for the process, which is without specheads

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, log_path.open("w") as log:
        json.dump(content, file)
        file.flush()
        command = [
            python,
            "-P",
            __file__,
            file.name,
        ]  # -P: the folder of the script is not for imports
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process:
            try:
                while line := cast(IO[str], process.stdout).readline():
                    yield json.loads(line)
                said = [each for each in log_path.read_text().splitlines() if each.strip()] or [""]
                raise UserError(
                    f"vLLM ended too early; its log is {log_path}, whose last line is: {said[-1]}"
                )
            finally:
                process.kill()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _engine_of(model: dict[str, Any]) -> Any:
    import torch

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        for name, value in ON_A_CPU.items():
            os.environ.setdefault(name, value)
        # For a prompt that is read in parts vLLM takes back random numbers, which generators of a
        # CPU cannot do.
        model.setdefault("enable_chunked_prefill", False)
    import vllm  # type: ignore[import-not-found]

    return vllm.LLM(**model).llm_engine


def _add(engine: Any, number: int, request: dict[str, Any], **more: Any) -> None:
    import vllm

    given = dict(request["params"])
    if "logit_bias" in given:  # JSON made its keys text
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    params = vllm.SamplingParams(detokenize=False, **given, **more)
    engine.add_request(str(number), {"prompt_token_ids": request["ids"]}, params)


def answer(content: dict[str, Any], out: Any) -> None:
    """Write the response to every request, in the order in which they end."""
    engine = _engine_of(content["model"])
    for number, request in enumerate(content["requests"]):
        _add(engine, number, request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                response = output.outputs[0]
                ended = {
                    "ids": list(response.token_ids),
                    "finished": response.finish_reason == "stop",
                }
                print(
                    json.dumps({"request": int(output.request_id.split("-")[0]), **ended}),
                    file=out,
                    flush=True,
                )


def time_rounds(content: dict[str, Any], out: Any) -> None:
    """Write what rounds take in each way to draft.

    Requests are repeated, so that about as many decode at once.
    """
    import torch

    os.environ.setdefault(
        "VLLM_USE_V2_MODEL_RUNNER", "0"
    )  # the other one has no drafter whose length could be changed
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = _engine_of(content["model"])
    drafting = 0.0
    ways = [(length, watched) for length, watched in content["ways"]]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    drafter: Any = None
    if ways[0][0] is not None:
        drafter = (
            engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
        )
        propose = drafter.propose

        def timed(**given: Any) -> Any:
            nonlocal drafting
            wait()
            start = time.perf_counter()
            drafts = propose(**given | {"num_speculative_tokens": length})
            wait()
            drafting = time.perf_counter() - start
            return drafts

        drafter.propose = timed
    added = count()
    requests = cycle(content["requests"])
    head = getattr(drafter, "stopping", None)
    ways = [(length, watched) for length, watched in ways if head is not None or not watched]
    taken: dict[tuple[int | None, bool], tuple[list[float], ...]] = {
        way: ([], [], [], []) for way in ways
    }
    for length, watched in ways * TURNS:
        if head is not None:
            drafter.stopping = head if watched else None
        left = ROUNDS
        skipped = UNSTEADY
        unused = 0
        while left:
            # Of many one would end in each round, and all rounds would read a prompt.
            if (at_once := engine.get_num_unfinished_requests()) < max(
                1, 0.75 * content["at_once"]
            ):
                for _ in range(content["at_once"] - at_once):
                    _add(engine, next(added), next(requests), output_kind=RequestOutputKind.DELTA)
                skipped = max(skipped, 1)  # this round reads prompts
            start = time.perf_counter()
            tokens = sum(len(output.outputs[0].token_ids) for output in engine.step())
            seconds = time.perf_counter() - start
            if skipped:
                skipped = skipped - 1
                unused = unused + 1
                if unused > LARGEST_UNUSED:
                    raise RuntimeError(
                        "almost every round reads a prompt; give prompts with longer responses, or"
                        " fewer at once"
                    )
                continue
            left -= 1
            for each, value in zip(
                taken[length, watched], (seconds, drafting, tokens, at_once), strict=True
            ):
                each.append(value)
    for way, values in taken.items():
        named = dict(zip(("seconds", "drafting", "tokens", "requests"), values, strict=True))
        print(json.dumps({"way": way, "last": way == ways[-1], **named}), file=out, flush=True)


def main() -> None:
    """Do what the file asks for that the command line names."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints does not get between the responses
    threading.Thread(target=_end_with_parent, daemon=True).start()
    content = json.loads(Path(sys.argv[1]).read_text())
    (time_rounds if "ways" in content else answer)(content, out)
    out.close()
    os._exit(0)  # the thread reads on


if __name__ == "__main__":
    main()
