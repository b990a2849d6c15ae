"""The pieces that put AnchorAttention into Megatron's own pretraining loop."""
