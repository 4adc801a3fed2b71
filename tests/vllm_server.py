"""A stand-in for a vLLM server: the target of a pair behind the parts of its HTTP interface that specheads asks."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from specheads.pair.sampling import Warp


class StandIn:
    """Answers requests about a pair's target; `most` is vLLM's --max-logprobs, `window` its --max-model-len."""

    def __init__(self, pair, most=50, window=1024):
        self.pair, self.most, self.window, self.asked = pair, most, window, []

    def answer(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "nano-target", "max_model_len": self.window}, {"id": "other"}]}
        if path == "/version":
            return {"version": "0.0"}
        if path == "/tokenize":
            return {"tokens": self.pair.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]}
        assert path == "/v1/completions" and body["return_token_ids"] and body["model"] == "nano-target"
        self.asked.append(body)
        if body.get("prompt_logprobs", 0) > self.most or len(body["prompt"]) + body["max_tokens"] > self.window:
            raise ValueError(f"prompt_logprobs of at most {self.most}, texts of at most {self.window}")
        return {"choices": [self.completion(body)]}

    @torch.no_grad()
    def completion(self, body):
        lm, ids, made = self.pair.target_lm, list(body["prompt"]), []
        logits = lm.logits(lm.hidden_states(torch.tensor([ids]), use_cache=False)[0])
        warp = Warp(body["temperature"], body.get("top_k", 0), body.get("top_p", 1.0))
        stops = set() if body.get("ignore_eos") else {*self.pair.stop_tokens, *body.get("stop_token_ids", [])}
        numbers = torch.Generator().manual_seed(body.get("seed", 0))
        while len(made) < body["max_tokens"] and not (made and made[-1] in stops):
            read = torch.tensor([[*ids, *made]])
            probs = warp(lm.logits(lm.hidden_states(read, use_cache=False)[0, -1:]))
            made.append(int(torch.multinomial(probs, 1, generator=numbers)))
        ended = "stop" if made[-1] in stops else "length"
        return {"token_ids": made, "finish_reason": ended, "prompt_logprobs": self.along(ids, logits, body)}

    def along(self, ids, logits, body):
        if (count := body.get("prompt_logprobs")) is None:
            return None
        places = [None]
        for before, token in zip(logits.log_softmax(-1)[:-1], ids[1:], strict=True):
            order = before.argsort(descending=True).tolist()
            named = dict.fromkeys([token, *order[:count]])
            places.append({str(each): {"logprob": before[each].item(), "rank": order.index(each) + 1} for each in named})
        return places


@contextmanager
def serving(stand_in):
    """Yield the address of a server that runs on this machine meanwhile."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body):
            try:
                status, content = 200, stand_in.answer(self.path, body)
            except ValueError as error:
                status, content = 400, {"error": {"message": str(error)}}
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            pass

    class Listener(ThreadingHTTPServer):
        request_queue_size = 128  # clients that connect at once; the 5 of the standard library reset the others under load

    server = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
