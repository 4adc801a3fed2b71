"""A target that a vLLM server runs: its responses, and the log-probabilities of its most likely tokens along texts, over HTTP.

A server names for each position only a limited number of tokens (`--max-logprobs`, 20 by default). Where the warp's top-k is no
larger, its distribution is known exactly. In the place of hidden states are these tokens with their log-probabilities, so that
whatever reads texts through a LanguageModel reads a served one, too.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.responses import Response
from specheads.errors import UserError
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp

WITHOUT_TOP_K = 64  # tokens that are asked for where the warp has no top-k
TIMEOUT = 600.0  # seconds
SAMPLE = "The quick brown fox said: 1 + 1 = 2.\n\tÄrger, naïve – 日本."  # on which tokenizers are compared
SEEDS = 2**53  # as many as there are numbers of which a uniform one is drawn
REFUSED = 400  # the status of a request whose arguments the server does not take


def sampling_params(pair: Pair, warp: Warp, most: int, uniform: float) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a response of the target.

    Args:
        most: tokens of the response at most.
        uniform: in [0, 1), decides the seed.
    """
    chosen: dict[str, Any] = {"temperature": float(warp.temperature), "stop_token_ids": sorted(pair.stop_tokens)}
    if not warp.greedy:
        chosen |= {"top_k": warp.top_k, "top_p": float(warp.top_p)}
    if padded := range(pair.vocab_size, pair.target.config.get_text_config().vocab_size):
        chosen["logit_bias"] = dict.fromkeys(map(str, padded), -100.0)  # tokens that the tokenizer does not know
    return chosen | {"max_tokens": most, "seed": int(uniform * SEEDS)}


class _Refusal(UserError):
    """A request whose values the server does not take."""


class Server:
    """The HTTP interface of a vLLM server."""

    def __init__(self, url: str, model: str | None = None, at_once: int = 16) -> None:
        """Ask a server what it serves.

        Args:
            url: for example http://localhost:8000.
            model: the name of a model; None: the first that the server has.
            at_once: requests that it gets at the same time.

        Raises:
            UserError: nothing answers there, or it has no such model.
        """
        self.url, self.at_once = url.rstrip("/").removesuffix("/v1"), at_once
        models = {each["id"]: each for each in self.ask("/v1/models")["data"]}
        if not models or (model is not None and model not in models):
            has = ", ".join(models) or "no model"
            raise UserError(f"remote.model={model}: the server at {self.url} has {has}; name one of them.")
        self.model = model or next(iter(models))
        self.window: int | None = models[self.model].get("max_model_len")
        self.version = str(self.ask("/version").get("version", "of no known version"))

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the answer to a request; a `body` makes it a POST.

        Raises:
            UserError: no answer, or one that is not JSON.
            _Refusal: a body whose values the server does not take.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            if error.code == REFUSED:
                raise _Refusal(f"the server at {self.url} refuses a request to {path}: {text}") from None
            reason = f"it answers {error.code}: {text}"
        except (OSError, ValueError) as error:  # refused connections, timeouts, addresses that are none, no JSON
            reason = str(getattr(error, "reason", error))
        raise UserError(
            f"remote.url={self.url}: {path} gives no answer ({reason}); start a server with vllm serve <target>, and give its "
            "address, for example http://localhost:8000."
        )

    def complete(self, ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the completion of a text; raises what `ask` raises."""
        body = {"model": self.model, "prompt": list(ids), "return_token_ids": True, **params}
        return self.ask("/v1/completions", body)["choices"][0]


class ServedModel(LanguageModel):
    """A LanguageModel whose states are the `kept` most likely tokens and their log-probabilities, (..., 2 kept)."""

    def __init__(self, server: Server, shape: LanguageModel, kept: int) -> None:
        """Read through a server.

        Args:
            shape: the same model without weights.
            kept: tokens of each position; others count as impossible.
        """
        super().__init__(shape.model, shape.vocab_size)
        self.server, self.kept = server, kept

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def window(self) -> int:
        # The server needs room for one token after a text, and its position is read with one more.
        return min(super().window, (self.server.window or 2**31) - 2)

    @property
    def hidden_size(self) -> int:
        return 2 * self.kept

    def hidden_states(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        return torch.stack(self.states(tokens.tolist()))

    def states(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the states (T, 2 kept) after each token of some texts."""
        with ThreadPoolExecutor(self.server.at_once) as pool:
            return list(pool.map(self._states, texts))

    def _states(self, text: Sequence[int]) -> Tensor:
        # What may follow a token comes together with the token that did follow, so the last one is followed by any.
        asked = {"prompt_logprobs": self.kept, "max_tokens": 1, "temperature": 0.0}
        try:
            answer = self.server.complete([*text, text[-1]], asked)["prompt_logprobs"]
        except _Refusal as refusal:
            raise UserError(
                f"{refusal}. It was asked for the {self.kept} most likely tokens along a text of {len(text)}; start it with "
                f"--max-logprobs {self.kept}, or use warp.top_k=20."
            ) from None
        states = torch.full((len(text), 2, self.kept), -torch.inf)
        states[:, 0] = 0
        for place, of_position in enumerate(answer[1:]):
            # The token that did follow is there whatever its rank.
            known = [(int(token), each["logprob"]) for token, each in of_position.items() if each["rank"] <= self.kept]
            known = [each for each in known if each[0] < self.vocab_size][: self.kept]
            states[place, :, : len(known)] = torch.tensor(known).reshape(-1, 2).T
        return states.flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        ids, log_probs = hidden.unflatten(-1, (2, self.kept)).unbind(-2)
        logits = log_probs.new_full((*hidden.shape[:-1], self.vocab_size), -torch.inf)
        # Places without a token name token 0, whose logit they must not lower.
        return logits.scatter_reduce(-1, ids.long(), log_probs, "amax")

    def left_out(self, hidden: Tensor) -> Tensor:
        """Return the probability (n,) of the tokens that states (n, 2 kept) leave out."""
        return 1 - hidden.unflatten(-1, (2, self.kept))[:, 1].exp().sum(dim=-1)


def served_pair(pair: Pair, server: Server, warp: Warp) -> Pair:
    """Return a pair with the target of a server.

    Args:
        pair: without the target's weights.
        warp: decides how many tokens of each position must be known.

    Raises:
        UserError: the server's model has another tokenizer.
    """
    theirs = server.ask("/tokenize", {"model": server.model, "prompt": SAMPLE, "add_special_tokens": False})["tokens"]
    ours = pair.tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    if theirs != ours:
        raise UserError(
            f"remote.model={server.model} at {server.url} has another tokenizer than {pair.target_id}; set model.target to the "
            "model that the server runs."
        )
    kept = 1 if warp.greedy else min(warp.top_k or WITHOUT_TOP_K, pair.vocab_size)
    revision = f"{pair.target_revision}, {server.model} in vLLM {server.version}, {kept} tokens"
    made = replace(pair, target_revision=revision)
    made.target_lm = ServedModel(server, pair.target_lm, kept)  # in place of the cached property
    return made


class ServedResponder:
    """Asks the server for responses; stands for a `Responder` of the target."""

    def __init__(self, pair: Pair, served: ServedModel, most: int, lengths: Sequence[int]) -> None:
        """Plan responses of at most `most` tokens to prompts of some `lengths`."""
        self.pair, self.served, self._most = pair, served, most
        self.capacity = min(pair.window, max(lengths) + most)

    def respond(self, prompts: Sequence[Sequence[int]], uniform: np.ndarray, warp: Warp) -> list[Response]:
        """Return the response to each prompt; the first uniform number (B, ...) of each decides its seed."""

        def answer(ids: Sequence[int], first: float) -> Response:
            most = min(self._most, self.pair.window - len(ids))
            # What a model's folder recommends would be added on the server.
            plain = {"repetition_penalty": 1.0, "min_p": 0.0}
            choice = self.served.server.complete(ids, sampling_params(self.pair, warp, most, first) | plain)
            return Response(choice["token_ids"], choice["finish_reason"] == "stop")

        with ThreadPoolExecutor(self.served.server.at_once) as pool:
            return list(pool.map(answer, prompts, uniform[:, 0].tolist()))
