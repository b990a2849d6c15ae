"""Documents of a tokenized corpus, packed into samples for AnchorAttention.

`index` says which slices of which documents make a sample, `layout` turns them into the arrays of
a training sample, `dataset` offers both as a Megatron dataset, `statistics` measures the result.
Nothing is imported here: `index`, `layout` and `statistics` need numpy and numba only.
"""
