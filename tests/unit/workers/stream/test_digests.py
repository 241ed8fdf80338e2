"""A trainer's history in constant size says the same as all digests."""

from streamrl_workers.stream.digests import EMPTY_CHAIN, History, composition_digest, extend_chain

STEPS = 2_500


def test_a_long_history_is_folded_and_its_chain_is_that_of_all_steps() -> None:
    history, digests = History(), []
    for step in range(STEPS):
        history = history.with_step([2 * step + 1, 2 * step])
        digests.append(composition_digest([2 * step, 2 * step + 1]))
    assert len(history) == STEPS
    assert (history.folded_steps, len(history.digests)) == (1_500, 1_000)
    assert extend_chain(history.chain, digests=history.digests) == extend_chain(EMPTY_CHAIN, digests=digests)


def test_a_chain_knows_the_order_of_its_steps() -> None:
    one, two = composition_digest([1]), composition_digest([2])
    assert extend_chain(EMPTY_CHAIN, digests=[one, two]) != extend_chain(EMPTY_CHAIN, digests=[two, one])
    assert extend_chain(EMPTY_CHAIN, digests=()) == EMPTY_CHAIN
