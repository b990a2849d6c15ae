# This package in NVIDIA's PyTorch container: docs/containers.md.
#
#   docker build --tag anchor .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -it anchor
#
# Any tag with Python 3.12 and numpy 2 will do.
ARG BASE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE}
ARG EXTRAS="plot zstd fast"

WORKDIR /opt/megatron-anchor
COPY . .
# Nothing that the container brings is replaced: torch, Transformer Engine, flash-attn, numpy, ...
RUN tools/install_in_container.sh ${EXTRAS} \
    && python3 -c "import torch, megatron.core, megatron_anchor" \
    && megatron-anchor --version
WORKDIR /workspace
