"""No tensor of a training step holds logits for more outputs than one chunk."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mars.objective import CHUNK_TOKENS, Objective
from mars.streams import IGNORE
from mars.training.forward import run_streams
from mars.training.trainer import training_streams
from tests.conftest import make_model

VOCABULARY = 1031  # a prime: no other tensor has this width


class LargestLogits(TorchDispatchMode):
    """Record the most rows of any [rows, V] tensor that an operation returns."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCABULARY,):
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return output


def test_logits_never_exist_for_both_streams_at_once():
    model = make_model(vocab_size=VOCABULARY).train()
    length = 400
    ids = torch.randint(4, VOCABULARY, (4, length))
    labels = ids.clone()
    labels[:, :10] = IGNORE
    batch = {
        "input_ids": ids,
        "labels": labels,
        "document_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(length).expand_as(ids),
        "example_ids": torch.zeros_like(ids),
    }
    streams = training_streams(batch, block_size=4, mask_token_id=3, seed=0, step=0)
    for objective in (Objective(), Objective(masked_loss="distill")):
        with LargestLogits() as largest:
            run_streams(model, streams, objective, block_size=4).loss.backward()
        assert 0 < largest.rows <= CHUNK_TOKENS < streams.input_ids.numel()
