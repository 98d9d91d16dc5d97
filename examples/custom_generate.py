"""Multi-token decoding on a stock `transformers` model, through its own `generate`."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from mars import custom_generate

folder = sys.argv[1]  # a checkpoint that `mars train` wrote
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
chat = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
# What it says is what `generate` alone would say. `threshold=0.9` would trade that for speed.
output = model.generate(**inputs, custom_generate=custom_generate, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
