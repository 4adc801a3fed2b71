"""Multi-token joint greedy decoding (MJGD): the target alone, by blocks of tokens that it finds likeliest together.

What joint verification approximates, and the upper end of its quality: far more forwards of the target than tokens.
"""

import time
from collections.abc import Iterable, Sequence

import torch

from specheads.decoding.decoder import Prompt, checked_window, commit, ends_among, finish, start_session
from specheads.decoding.drafting import Beam, DraftMemory
from specheads.decoding.engine import make_engine
from specheads.decoding.records import Generation, Round
from specheads.decoding.stopping import FixedLength
from specheads.decoding.stopping.rule import check_count
from specheads.pair import Pair
from specheads.sampling import Warp, check_no_nan


class BlockSearch:
    """The target alone, `block` tokens at a time: the likeliest that a beam search finds.

    Args:
        block: K, tokens that are decided together.
        beams: B, of the search.

    Source: Qin et al. 2024 (multi-token joint speculative decoding), section 3.
    """

    lossless = False

    def __init__(
        self,
        pair: Pair,
        block: int = 4,
        beams: int = 8,
        warp: Warp | None = None,
        engine: str = "auto",
        window: int | None = None,
    ) -> None:
        check_count("block", block, least=1)
        check_count("beams", beams, least=1)
        self.pair, self.rule, window = pair, FixedLength(block), checked_window(pair, window)
        self.engine = make_engine(engine, pair.target_lm, window, Beam(beams).most_read(block))
        memory = DraftMemory(block, pair.target_lm, pair.target_lm.device)
        self._search = Beam(beams).drafter(self.engine, warp or Warp(), self.rule, memory)
        self.is_warm = False

    @torch.no_grad()
    def warm_up(self) -> float:
        """Compile, load or capture what generation will run; return the seconds it took. The first generation does it too."""
        start = time.perf_counter()
        self._search.warm_up(self._ends(()))
        self.is_warm = True
        return time.perf_counter() - start

    @torch.no_grad()
    def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, seed: int = 0, stop_tokens: Sequence[int] | None = None
    ) -> Generation:
        """Return the response to `prompt`; see SpeculativeDecoder.generate. The seed decides nothing."""
        if not self.is_warm:
            self.warm_up()
        stops = self.pair.stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        session, ends = start_session(self.pair, prompt, max_new_tokens, seed, (self.engine,)), self._ends(stops)
        state, rounds = self.rule.init(1, ends.device), []
        while session.finish_reason is None:
            start = session.clock()
            found = self._search.draft(
                session.committed, state, session.limit - len(session.committed), session.verify_draws, ends
            )
            if found.nan:
                self.engine.clear()
            check_no_nan(self.pair.target_id, found.nan)
            # The last token is read with the next block, as a decoder's own would be.
            self._search.keep(range(len(found.tokens) - 1))
            searched = session.clock()
            emitted = commit(session, found.tokens.tolist(), stops, max_new_tokens)
            own = {"draft_seconds": 0.0, "verify_seconds": searched - start, "commit_seconds": session.clock() - searched}
            rounds.append(Round(emitted, 0, 0, 0, 0, **own, num_target_calls=found.num_draft_calls))
        return finish(self.pair, session, rounds)

    def _ends(self, stops: Iterable[int]) -> torch.Tensor:
        return ends_among(self.pair.vocab_size, stops, self.pair.target_lm.device)
