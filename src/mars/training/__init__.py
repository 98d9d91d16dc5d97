"""Fine-tuning: `mars sft` (stage 1, plain AR) and `mars train` (stage 2, several tokens)."""
