"""llama.cpp's server, alone or with a draft model, for `benchmarks/decoding.py`. Needs the standard library and the binary.

Its seconds are those that the server reports for reading the prompt and for the response, without HTTP. A draft's length is fixed
when the server starts, so each length is a process.
"""

import atexit
import http.client
import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from processes import Answer, Generate, serve

CACHE_TYPES = {"float32": "f32", "bfloat16": "bf16"}
WAIT = 120  # seconds for the server to load
SAMPLERS = {
    True: {"samplers": ["top_k"], "top_k": 1},
    False: {"samplers": ["top_k", "temperature"], "top_k": 50, "temperature": 1.0},
}


def _make(setup: Mapping[str, Any]) -> tuple[Mapping[str, str], Generate]:
    """Start a server and return its build and what asks it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads, cache = str(setup["threads"]), CACHE_TYPES[setup["dtype"]]
    command = [setup["binary"], "-m", setup["file"], "-c", str(setup["window"]), "-np", "1", "--port", str(port)]
    command += ["-t", threads, "-tb", threads, "-ctk", cache, "-ctv", cache, "--cache-ram", "0"]
    # On a CPU flash attention computes in half precision: it moves nano's logits by 0.015, all else in float32 by 0.00001.
    command += ["-fa", "off" if setup["dtype"] == "float32" else "auto"]
    if setup["drafted"]:
        command += ["-md", setup["draft_file"], "--spec-type", "draft-simple", "--spec-draft-n-max", str(setup["drafted"])]
        command += ["-td", threads, "-tbd", threads, "-ctkd", cache, "-ctvd", cache]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the server
    process = subprocess.Popen(command, stdout=log, stderr=log)
    atexit.register(process.terminate)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    if not _is_ready(process, connection):
        log.seek(0)
        raise RuntimeError(f"llama-server did not start:\n{log.read()[-2000:]}")

    def generate(options: object, prompts: list[list[int]], length: int, seeds: list[int]) -> Answer:
        body = {"prompt": prompts[0], "n_predict": length, "seed": seeds[0], "cache_prompt": False, "return_tokens": True}
        body |= SAMPLERS[setup["greedy"]]
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        if "timings" not in answer:
            raise RuntimeError(f"llama-server answered {answer}")
        timings = answer["timings"]
        return {"responses": [answer["tokens"]], "seconds": (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3}

    shown = subprocess.run([setup["binary"], "--version"], capture_output=True, text=True, check=True)
    build = re.search(r"version: (.+)", shown.stderr + shown.stdout)
    return {"llama-server": build[1] if build else "unknown"}, generate


def _is_ready(process: subprocess.Popen, connection: http.client.HTTPConnection) -> bool:
    """Return True when the server has loaded its models, False if it ends before or takes too long."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end and process.poll() is None:
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            if response.status == 200:
                return True
        except OSError:
            connection.close()
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    serve(_make)
