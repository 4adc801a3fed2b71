"""Multi-token joint greedy decoding (MJGD): the target alone, by blocks of tokens whose joint probability is highest.

Joint verification approximates it, and its quality is the upper end of that rule's. It takes far more target forward passes than
tokens.
"""

import time
from collections.abc import Iterable, Sequence

import torch

from specheads.decoding.arguments import check_count
from specheads.decoding.drafting import DraftMemory
from specheads.decoding.engine import compile_ahead, make_engine
from specheads.decoding.records import Generation, Round
from specheads.decoding.session import Prompt, checked_window, end_flags, start_session
from specheads.decoding.stopping import FixedLength
from specheads.pair import Pair
from specheads.papers.mjsd.beam import Beam
from specheads.sampling import Warp, check_no_nan


class BlockSearch:
    """The target alone, `block` tokens at a time: the most likely ones that a beam search finds.

    Args:
        block: K, the tokens that are chosen together.
        beams: B, the beams of the search.

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
        lm = pair.target_lm
        memory = DraftMemory(block, lm.vocab_size, lm.probs_dtype, lm.device)
        self._search = Beam(beams).drafter(self.engine, warp or Warp(), self.rule, memory)
        self.is_warm = False

    def warm_up(self) -> float:
        """Compile, load or capture all that generation will run; return the seconds. The first generation does it otherwise."""
        start = time.perf_counter()
        compile_ahead([self.prepare])
        self.prepare()
        self.is_warm = True
        return time.perf_counter() - start

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepare all that generation will run, one step after another."""
        self._search.warm_up(self._end_flags(()))

    @torch.no_grad()
    def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, seed: int = 0, stop_tokens: Sequence[int] | None = None
    ) -> Generation:
        """Return the response to `prompt`; see SpeculativeDecoder.generate. The seed has no effect."""
        if not self.is_warm:
            self.warm_up()
        session = start_session(self.pair, prompt, max_new_tokens, seed, stop_tokens, (self.engine,))
        ends = self._end_flags(session.stop_tokens)
        state, rounds = self.rule.start_prompt(1, ends.device), []
        while session.finish_reason is None:
            start = session.clock.mark()
            block = self._search.draft(session.committed, state, session.num_open, session.verify_uniforms, ends)
            if block.nan:
                self.engine.clear()
            check_no_nan(self.pair.target_id, block.nan, len(session.response))
            # The last token is read with the next block, as a decoder's last token is read in the next round.
            self._search.keep(range(len(block.tokens) - 1))
            searched = session.clock.mark()
            emitted = session.commit(block.tokens.tolist())
            times = session.clock.read(start, searched, session.clock.mark())
            seconds = 0.0, times[1] - times[0], times[2] - times[1]
            rounds.append(Round(emitted, 0, 0, 0, 0, *seconds, num_target_calls=block.num_draft_calls))
        return session.finish(self.pair, rounds)

    def _end_flags(self, stop_tokens: Iterable[int]) -> torch.Tensor:
        return end_flags(self.pair.vocab_size, stop_tokens, self.pair.target_lm.device)
