import pytest

from mars.evaluation.agreement import agreement


@pytest.mark.parametrize(
    ("answers", "references", "wanted"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], (1.0, 1.0)),
        ([[1, 2, 3]], [[1, 9, 3]], (1 / 3, 0.0)),
        ([[1, 2]], [[1, 2, 3, 4]], (0.5, 0.0)),
        ([[9], [1, 2, 3]], [[8], [1, 2, 3]], (0.75, 0.5)),
    ],
)
def test_agreement(answers, references, wanted):
    assert agreement(answers, references) == pytest.approx(wanted)
    assert agreement(references, answers) == pytest.approx(wanted)
