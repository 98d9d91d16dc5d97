"""Three lines: load, generate, look at the speed."""

import sys

from mars import generate, load

checkpoint = load(sys.argv[1] if len(sys.argv) > 1 else None)
result = generate(checkpoint, "Why is the sky blue?", max_new_tokens=64)
print(result.text)
print(f"{result.tokens_per_forward:.2f} tokens per forward, {result.finish_reason}")
