import torch
from hypothesis import given
from hypothesis import strategies as st

from mars.decoding.verify import align_right, count_accepted, find_group, take_group

rows_of_drafts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=4)


@given(rows_of_drafts, st.data())
def test_accepted_drafts_equal_a_plain_loop(rows: list[list[int]], data: st.DataObject) -> None:
    most = max(map(len, rows))
    choices = [
        data.draw(st.lists(st.integers(0, 2), min_size=most + 1, max_size=most + 1)) for _ in rows
    ]
    expected = []
    for drafts, choice in zip(rows, choices, strict=True):
        said = choice[most - len(drafts) :]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == said[accepted]:
            accepted += 1
        expected.append(accepted)
    assert count_accepted(torch.tensor(choices), align_right(rows)).tolist() == expected


def test_drafts_are_aligned_right() -> None:
    assert align_right([[7, 8], [], [9]]).tolist() == [[7, 8], [-1, -1], [-1, 9]]
    assert align_right([[], []]).shape == (2, 0)


def test_the_group_of_an_accept_length() -> None:
    groups = torch.tensor([[0, 2, 3], [1, -1, -1], [0, 2, 3], [-1, -1, -1]])
    number, there = find_group(torch.tensor([2, 1, 1, 0]), groups)
    assert there.tolist() == [True, True, False, False]
    assert number[:2].tolist() == [1, 0]


def test_masks_of_a_group_are_gathered_with_their_row() -> None:
    outputs = torch.arange(2 * 6).reshape(2, 6, 1)
    taken = take_group(outputs, torch.tensor([1, 2]), torch.tensor([3, 2]), 3)
    assert taken[0, :, 0].tolist() == [3, 4, 5]
    assert taken[1, :2, 0].tolist() == [10, 11]
