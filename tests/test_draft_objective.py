"""The draft objective against plain autograd, and its weights against their definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.draft_objective import DraftObjective, draft_loss, head_loss
from mars.errors import UserError

BLOCKS, OFFSETS, WIDTH, VOCABULARY, CLEAN = 7, 3, 6, 11, 9


def batch(seed: int):
    torch.manual_seed(seed)
    hidden = torch.randn(BLOCKS, OFFSETS, WIDTH, requires_grad=True)
    length = torch.randint(1, OFFSETS + 1, (BLOCKS, 1))
    is_real = torch.arange(OFFSETS) < length
    clean = torch.randn(CLEAN, WIDTH)
    source = torch.randint(0, CLEAN, (BLOCKS, OFFSETS))
    head = torch.randn(VOCABULARY, WIDTH)
    return hidden, is_real, clean, source, head


def plain_loss(hidden, is_real, clean, source, head, objective):
    teacher_log = F.linear(clean[source], head).log_softmax(-1)
    student_log = F.linear(hidden, head).log_softmax(-1)
    choice = teacher_log.argmax(-1)
    probability = student_log.detach().exp().gather(-1, choice[..., None])[..., 0]
    divergence = (teacher_log.exp() * (teacher_log - student_log)).sum(-1)
    return (objective.weights(probability, is_real) * divergence).sum()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    weighting=st.sampled_from(["uniform", "decay", "accept"]),
    chunk=st.integers(1, 30),
)
def test_loss_and_gradient_equal_autograd(seed, weighting, chunk):
    objective = DraftObjective(weighting=weighting, gamma=2.0)
    hidden, *rest = batch(seed)
    sums = draft_loss(hidden, *rest, objective, chunk_tokens=chunk)
    (gradient,) = torch.autograd.grad(3 * sums.loss, hidden)
    expected = plain_loss(hidden, *rest, objective)
    (expected_gradient,) = torch.autograd.grad(3 * expected, hidden)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), chunk=st.integers(1, 30))
def test_statistics_are_counted(seed, chunk):
    hidden, is_real, clean, source, head = batch(seed)
    with torch.no_grad():
        sums = draft_loss(
            hidden, is_real, clean, source, head, DraftObjective(), chunk_tokens=chunk
        )
    choice = F.linear(clean[source], head).argmax(-1)
    draft = F.linear(hidden, head).argmax(-1)
    correct, accepted, count = (torch.zeros(OFFSETS) for _ in range(3))
    for n in range(BLOCKS):
        survives = True
        for j in range(OFFSETS):
            if is_real[n, j]:
                hit = bool(draft[n, j] == choice[n, j])
                survives = survives and hit
                count[j] += 1
                correct[j] += hit
                accepted[j] += survives
    assert torch.equal(sums.correct, correct)
    assert torch.equal(sums.accepted, accepted)
    assert torch.equal(sums.count, count)


def test_accept_weights_are_the_derivative_of_the_accepted_length():
    """weight_j = a_j dE/da_j with E = a_1 + a_1 a_2 + ... and a = 0.3 + 0.7 p."""
    probability = torch.tensor([[0.2, 0.7, 0.5], [0.9, 0.1, 0.4]])
    real = torch.tensor([[True, True, True], [True, True, False]])
    accept = (0.3 + 0.7 * probability).requires_grad_()
    expected_length = (accept * real).cumprod(1).sum()
    (slope,) = torch.autograd.grad(expected_length, accept)
    weights = DraftObjective(weighting="accept").weights(probability, real)
    torch.testing.assert_close(weights, (accept * slope).detach())


def test_decay_and_uniform_weights():
    real = torch.tensor([[True, True], [True, False]])
    nothing = torch.zeros(2, 2)
    uniform = DraftObjective(weighting="uniform").weights(nothing, real)
    assert torch.equal(uniform, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    decay = DraftObjective(weighting="decay", gamma=2.0).weights(nothing, real)
    torch.testing.assert_close(decay, torch.tensor([[1.0, 0.60653], [1.0, 0.0]]))


@pytest.mark.parametrize("chunk", [3, 100])
def test_head_loss_equals_plain_computation(chunk):
    hidden, is_real, clean, source, head = batch(3)
    objective = DraftObjective(weighting="uniform")
    sums = draft_loss(hidden, is_real, clean, source, head, objective, num_candidates=4)
    embedding = torch.randn(VOCABULARY, WIDTH)
    previous = torch.randint(0, VOCABULARY, (BLOCKS, OFFSETS))
    mix = torch.randn(WIDTH, WIDTH, requires_grad=True)
    together = head_loss(
        hidden,
        is_real,
        previous,
        sums,
        lambda z, e: z + e @ mix,
        embedding,
        head,
        objective,
        chunk_tokens=chunk,
    )
    logits = F.linear(hidden + embedding[previous] @ mix, head)
    candidates = F.linear(hidden, head).topk(4).indices
    student = logits.gather(-1, candidates).log_softmax(-1)
    teacher = F.linear(clean[source], head).gather(-1, candidates).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1)
    expected = (divergence * is_real).sum()
    torch.testing.assert_close(together.loss - sums.loss, expected, rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(together.loss, mix)
    (expected_gradient,) = torch.autograd.grad(expected, mix)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)
    best = candidates.gather(-1, student.argmax(-1, keepdim=True))[..., 0]
    hits = (best == F.linear(clean[source], head).argmax(-1)) & is_real
    assert torch.equal(together.correct, hits.float().sum(0))


@pytest.mark.parametrize(
    ("options", "message"), [({"weighting": "linear"}, "weighting"), ({"gamma": 0.0}, "gamma")]
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        DraftObjective(**options)
