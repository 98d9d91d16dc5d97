"""The slow oracle: one row, no cache, the whole sequence through the stock model at every step.

As short and as plain as possible, so that it is obviously right. Tests hold every fast path to
its tokens. It takes requests of the exact mode as `ar`: that they must equal.
"""

import torch
from transformers import PreTrainedModel

from mars.decoding.accept import is_confident
from mars.decoding.request import Progress, Request, Result, TokenLogprob
from mars.decoding.sampling import MINUS_INFINITY, History, SamplingParams, choose, penalise


@torch.no_grad()
def reference(
    model: PreTrainedModel, request: Request, *, mask_token_id: int | None = None
) -> Result:
    """Decode one request; see `mars.decoding.loop.decode` for the arguments."""
    progress = Progress(request)
    while not progress.is_finished:
        prefix = list(progress.tokens)
        num_masks = progress.plan().num_masks if request.mode == "threshold" else 0
        masks = [mask_token_id] * num_masks
        # 1. One forward over [prefix ; masks]. The output at the last real token predicts the
        #    token at position p = len(prefix), the output at mask j the one at p + j.
        ids = torch.tensor([prefix + masks], device=model.device)
        logits_TV = model(ids, use_cache=False).logits[0].float().cpu()
        if mask_token_id is not None:
            logits_TV[:, mask_token_id] = MINUS_INFINITY
        # 2. Commit the first token; then drafts, until one is doubtful.
        committed: list[int] = []
        logprobs: list[TokenLogprob] = []
        for logits_V in logits_TV[len(prefix) - 1 :]:
            sequence = prefix + committed
            penalised = _penalise(logits_V, sequence, request)
            if committed and not _is_confident(penalised, request):
                break
            committed.append(_choose(penalised, len(sequence), request))
            if request.options.logprobs is not None:
                logprobs.append(_logprob(penalised, committed[-1], request.options.logprobs))
        # 3. Stop rules cut what lies behind the end of the text.
        progress.commit(committed, logprobs=logprobs)
    return progress.result(0.0, 0.0)


def _penalise(logits_V: torch.Tensor, sequence: list[int], request: Request) -> torch.Tensor:
    if request.logits_hook is not None:
        logits_V = request.logits_hook(sequence, logits_V)
    vocabulary = logits_V.shape[-1]
    params = SamplingParams.of([request.options], vocabulary)
    history = History.of(request.prompt_ids, vocabulary, "cpu")
    for token in sequence[len(request.prompt_ids) :]:
        history.add(torch.tensor([[token]]))
    return penalise(logits_V[None, None], params, history)


def _choose(penalised: torch.Tensor, position: int, request: Request) -> int:
    params = SamplingParams.of([request.options], penalised.shape[-1])
    return int(choose(penalised, params, torch.tensor([[position]])))


def _is_confident(penalised: torch.Tensor, request: Request) -> bool:
    threshold = torch.tensor(request.options.threshold)
    return bool(is_confident(penalised, threshold, request.options.confidence))


def _logprob(penalised: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    log_V = penalised.flatten().log_softmax(-1)
    top = log_V.argsort(descending=True)[:num_top].tolist()
    return TokenLogprob(
        token_id=token, logprob=float(log_V[token]), top={i: float(log_V[i]) for i in top}
    )
