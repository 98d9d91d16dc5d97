"""Teach a causal language model to compute the MARS objective in its own forward.

The loss is computed inside `model(...)`, so that the hooks of DDP, FSDP and DeepSpeed see every
parameter where they expect it, whatever wraps the model.
"""

from types import MethodType
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig, PreTrainedModel

from mars.errors import UserError
from mars.mask_token import output_head
from mars.masks import block_mask, dense_mask
from mars.objective import LossSums, Objective, stream_loss
from mars.streams import Streams


def check_plain_head(config: PretrainedConfig) -> None:
    """Refuse models that rescale or cap their logits after the output layer."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(config, name, None)
        if value is not None and value != 1.0:
            raise UserError(
                f"{config.model_type!r} applies {name}={value} to its logits, which training does "
                "not support yet."
            )


def add_stream_forward(model: PreTrainedModel) -> None:
    """Let `model(streams=..., objective=..., block_size=...)` return LossSums.

    Every other call goes to the model's own forward. `remove_stream_forward` undoes it.
    """
    original = model.forward

    def forward(
        self: PreTrainedModel,
        *args: Any,
        streams: Streams | None = None,
        objective: Objective | None = None,
        block_size: int = 0,
        **kwargs: Any,
    ) -> Any:
        if streams is None or objective is None:
            return original(*args, **kwargs)
        return run_streams(self, streams, objective, block_size=block_size)

    model.forward = MethodType(forward, model)


def remove_stream_forward(model: PreTrainedModel) -> None:
    """Restore the class's forward."""
    model.__dict__.pop("forward", None)


def run_streams(
    model: PreTrainedModel, streams: Streams, objective: Objective, *, block_size: int
) -> LossSums:
    """Run both streams through the decoder in one forward and sum the losses."""
    hidden = model.get_decoder()(
        input_ids=streams.input_ids,
        attention_mask=attention_mask(streams, str(model.config._attn_implementation)),
        position_ids=streams.position_ids,
        use_cache=False,
    ).last_hidden_state
    return stream_loss(hidden, streams, output_head(model), objective, block_size=block_size)


def attention_mask(streams: Streams, implementation: str) -> Tensor | BlockMask:
    """Return the mask in the form the attention implementation takes."""
    if implementation == "flex_attention":
        return block_mask(streams)
    if implementation == "sdpa":
        return dense_mask(streams)
    raise UserError(
        f"Attention implementation {implementation!r} cannot express the two streams; use 'sdpa' "
        "or 'flex_attention'."
    )
