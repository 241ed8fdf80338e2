"""Random numbers and draws: uniformity, independence of the batch, filters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.generator.engines.hf.batch_state import Draw, as_int64, draw_tokens, stream_key, uniforms

MASK = 2**64 - 1


def splitmix64(key: int, position: int) -> int:
    """The published algorithm, in Python's integers."""
    z = (key + position * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@given(seed=st.integers(0, MASK), position=st.integers(0, 2**31))
def test_uniforms_are_splitmix64(seed: int, position: int) -> None:
    key = stream_key(seed)
    got = uniforms(torch.tensor([key]), positions_b=torch.tensor([position])).item()
    assert got == (splitmix64(key & MASK, position) >> 11) / 2**53
    assert 0 <= got < 1


@given(value=st.integers(-(2**63), MASK))
def test_as_int64_keeps_the_bits(value: int) -> None:
    assert as_int64(value) & MASK == value & MASK
    assert -(2**63) <= as_int64(value) < 2**63


def test_uniforms_are_uniform_along_seeds_and_positions() -> None:
    keys = torch.tensor([stream_key(seed) for seed in range(2000)])
    first = uniforms(keys, positions_b=torch.zeros_like(keys))
    along = uniforms(keys[:1].expand(2000), positions_b=torch.arange(2000))
    for sample in (first, along):
        counts = torch.histc(sample, bins=20, min=0, max=1)
        assert ((counts - 100) ** 2 / 100).sum() < 45  # chi-square, 19 degrees, p = 0.001
    assert abs(torch.corrcoef(torch.stack([first, along]))[0, 1]) < 0.08


LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -4.0]])


def draws(
    *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 6, rows: int = 20_000
) -> tuple[torch.Tensor, torch.Tensor]:
    draw = Draw(
        uniforms_b=(torch.arange(rows, dtype=torch.float64) + 0.5) / rows,
        temperature_b=torch.full((rows,), temperature),
        top_p_b=torch.full((rows,), top_p, dtype=torch.float64),
        top_k_b=torch.full((rows,), top_k),
    )
    return draw_tokens(LOGITS.expand(rows, -1), draw)


def expected_shares(*, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """An independent reference, token by token."""
    probs = (LOGITS[0].double() / temperature).softmax(-1).tolist()
    ranked = sorted(range(6), key=lambda t: -probs[t])[:top_k]
    total, kept, before = sum(probs[t] for t in ranked), {}, 0.0
    for token in ranked:
        if before < top_p * total:
            kept[token] = probs[token]
        before += probs[token]
    return torch.tensor([kept.get(t, 0.0) / sum(kept.values()) for t in range(6)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_shares_are_those_of_the_filtered_distribution(temperature: float, top_p: float, top_k: int) -> None:
    tokens, logprobs = draws(temperature=temperature, top_p=top_p, top_k=top_k)
    shares = torch.bincount(tokens, minlength=6) / len(tokens)
    assert torch.allclose(shares, expected_shares(temperature=temperature, top_p=top_p, top_k=top_k), atol=2e-4)
    unfiltered = (LOGITS[0] / temperature).log_softmax(-1)
    assert torch.allclose(logprobs, unfiltered[tokens], atol=1e-6)


def test_greedy_rows_beside_sampled_ones() -> None:
    draw = Draw(
        uniforms_b=torch.tensor([0.99999, 0.99999]).double(),
        temperature_b=torch.tensor([0.0, 1.0]),
        top_p_b=None,
        top_k_b=None,
    )
    tokens, logprobs = draw_tokens(LOGITS.expand(2, -1), draw)
    assert tokens.tolist() == [0, 5]
    assert torch.allclose(logprobs, LOGITS[0].log_softmax(-1)[tokens])


@settings(max_examples=50)
@given(data=st.data())
def test_a_row_does_not_depend_on_the_others(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 9))
    logits = torch.randn(rows, 11, generator=torch.Generator().manual_seed(rows))
    draw = Draw(
        uniforms_b=torch.tensor(
            data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=rows, max_size=rows))
        ).double(),
        temperature_b=torch.rand(rows) + 0.5,
        top_p_b=torch.rand(rows).double().clamp(0.05),
        top_k_b=torch.randint(1, 12, (rows,)),
    )
    tokens, _ = draw_tokens(logits, draw)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = Draw(
            uniforms_b=draw.uniforms_b[one],
            temperature_b=draw.temperature_b[one],
            top_p_b=draw.top_p_b[one],
            top_k_b=draw.top_k_b[one],
        )
        assert draw_tokens(logits[one], alone)[0].item() == tokens[row]


def test_extreme_uniforms_stay_within_the_kept_tokens() -> None:
    for uniform in (0.0, 1 - 2.0**-53):
        draw = Draw(
            uniforms_b=torch.tensor([uniform]).double(),
            temperature_b=None,
            top_p_b=torch.tensor([0.7]).double(),
            top_k_b=torch.tensor([3]),
        )
        tokens, _ = draw_tokens(LOGITS.flip(-1), draw)
        assert tokens.item() in (3, 4, 5)
