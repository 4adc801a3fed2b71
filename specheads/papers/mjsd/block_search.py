"""Multi-token joint greedy decoding (MJGD): the target alone, by blocks of tokens whose joint probability is highest.

Joint verification approximates it, and its quality is the upper end of that rule's. It takes far more target forward passes than
tokens.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from specheads.decoding.arguments import check_count
from specheads.decoding.clock import Clock, Mark
from specheads.decoding.decoder import Decoder
from specheads.decoding.engine import Engine, make_engine
from specheads.decoding.prompt_reader import PromptReader
from specheads.decoding.rows import Row, RowOutcome, RowsDecoder, checked_window
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.stopping import FixedLength
from specheads.errors import UserError
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.papers.mjsd.beam import Beam


class BlockSearch(Decoder):
    """The target alone, `block` tokens at a time: the most likely ones that a beam search finds. Seeds have no effect.

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
        self.pair, window = pair, checked_window(pair, window)
        search_engine = make_engine(engine, pair.target_lm, window, Beam(beams).most_read(block))
        self.single = RowsDecoder(pair, _SearchRounds(pair.target_id, search_engine, block, beams, warp or Warp()))

    def _batch_of(self, num_rows: int) -> RowsDecoder:
        raise UserError("BlockSearch decodes one prompt at a time; use max_batch=1.")


class _SearchRounds:
    """A block of the target's for one row."""

    def __init__(self, model_id: str, engine: Engine, block: int, beams: int, warp: Warp) -> None:
        self.engines: Sequence[Engine] = (engine,)
        self.readers: Sequence[PromptReader] = (PromptReader(engine),)
        self._model_id, self._rule, lm = model_id, FixedLength(block), engine.lm
        memory = DraftMemory(block, lm.vocab_size, lm.probs_dtype, lm.device)
        self._search = Beam(beams).drafter(engine, warp, self._rule, memory)

    def warm_up(self, ends: Tensor) -> None:
        self._search.warm_up(ends)

    def start(self, rows: Sequence[Row], target_hidden: Mapping[int, Tensor]) -> None:
        self._state = self._rule.start_prompt(1, self.engines[0].lm.device)

    def num_expected(self, row: Row) -> float | None:
        return None

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[RowOutcome], Mark]:
        (row,), drafted = rows, clock.mark()
        block = self._search.draft(row.committed, self._state, row.num_open, row.verify_uniforms, ends)
        # The last token is read with the next block, as a decoder's last token is read in the next round.
        self._search.keep(range(len(block.tokens) - 1))
        nan_in = self._model_id if block.nan else None
        return [RowOutcome(block.tokens.tolist(), nan_in=nan_in, num_target_calls=block.num_draft_calls)], drafted
