import torch

from mars.evaluation.environment import describe_environment


def test_every_entry_says_something():
    environment = describe_environment()
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert all(environment.values())
