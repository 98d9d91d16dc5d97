"""The paper's decoding of batches, with a cache of whole blocks: a baseline for our own.

Source: MARS (arXiv 2604.07023), section 4.5 and figure 4, and the authors' code as far as the paper
leaves things open. It runs on our runner and decides by our code, so that a comparison with our
threshold mode is one of the methods:

    1. Read the prompts.
    2. Fill a block of B tokens, row by row:
       a. Feed all tokens of the block so far again, and masks up to its end (no more than were
          trained). The cache before the block stays as it is.
       b. Commit the AR token, then masks' tokens from the left while their confidence is >= tau.
       c. A row that has filled its block waits for the others (the barrier).
    3. One more forward writes the filled blocks into the cache. Go on with 2.

The prompts of a batch start together, and the next batch starts when all of them have ended.

Where the authors' code and this differ, this is cheaper:

- The prompt is read by the first forward that has masks, not by one of its own.
- A last mask whose prediction lies behind the block is not fed. In its place stands the last token
  before the block, whose output is the block's first token: a full block takes B columns in both.
- A waiting row feeds one column, which our runner cannot leave out; theirs feeds the whole block.
- A row that has ended leaves the batch, in the middle of a block too; theirs runs on to the end of
  the batch. The last blocks are not written.
- Nothing is copied: the runner forgets what lies behind the start of the block.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from mars.checkpoint import Checkpoint
from mars.decoding.generate import prepare
from mars.decoding.options import DecodingOptions
from mars.decoding.plain import decide_outputs
from mars.decoding.plan import RowPlan
from mars.decoding.request import Progress, Prompt, Request, Result
from mars.decoding.row import Event, Row
from mars.decoding.step import StepParams
from mars.engine.runner import Runner
from mars.errors import UserError


def generate_block_cache(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    *,
    threshold: float | None = 0.9,
    block_size: int | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    raw: bool = False,
) -> list[Result]:
    """Generate answers as the paper does for batches.

    Args:
        checkpoint: from `mars.load`.
        prompts: as for `mars.generate`, always a list.
        threshold: tau; None or at least 1 commits one token per forward.
        block_size: B, tokens per block of the cache; None is the block size of the training.
        max_new_tokens: most tokens to generate.
        batch_size: prompts that start together.
        raw: continue text as it stands, without the chat template.

    Returns:
        Results in the order of the prompts. Their `forwards` count those that have written blocks,
        and no forward in which a row only waited: so they do not depend on the batch.

    Raises:
        UserError: an option or a prompt is not valid, or does not fit the model.
    """
    requests = [
        prepare_block_cache(
            *(checkpoint, prompt),
            threshold=threshold,
            block_size=block_size,
            max_new_tokens=max_new_tokens,
            raw=raw,
        )
        for prompt in prompts
    ]
    events = decode_block_cache(
        checkpoint.model,
        requests,
        block_size=_block_size(checkpoint, block_size),
        mask_token_id=None if checkpoint.mars is None else checkpoint.mars.mask_token_id,
        batch_size=batch_size,
    )
    results = {event.index: event.result for event in events if event.result is not None}
    return [results[index] for index in range(len(requests))]


def prepare_block_cache(
    checkpoint: Checkpoint,
    prompt: Prompt,
    *,
    threshold: float | None,
    block_size: int | None,
    max_new_tokens: int,
    raw: bool = False,
) -> Request:
    """Make a request; arguments and errors as for `generate_block_cache`."""
    # Behind the first token of a block, B - 1 are left to predict.
    window = _block_size(checkpoint, block_size) - 1
    if checkpoint.mars is not None:
        window = min(window, checkpoint.mars.block_size)
    options = DecodingOptions(
        mode="threshold", threshold=threshold, window=window, max_new_tokens=max_new_tokens
    )
    return prepare(checkpoint, prompt, options, raw=raw)


def decode_block_cache(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    block_size: int,
    mask_token_id: int | None = None,
    batch_size: int = 8,
) -> Iterator[Event]:
    """Decode requests batch by batch; yield what happens as it happens.

    Args:
        model: a stock causal language model in eval mode.
        requests: from `prepare_block_cache`.
        block_size: B, tokens per block of the cache.
        mask_token_id: as for `mars.decoding.loop.decode`.
        batch_size: requests that start together.
    """
    if not requests:
        return
    runner = Runner(
        model,
        num_rows=min(batch_size, len(requests)),
        max_positions=max(len(r.prompt_ids) + r.options.max_new_tokens for r in requests),
        mask_token_id=mask_token_id,
    )
    for first in range(0, len(requests), batch_size):
        batch = [
            _BlockRow(Row(index, Progress(request), None, None, time.perf_counter()), block_size)
            for index, request in enumerate(requests[first : first + batch_size], start=first)
        ]
        for _ in batch:
            runner.add_row()
        while batch:
            yield from _fill_blocks(runner, batch, mask_token_id)
            if batch:
                _write_blocks(runner, batch)


@dataclass(slots=True)
class _BlockRow:
    """A row of the batch, and where its block lies."""

    row: Row
    block_size: int
    cached: int = 0
    """Tokens that steps in the block need not feed: all before the block but the last."""
    block_end: int = 0
    """Length of the text when the block is full."""

    def __post_init__(self) -> None:
        self.open_block()

    @property
    def tokens(self) -> list[int]:
        return self.row.progress.tokens

    @property
    def is_waiting(self) -> bool:
        return len(self.tokens) == self.block_end

    def open_block(self) -> None:
        """Let the next block begin behind all the tokens there are."""
        self.cached = len(self.tokens) - 1
        self.block_end = len(self.tokens) + self.block_size

    def plan(self) -> RowPlan:
        """Plan a step in the block."""
        progress = self.row.progress
        if self.is_waiting or progress.request.mode == "ar":
            return RowPlan()
        room = min(self.block_end - len(self.tokens), progress.budget) - 1
        window = min(progress.request.window, room)
        return RowPlan(groups=(0,), window=window) if window > 0 else RowPlan()


def _fill_blocks(
    runner: Runner, batch: list[_BlockRow], mask_token_id: int | None
) -> Iterator[Event]:
    """Step until every row has filled its block; those that end leave."""
    params = None
    while not all(block.is_waiting for block in batch):
        plans = [block.plan() for block in batch]
        progress = [block.row.progress for block in batch]
        outputs = runner.run(0, [block.tokens for block in batch], plans)
        if params is None or len(params.threshold_B1) != len(batch):
            logits = outputs[0]
            requests = [row.request for row in progress]
            params = StepParams.of(requests, logits.shape[-1], logits.device)
        decisions = decide_outputs(
            outputs, runner.model, progress, plans, params, [], mask_token_id
        )
        now = time.perf_counter()
        for block, decision in zip(batch, decisions, strict=True):
            if not block.is_waiting:
                yield block.row.commit(decision, now)
        for number in reversed(range(len(batch))):
            if batch[number].row.progress.is_finished:
                runner.drop_row(number)  # the last row takes its number
                last = batch.pop()
                if number < len(batch):
                    batch[number] = last
        # The next step feeds the block again. A waiting row must feed something.
        runner.cached = [
            len(block.tokens) - 1 if block.is_waiting else block.cached for block in batch
        ]


def _write_blocks(runner: Runner, batch: Sequence[_BlockRow]) -> None:
    """Write the filled blocks into the cache, up to the token that the next steps feed."""
    runner.cached = [block.cached for block in batch]
    runner.read(0, [block.tokens[:-1] for block in batch])
    for block in batch:
        block.row.progress.histogram[0] += 1  # a forward that has committed nothing
        block.open_block()


def _block_size(checkpoint: Checkpoint, wanted: int | None) -> int:
    if wanted is None and checkpoint.mars is not None:
        return checkpoint.mars.block_size
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise UserError(f"block_size must be an integer of at least 1; got {wanted!r}.")
    return wanted
