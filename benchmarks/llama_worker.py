"""llama.cpp behind JSON lines: started by `llama_client.py`, in an interpreter that has it.

    python llama_worker.py MODEL.gguf THREADS CONTEXT

Token ids come in and go out, so that tokenizer and chat template are the caller's.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path


def peak_bytes() -> int:
    """Return the most memory this process has taken, not counting the one that started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def generate(model, request: dict) -> dict:
    """Decode one prompt greedily, from an empty cache."""
    started = time.perf_counter()
    model.reset()  # else the beginning that all chats have in common would be there already
    token_ids, times = [], []
    for token in model.generate(request["token_ids"], temp=0.0, repeat_penalty=1.0):
        token_ids.append(token)
        times.append(time.perf_counter() - started)
        if token in request["end_ids"] or len(token_ids) == request["max_new_tokens"]:
            break
    return {"token_ids": token_ids, "times": times}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer

    def tell(**answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    gguf, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        import llama_cpp

        model = llama_cpp.Llama(
            gguf, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
        )
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
        return
    tell(version=llama_cpp.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        if "peak" in request:
            tell(peak_bytes=peak_bytes())
        else:
            tell(**generate(model, request))


if __name__ == "__main__":
    main()
