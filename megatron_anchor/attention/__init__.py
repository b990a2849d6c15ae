"""Attention over packed documents: rotation, masks, the core module and its kernels."""
