"""Decode requests that are all known from the start."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from mars.decoding.request import Request
from mars.decoding.row import Event
from mars.decoding.scheduler import Scheduler


def decode(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    mask_token_id: int | None = None,
    batch_size: int = 8,
    prefill_chunk: int = 512,
) -> Iterator[Event]:
    """Decode requests, at most `batch_size` at a time; yield what happens as it happens.

    Args:
        model: a stock causal language model in eval mode.
        requests: valid for this model (`generate` sees to that).
        mask_token_id: fed at masks, never committed; None for a model without one, and for an
            adapter with embeddings of its own.
        batch_size: rows that run together. A row that ends makes room for the next request.
        prefill_chunk: longest stretch of a prompt that one forward reads.
    """
    if not requests:
        return
    scheduler = Scheduler(
        model,
        max_rows=min(batch_size, len(requests)),
        max_positions=max(len(r.prompt_ids) + r.options.max_new_tokens for r in requests),
        mask_token_id=mask_token_id,
        prefill_chunk=prefill_chunk,
        all_known=True,
    )
    for index, request in enumerate(requests):
        scheduler.add(index, request)
    while not scheduler.is_idle:
        for event in scheduler.step():
            if event.error is not None:
                raise event.error
            yield event
