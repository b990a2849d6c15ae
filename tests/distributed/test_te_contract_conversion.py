"""What Transformer Engine's layer spec asks of a checkpoint is what a conversion for it holds."""

from __future__ import annotations

import pytest
import torch

from tests import te_stand_in
from tests.conversion_models import hugging_face_model
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(not te_stand_in.is_usable(), reason=te_stand_in.MISSING)

NAMES = ("llama", "llama linear, all biases", "qwen2 tied", "qwen3", "mixtral", "qwen3 moe")


def asked_and_loaded(folders):
    """Build each model of Transformer Engine's layers; give the names it asks for and its bits."""
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_anchor.checkpoint import megatron_model
    from megatron_anchor.checkpoint.rows import Files, read_tensor
    from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint

    dist.init_process_group(backend="gloo")
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    found = {}
    for name, folder in folders.items():
        with Files() as files:
            args = TorchDistCheckpoint(folder / "release", files).args()
        gpt = megatron_model.gpt_model(
            args, rows=256, dtype=torch.float32, target="transformer_engine"
        )
        megatron_model.load_weights(gpt, folder / "release")
        asked = gpt.sharded_state_dict()
        apply_factories(asked)
        values = list(nested_values(asked))
        names = {v.unique_key if isinstance(v, ShardedObject) else v.key for v in values}
        with Files() as files:
            checkpoint = TorchDistCheckpoint(folder / "release", files)
            tensors = [v for v in values if not isinstance(v, ShardedObject)]
            for value in tensors:
                axes = value.prepend_axis_num
                rows = read_tensor(checkpoint.rows(value.key, value.global_offset[:axes]))
                first = value.global_offset[axes]
                stored = rows[first : first + len(value.data)]
                assert torch.equal(value.data, stored), value.key
        found[name] = names, len(tensors)
    return found


def test_every_name_is_there_and_every_weight_arrives(tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    from megatron_anchor.checkpoint.to_megatron import convert_to_megatron

    folders = {}
    for number, name in enumerate(NAMES):
        hugging_face_model(name).save_pretrained(tmp_path / f"hf{number}")
        folders[name] = tmp_path / f"megatron{number}"
        convert_to_megatron(
            tmp_path / f"hf{number}", folders[name], target="transformer_engine", progress=False
        )
    [found] = run_ranks(asked_and_loaded, 1, folders)
    for name, (asked, tensors) in found.items():
        metadata = FileSystemReader(folders[name] / "release").read_metadata()
        stored = set(metadata.state_dict_metadata) - {"common_state/shard_0_1"}
        assert asked == stored, name
        assert tensors >= 2 + 6 * 4
