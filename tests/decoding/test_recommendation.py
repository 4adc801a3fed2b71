import pytest
from fakes import tiny_pair

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, UserError, Warp
from specheads.decoding.decoder import recommended_rules
from specheads.decoding.verification import BlockVerification, TokenVerification


def head_with(recommended, size=8):
    return AcceptanceHead(HeadConfig(size, 0, recommended=recommended)).requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("block", BlockVerification), ("token", TokenVerification), (None, TokenVerification)],
)
def test_a_heads_config_decides_threshold_lengths_and_verification(name, rule):
    values = {"threshold": 0.3, "min_tokens": 2, "max_tokens": 6} | (
        {"verification": name} if name else {}
    )
    stopping, verification = recommended_rules(head_with(values))
    assert (stopping.threshold, stopping.min_tokens, stopping.max_tokens) == (0.3, 2, 6)
    assert type(verification) is rule


def test_a_decoder_with_what_a_head_recommends():
    pair = tiny_pair(12)
    head = head_with(
        {"threshold": 0.4, "max_tokens": 3, "verification": "block"}, pair.draft_lm.hidden_size
    )
    decoder = SpeculativeDecoder.recommended(pair, head, warp=Warp(0), engine="eager")
    assert decoder.stopping.head is head and isinstance(decoder.verification, BlockVerification)
    alone = SpeculativeDecoder(pair, warp=Warp(0), engine="eager").generate([1, 2, 3], 10)
    assert decoder.generate([1, 2, 3], 10).tokens.tolist() == alone.tokens.tolist()


def test_a_head_without_a_recommendation_is_refused():
    with pytest.raises(
        UserError, match=r"recommends no setting: specheads evaluate head=<folder> stores one"
    ):
        recommended_rules(head_with(None))


def test_a_head_whose_evaluation_recommends_another_setting_names_it():
    values = {"threshold": 0.4, "setting": "head_threshold(threshold=0.4)"}
    stopping, _ = recommended_rules(head_with(values | {"use": values["setting"]}))
    assert stopping.threshold == 0.4
    with pytest.raises(UserError, match=r"evaluation recommends draft_product\(0\.3\), not this"):
        recommended_rules(head_with(values | {"use": "draft_product(0.3)"}))


def test_a_verification_that_is_not_known_is_refused():
    with pytest.raises(
        UserError, match="recommends verification='typical'; expected one of token, block"
    ):
        recommended_rules(head_with({"threshold": 0.4, "verification": "typical"}))
