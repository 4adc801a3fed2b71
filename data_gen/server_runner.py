"""Responses of the target by a server that is already running: OpenAI's completions, with the ids
of tokens.

Each response is kept once it has ended. Before the first one, log-probabilities of some greedy
responses are compared with the pair's own: a head must not learn from another model than the one
that is served.
"""

import json
import logging
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from http.client import HTTPException
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple, TypeVar

import torch

from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.shard_rows import Shard, uniforms_of, warp_of
from specheads.data_gen.vllm_runner import sampling_params
from specheads.decoding.responses import Response
from specheads.errors import UserError, is_count
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, states_of
from specheads.pair.sampling import Warp
from specheads.settings import secrets_in
from specheads.storage.journal import Journal
from specheads.storage.shards import ShardStore

logger = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"  # the environment variable of a server's key
SEEDS = 2**31  # llama-server's have 32 bits
# greedy responses, and the tokens of each
COMPARED = 10
COMPARED_TOKENS = 8
# Mean differences of log-probabilities, in nats, above which there is a warning or an error. A file
# in 4 bits by llama.cpp: 0.04 to 0.05; noise of 5 % in weights: 0.4
ROUNDED = 0.1
ANOTHER = 0.5
_LISTED = 10.0  # seconds that a server may take to name its models
_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before further tries
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
# What makes a server return ids, and what it might set by itself. llama-server's samplers run in
# the order of Warp's.
_ALWAYS = {
    "return_token_ids": True,
    "logprobs": 1,
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": False,
    "samplers": ["top_k", "temperature", "top_p", "min_p"],
}

Item = TypeVar("Item")
Result = TypeVar("Result")


class Completion(NamedTuple):
    """What a server answered: the ids of tokens, why it ended, the log-probabilities of the ids
    where it tells them, and the token that ended it where it tells that.
    """

    ids: list[int]
    reason: str
    logprobs: list[float]
    end: int | None = None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Lets an answer that names another address be an error: the key must not follow it."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


class Server:
    """A server of one model; every call is tried again a few times where that may help."""

    def __init__(self, url: str, model: str | None = None, seconds: float = 600.0) -> None:
        """Ask an address, with or without /v1, for its models.

        Raises UserError if `model`, or the only one, is not there.
        """
        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"server.url={url} is no address; give one such as http://localhost:8000."
            )
        if urllib.parse.urlsplit(url).query or next(secrets_in(url), None) is not None:
            raise UserError(
                "server.url holds a user, a password or a query, which logs would show; leave it"
                f" out, and put the server's key into the variable {KEY}."
            )
        self.url = url if url.endswith("/v1") else f"{url}/v1"
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._seconds = min(seconds, _LISTED)
        models = self._ask("models", delays=_DELAYS[:1]).get("data") or ()
        served = [str(each.get("id")) for each in models]
        if model is None and len(served) != 1:
            raise UserError(
                f"{url} serves {', '.join(served) or 'no model'}; name the target: server.model="
            )
        if model is not None and served and model not in served:
            raise UserError(
                f"server.model={model} is not served at {url}; it serves {', '.join(served)}."
            )
        self.model = model or served[0]
        self._seconds = seconds

    def complete(self, ids: Sequence[int], params: Mapping[str, object]) -> Completion:
        """Return the completion of a prompt.

        Raises UserError if the server fails, read another prompt, or returns no ids.
        """
        answer = self._ask(
            "completions", {"model": self.model, "prompt": list(ids), **_ALWAYS, **params}
        )
        (choice, *_) = answer.get("choices") or [{}]
        read = (answer.get("usage") or {}).get("prompt_tokens", len(ids))
        if read != len(ids):
            raise UserError(
                f"{self.url} read {read} tokens of a prompt of {len(ids)}; it must neither add nor"
                " cut tokens."
            )
        logprobs = choice.get("logprobs") or {}
        content = logprobs.get("content") or ()  # llama-server's
        tokens = choice.get("token_ids")
        numbers = logprobs.get("token_logprobs") or [each["logprob"] for each in content]
        if tokens is None:
            tokens = [each["id"] for each in content if "id" in each]
        if not tokens and choice.get("text"):
            raise UserError(
                f"{self.url} returns no token ids, as vLLM, SGLang and llama-server do; use a newer"
                " version, or runner=local."
            )
        end = choice.get("stop_reason")  # vLLM's and SGLang's: a token's id, or a text
        return Completion(
            [int(token) for token in tokens],
            str(choice.get("finish_reason")),
            numbers,
            end if is_count(end) else None,
        )

    def _ask(
        self, path: str, body: Mapping[str, object] | None = None, delays: Sequence[float] = _DELAYS
    ) -> dict[str, Any]:
        """Return the answer to GET, or to POST with a body.

        Raises UserError where no try gets one.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for delay in (*delays, None):
            try:
                request = urllib.request.Request(f"{self.url}/{path}", data, headers)
                with self._opener.open(request, timeout=self._seconds) as answer:
                    content = json.loads(answer.read())
                if isinstance(content, dict):
                    return content
                reason = "its answer is no JSON object"
            except urllib.error.HTTPError as error:
                said = " ".join(error.read().decode(errors="replace").split())
                if key:  # some servers repeat a key that they do not know
                    said = said.replace(key, "<the key>")
                reason = f"{error.code}: {said[:300]}"
                if elsewhere := error.headers.get("Location"):
                    raise UserError(
                        f"{self.url}/{path} names another address ({error.code}: {elsewhere}),"
                        " which gets neither prompts nor a key; if it is the right one, give it:"
                        " server.url="
                    ) from None
                if error.code not in _TRY_AGAIN:
                    key = f"; put its key into the variable {KEY}" if error.code == 401 else ""
                    raise UserError(f"{self.url}/{path} refuses ({reason}){key}.") from None
            except (OSError, HTTPException, ValueError) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if delay is not None:
                logger.warning("server: %s; it is asked again in %g s", reason, delay)
                time.sleep(delay)
        raise UserError(
            f"{self.url} gives no answer after {len(delays) + 1} tries ({reason}); see that a"
            " server runs there, and run the command again: nothing is lost."
        )


def server_responses(
    pair: Pair,
    shards: Mapping[str, Shard],
    settings: DataGeneration,
    store: ShardStore,
    advance: Callable[[int], object],
) -> Generator[tuple[str, list[Response]]]:
    """Yield some shards' names with their responses as the last ends.

    Raises UserError for a server that fails, or is another.
    """
    if settings.server_url is None:
        raise UserError(
            "runner=server needs the address of a server: server.url=http://localhost:8000"
        )
    server = Server(settings.server_url, settings.server_model, settings.server_seconds)
    prompts = list[list[int]]()
    for shard in shards.values():
        prompts += [list(ids) for _, ids in shard.prompts]
    check_target(pair, server, prompts[:COMPARED])
    journals = {name: Journal(store.journal(name), {}) for name in shards}
    missing = list[tuple[str, int]]()
    for name, shard in shards.items():
        for number in range(len(shard.prompts)):
            if str(number) not in journals[name].entries:
                missing.append((name, number))
    if kept := sum(len(journal.entries) for journal in journals.values()):
        logger.info("responses: %d are reused from an earlier run", kept)
        advance(kept)

    def answer(place: tuple[str, int]) -> Response:
        shard = shards[place[0]]
        prompt, ids = shard.prompts[place[1]]
        uniform = float(uniforms_of(settings, prompt.prompt_id, shard.sample)[0, 0])
        most = min(settings.max_new_tokens, pair.window - len(ids))
        params = sampling_params(pair, warp_of(settings, shard), most, uniform, SEEDS)
        return response_of(pair, server.complete(ids, params), most)

    def finished(name: str) -> Iterator[tuple[str, list[Response]]]:
        entries = journals[name].entries
        count = len(shards[name].prompts)
        if len(entries) == count:
            yield name, [Response(**entries[str(number)]) for number in range(count)]

    for name in shards:
        yield from finished(name)
    for (name, number), response in at_once(answer, missing, settings.server_concurrency):
        journals[name].add(str(number), {"ids": response.ids, "finished": response.finished})
        advance(1)
        yield from finished(name)


def response_of(pair: Pair, made: Completion, most: int) -> Response:
    """Return a completion as this process's response, to the first token that ends one.

    Raises UserError if that cannot be.
    """
    end = next((place for place, token in enumerate(made.ids) if token in pair.stop_tokens), None)
    ids = made.ids if end is None else made.ids[: end + 1]
    # Some servers keep the token that ended it
    if end is None and made.reason == "stop" and len(ids) < most:
        end = len(ids)
        ids = [*ids, _end_of(pair, made)]
    is_known = all(0 <= token < pair.vocab_size for token in ids)
    if made.reason not in ("stop", "length") or not 0 < len(ids) <= most or not is_known:
        raise UserError(
            f"the server returned {len(ids)} tokens, of which the largest is {max(ids, default=0)},"
            f" with finish_reason={made.reason}, and was asked for 1 to {most} of the"
            f" {pair.vocab_size} tokens of {pair.target_id}."
        )
    return Response(ids, end is not None)


def _end_of(pair: Pair, made: Completion) -> int:
    """Return the token that ended a completion which does not hold it.

    Raises UserError for one that ends no response of the pair.
    """
    if made.end is None:
        usual = pair.tokenizer.eos_token_id
        return usual if usual in pair.stop_tokens else min(pair.stop_tokens)
    if made.end not in pair.stop_tokens:
        raise UserError(
            f"the server ended a response at the token {made.end}, but responses of"
            f" {pair.target_id} end with {sorted(pair.stop_tokens)}; serve it with the same"
            " generation config."
        )
    return made.end


@torch.no_grad()
def check_target(pair: Pair, server: Server, prompts: Sequence[Sequence[int]]) -> float:
    """Return the mean difference of log-probabilities, in nats, of a server and the pair.

    Raises UserError for another model.
    """
    params = sampling_params(pair, Warp(0.0), COMPARED_TOKENS, 0.0, SEEDS)
    made = [(list(ids), server.complete(ids, params)) for ids in prompts]
    responses = list[list[int]]()
    served = list[float]()
    for _, answer in made:
        ids = answer.ids[: len(answer.logprobs)]
        responses.append([min(token, pair.vocab_size - 1) for token in ids])
        served += answer.logprobs[: len(ids)]
    if not served:
        logger.warning(
            "server: it returns no log-probabilities, so it is not checked whether it serves %s",
            pair.target_id,
        )
        return 0.0
    texts = GivenTexts.with_responses([ids for ids, _ in made], responses)
    logits = pair.target_lm.logits(states_of(pair.target_lm, texts))
    predicted = texts.tokens[texts.row, texts.position + 1]
    ours = logits.log_softmax(-1).gather(1, predicted.to(logits.device)[:, None])[:, 0].cpu()
    difference = float((ours - torch.tensor(served, dtype=ours.dtype)).abs().mean())
    text = (
        f"log-probabilities of {len(served)} greedy tokens of {server.model} at {server.url} differ"
        f" by {difference:.3g} nats on average from those of {pair.target_id}"
    )
    if not difference < ANOTHER:
        raise UserError(
            f"{text}: another model, revision or tokenizer is served; serve the target, or label"
            " what is served: model.target="
        )
    say = logger.warning if difference > ROUNDED else logger.info
    say("server: %s", text)
    return difference


def at_once(
    call: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> Iterator[tuple[Item, Result]]:
    """Yield items with what the call returns for them, as the calls end.

    Raises the first call's exception.

    After an exception no further call is begun. A pool's threads are daemons: a process that is
    interrupted does not wait.
    """
    failed = threading.Event()

    def work(item: Item) -> tuple[Item, Result] | None:
        try:
            return None if failed.is_set() else (item, call(item))
        except Exception:
            failed.set()
            raise

    if items:
        with ThreadPool(min(threads, len(items))) as pool:
            yield from filter(None, pool.imap_unordered(work, items))
