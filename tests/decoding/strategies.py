"""Requests of every kind, for the property tests of decoding."""

from hypothesis import strategies as st

from mars.decoding.options import DecodingOptions

samplers = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.5, 1.0, 1.5]),
            "top_k": st.sampled_from([0, 8]),
            "top_p": st.sampled_from([1.0, 0.8]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "seed": st.integers(0, 5),
        }
    ),
)


def penalties(liked: int, disliked: int) -> st.SearchStrategy[dict]:
    """Draw none, a repetition penalty, the others, or a bias for one token and against another."""
    return st.sampled_from(
        [
            {},
            {},
            {"repetition_penalty": 1.3},
            {"presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"logit_bias": {liked: 3.0, disliked: -3.0}},
        ]
    )


def options(
    modes: st.SearchStrategy[dict],
    penalties: st.SearchStrategy[dict],
    stops: st.SearchStrategy[dict],
    most_tokens: int,
) -> st.SearchStrategy[DecodingOptions]:
    """Combine a mode, a sampler, penalties, stop rules and a budget."""
    return st.builds(
        lambda mode, sampler, penalty, stop, budget: DecodingOptions(
            **(mode | sampler | penalty | stop), max_new_tokens=budget
        ),
        modes,
        samplers,
        penalties,
        stops,
        st.integers(1, most_tokens),
    )
