"""The library's sampler against a plain one in float64."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cpu_kernels import LEVELS, backend
from support.draw_oracle import may_draw


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, float, int, float, float, float, str]:
    size = draw(st.one_of(st.integers(1, 40), st.sampled_from([1000, 5003])))
    spread = draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    logits = torch.randn(size, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))) * spread
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2  # many ties
    if draw(st.booleans()):
        logits = logits.to(torch.bfloat16)
    return (
        logits,
        draw(st.floats(0.1, 3.0)),
        draw(st.one_of(st.just(0), st.integers(1, size + 1))),
        draw(st.one_of(st.just(1.0), st.floats(0.01, 0.999))),
        draw(st.one_of(st.just(0.0), st.floats(0.0, 0.9))),
        draw(st.floats(0.0, 1.0, exclude_max=True)),
        draw(st.sampled_from(LEVELS)),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows())
def test_the_token_is_where_the_running_sum_passes_the_number(
    row: tuple[torch.Tensor, float, int, float, float, float, str],
) -> None:
    logits, temperature, top_k, top_p, min_p, number, level = row
    token = int(
        backend(level).row_ops.sample(
            logits.unsqueeze(0),
            temperature=torch.tensor([temperature]),
            top_k=torch.tensor([top_k], dtype=torch.int32),
            top_p=torch.tensor([top_p]),
            min_p=torch.tensor([min_p]),
            uniform=torch.tensor([number], dtype=torch.float64),
        )
    )
    assert may_draw(token, logits, temperature, top_k, top_p, min_p, number)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 3.0, math.inf, math.nan]), min_size=1, max_size=70),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(LEVELS),
)
def test_greedy_takes_what_torch_argmax_takes(values: list[float], dtype: torch.dtype, level: str) -> None:
    logits = torch.tensor([values], dtype=dtype)
    one = torch.ones(1)
    token = backend(level).row_ops.sample(
        logits,
        temperature=one * 0,
        top_k=one.to(torch.int32) * 5,
        top_p=one * 0.5,
        min_p=one * 0.1,
        uniform=one.double() * 0.9,
    )
    want = next((i for i, value in enumerate(values) if math.isnan(value)), values.index(max(values)))
    assert int(token) == want


def test_draws_follow_the_probabilities() -> None:
    """Uniform numbers on a grid hit each token as often as its probability says."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)).expand(20_000, 50)
    count = logits.shape[0]
    tokens = backend().row_ops.sample(
        logits,
        temperature=torch.full((count,), 0.8),
        top_k=torch.zeros(count, dtype=torch.int32),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        uniform=(torch.arange(count, dtype=torch.float64) + 0.5) / count,
    )
    got = torch.bincount(tokens, minlength=50).double() / count
    torch.testing.assert_close(got, torch.softmax(logits[0].double() / 0.8, 0), atol=2.0 / count, rtol=0.0)
