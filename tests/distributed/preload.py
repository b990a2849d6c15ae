"""What every forked rank needs, imported once: torch, Megatron and the CPU replacements."""

import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402

torch.set_num_threads(1)

from megatron_anchor import on_cpu  # noqa: E402

on_cpu.enable()

from tests import te_stand_in  # noqa: E402

if te_stand_in.is_usable():  # before Megatron, which imports Transformer Engine
    te_stand_in.install()

import megatron.core.tokenizers.text  # noqa: E402
import megatron.training.training  # noqa: E402, F401
import torch.utils.tensorboard  # noqa: E402

import megatron_anchor.training.forward_step  # noqa: E402
import megatron_anchor.training.providers  # noqa: E402, F401
