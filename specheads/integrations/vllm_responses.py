"""Answers many prompts with vLLM in a separate process: `python -P vllm_responses.py
<requests.json>`.

The file holds `model` (arguments of vllm.LLM) and `requests`, one per prompt: `ids`, and `params`
(arguments of vllm.SamplingParams). Standard output gets one line of JSON for each response as soon
as it has ended: `request`, its place in the list, `ids` and `finished`. The process ends when its
standard input is closed, so never outlives the one that started it. Needs nothing but vLLM, so it
runs in an environment without specheads.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, TextIO, TypeAlias, cast

ON_A_CPU = {  # environment variables of vLLM, where the user has not set them
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; it would take most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one needs Triton
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process between this one and the model
}


Json: TypeAlias = dict[str, Any]
VllmEngine: TypeAlias = Any


def lines_of(python: str, content: Json, log_path: Path) -> Generator[Json]:
    """Yield the lines of a process that runs on a request file with `content`.

    UserError where it ends before the caller.
    """
    from specheads.errors import UserError  # not for the process, which is without specheads

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, log_path.open("w") as log:
        json.dump(content, file)
        file.flush()
        # -P: the folder of the script is not for imports
        command = [python, "-P", __file__, file.name]
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


def _engine_of(model: Json) -> VllmEngine:
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


def _add(engine: VllmEngine, number: int, request: Json) -> None:
    import vllm

    given = dict(request["params"])
    if "logit_bias" in given:  # JSON made its keys text
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    params = vllm.SamplingParams(detokenize=False, **given)
    engine.add_request(str(number), {"prompt_token_ids": request["ids"]}, params)


def answer(content: Json, out: TextIO) -> None:
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


def main() -> None:
    """Do what the file asks for that the command line names."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints does not get between the responses
    threading.Thread(target=_end_with_parent, daemon=True).start()
    content = json.loads(Path(sys.argv[1]).read_text())
    answer(content, out)
    out.close()
    os._exit(0)  # the thread reads on


if __name__ == "__main__":
    main()
