"""llama.cpp's server, alone or with a draft model, for `benchmarks/peers.py`. Needs the standard library and the binary.

Its seconds are those that the server reports for reading the prompt and for the response, without HTTP. A draft's length is fixed
when the server starts, so each length is a process.
"""

import http.client
import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from protocol import answers, serve, settings

CACHE_TYPES = {"float32": "f32", "bfloat16": "bf16"}
WAIT = 120  # seconds for the server to load


class _Server:
    """A server of its own, and the connection to it."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.setup = setup
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        threads, cache = str(setup["threads"]), CACHE_TYPES[setup["dtype"]]
        command = [setup["binary"], "-m", setup["file"], "-c", str(setup["window"]), "-np", "1", "--port", str(self.port)]
        command += ["-t", threads, "-tb", threads, "-ctk", cache, "-ctv", cache, "--cache-ram", "0"]
        command += ["-fa", "auto" if setup["flash_attention"] else "off"]
        if setup["drafted"]:
            command += ["-md", setup["draft_file"], "--spec-type", "draft-simple", "--spec-draft-n-max", str(setup["drafted"])]
            command += ["-td", threads, "-tbd", threads, "-ctkd", cache, "-ctvd", cache]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as this object
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port)
        self._wait()

    def generate(self, options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple:
        """Return a response and the server's own seconds."""
        body = {"prompt": prompt, "n_predict": length, "seed": seed, "cache_prompt": False, "return_tokens": True}
        if greedy:
            body |= {"samplers": ["top_k"], "top_k": 1}
        else:
            body |= {"samplers": ["top_k", "temperature"], "top_k": 50, "temperature": 1.0}
        self.connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(self.connection.getresponse().read())
        if "timings" not in answer:
            raise RuntimeError(f"llama-server answered {answer}")
        timings = answer["timings"]
        return answer["tokens"], (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3

    def _wait(self) -> None:
        """Return when the server has loaded its models."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.connection.request("GET", "/health")
                response = self.connection.getresponse()
                response.read()
                if response.status == 200:
                    return
            except OSError:
                self.connection.close()
            time.sleep(0.1)
        self.process.kill()
        self.log.seek(0)
        raise RuntimeError(f"llama-server did not start:\n{self.log.read()[-2000:]}")


def version(binary: str) -> str:
    """Return the build that `--version` prints."""
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    match = re.search(r"version: (.+)", text.stderr + text.stdout)
    return match[1] if match else "unknown"


def main() -> None:
    setup = settings()
    with answers() as channel:
        server = _Server(setup)
        try:
            serve(channel, {"llama-server": version(setup["binary"])}, server.generate)
        finally:
            server.process.terminate()


if __name__ == "__main__":
    main()
