"""The draft head of a gated adapter: every draft knows the token before it.

Shapes: B rows, M mask columns, D width, C candidate tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

CANDIDATES = 32
"""Tokens among which the head chooses: the most likely ones of the mask alone."""
_STRETCH = 128


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of the last dimension and their indices, as `torch.topk` does.

    Faster for a whole vocabulary: a stretch of it whose maximum is not among the `count` largest
    maxima holds none of them.
    """
    size = values.shape[-1]
    padded = F.pad(values, (0, -size % _STRETCH), value=float("-inf"))
    stretches = padded.unflatten(-1, (-1, _STRETCH))
    if stretches.shape[-2] <= count:
        return values.topk(count, dim=-1)
    best = stretches.amax(-1).topk(count, dim=-1).indices
    found = stretches.gather(-2, best[..., None].expand(*best.shape, _STRETCH)).flatten(-2)
    top, index = found.topk(count, dim=-1)
    return top, best.gather(-1, index // _STRETCH) * _STRETCH + index % _STRETCH


class DraftHead(nn.Module):
    """Let each draft know the token before it: z' = z + W_o silu(W_z z + W_e e).

    Masks predict in parallel, each blind to what the others chose. This small network corrects the
    hidden state z of a mask with the embedding e of the token that precedes its own (Samragh et
    al., arXiv 2507.11851, section 3.3; DSpark's Markov head). It runs draft by draft.
    """

    def __init__(self, model_width: int, width: int) -> None:
        super().__init__()
        self.from_hidden = nn.Linear(model_width, width)
        self.from_token = nn.Linear(model_width, width, bias=False)
        self.output = nn.Linear(width, model_width, bias=False)
        nn.init.zeros_(self.output.weight)  # starts as the identity

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Correct (..., D) hidden states with the (..., D) embeddings of the tokens before."""
        shape = hidden.shape[-1:]
        inner = self.from_hidden(F.rms_norm(hidden, shape))
        inner = inner + self.from_token(F.rms_norm(embedding, shape))
        return hidden + self.output(F.silu(inner))


@dataclass(frozen=True, slots=True)
class Correction:
    """The draft head of a model, with the hidden states of its last forward's masks."""

    hidden_BMD: Tensor
    head: DraftHead
    embedding_VD: Tensor
    output_VD: Tensor

    def logits(self, hidden_BD: Tensor, ids_BC: Tensor, previous_B: Tensor) -> Tensor:
        """Return corrected logits, float32 (B, C), of some tokens for one mask per row.

        Args:
            hidden_BD: of the mask.
            ids_BC: int64, the tokens.
            previous_B: int64, the token before the one the mask predicts.
        """
        dtype = self.head.output.weight.dtype
        corrected_BD = self.head(hidden_BD.to(dtype), self.embedding_VD[previous_B].to(dtype))
        return (self.output_VD[ids_BC].to(dtype) @ corrected_BD[..., None])[..., 0].float()
