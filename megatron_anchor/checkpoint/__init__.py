"""Checkpoints between Hugging Face and Megatron, exactly and with little memory."""
