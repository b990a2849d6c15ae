"""AnchorAttention (arXiv 2411.13476) for Megatron-Core's GPT training."""

__version__ = "0.1.0"
