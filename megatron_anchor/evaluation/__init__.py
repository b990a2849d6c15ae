"""Long-context evaluation: RULER-style tasks, averages over checkpoints, perplexity by position."""
