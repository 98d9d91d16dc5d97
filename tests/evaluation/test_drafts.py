import pytest

from mars.decoding.request import DraftOutcome
from mars.evaluation.drafts import acceptance_by_offset, calibration_error


def test_acceptance_by_offset():
    outcomes = [
        DraftOutcome(1, 0.9, True),
        DraftOutcome(2, 0.9, False),
        DraftOutcome(1, 0.2, False),
    ]
    assert acceptance_by_offset(outcomes) == [0.5, 0.0]
    assert acceptance_by_offset([DraftOutcome(2, 0.5, True)]) == [0.0, 1.0]
    assert acceptance_by_offset([]) == []


def test_calibration_error():
    sure = [DraftOutcome(1, 0.8, i < 8) for i in range(10)]
    assert calibration_error(sure) == pytest.approx(0.0)
    too_sure = [DraftOutcome(1, 1.0, i < 8) for i in range(10)]
    assert calibration_error(too_sure) == pytest.approx(0.2)
    # Bins do not cancel out: half too sure by 0.2, half too shy by 0.2.
    shy = [DraftOutcome(1, 0.0, i < 2) for i in range(10)]
    assert calibration_error(too_sure + shy) == pytest.approx(0.2)
    assert calibration_error([]) == 0.0
