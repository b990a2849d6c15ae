"""Converted checkpoints in Megatron: logits under every layout, and training on from them."""

from __future__ import annotations

import json
import sys
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_anchor.checkpoint.megatron_model import gpt_model, load_weights
from megatron_anchor.checkpoint.rows import Files
from megatron_anchor.checkpoint.to_hugging_face import convert_to_hugging_face
from megatron_anchor.checkpoint.to_megatron import ARGS_FILE, convert_to_megatron
from megatron_anchor.checkpoint.torch_dist_reader import TorchDistCheckpoint
from tests import tiny_llama
from tests.conversion_models import MODELS, hugging_face_model, weights_of
from tests.distributed.pretraining import TRAINING, read_scalars
from tests.distributed.ranks import run_ranks

S, ROWS = 64, 256
LAYOUTS = {
    1: {"TP1": (1, 1, None, 1)},
    2: {
        "TP2": (2, 1, None, 1),
        "PP2": (1, 2, None, 1),
        "PP2 interleaved": (1, 2, 2, 1),
        "EP2": (1, 1, None, 2),
    },
    4: {"TP2 PP2": (2, 2, None, 1)},
}
TOKENS = torch.randint(131, (S,), generator=torch.Generator().manual_seed(3))


def logits_of_rank(layouts, folders):
    """Give {(layout, model): (tensor-parallel rank, its share of the logits)} of last stages."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group(backend="gloo")
    found = {}
    for (layout, (tp, pp, vpp, ep)), biased in product(layouts.items(), (False, True)):
        # Megatron's experts have no biases where they are shared by tensor parallelism.
        sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
        mpu.initialize_model_parallel(
            tp, pp, vpp, **sizes | ({} if biased else {"expert_tensor_parallel_size": tp})
        )
        model_parallel_cuda_manual_seed(1)
        for name, folder in folders.items():
            if biased != name.startswith("gpt-oss"):
                continue
            with Files() as files:
                args = TorchDistCheckpoint(folder / "release", files).args()
            stages = [None] if vpp is None else list(range(vpp))
            chunks = [
                gpt_model(args, rows=ROWS, dtype=torch.float32, vp_stage=stage) for stage in stages
            ]
            load_weights(chunks, folder / "release")
            for chunk in chunks:
                chunk.eval()
            kept = []
            torch.no_grad()(get_forward_backward_func())(  # as Megatron evaluates
                forward_step_func=forward_step(kept),
                data_iterator=[iter(())] * len(chunks) if vpp else iter(()),
                model=chunks if vpp else chunks[0],
                num_microbatches=2,  # an interleaved pipeline needs one for each stage
                seq_length=S,
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
            if kept:
                share = mpu.get_tensor_model_parallel_rank(), kept[0]
                found[layout, name] = share
        mpu.destroy_model_parallel()
    return found


def forward_step(kept):
    """Give Megatron's schedules a step that keeps the logits of one document."""
    from megatron_anchor.attention.packed import pack_micro_batch

    def step(_, model):
        positions = torch.arange(S)[None]
        documents = torch.tensor([[0, S]], dtype=torch.int32)
        packed = pack_micro_batch(positions, documents, seq_length=S)
        output = model(TOKENS[None], positions, None, packed_seq_params=packed)
        return output, lambda logits, non_loss_data: kept.append(logits[0].clone())

    return step


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Every tiny model as a Megatron checkpoint, and Hugging Face's logits."""
    root = tmp_path_factory.mktemp("conversion")
    folders, logits = {}, {}
    for number, name in enumerate(MODELS):
        model = hugging_face_model(name)
        model.save_pretrained(root / f"hf{number}")
        folders[name] = root / f"megatron{number}"
        convert_to_megatron(root / f"hf{number}", folders[name], progress=False)
        with torch.no_grad():
            logits[name] = model(TOKENS[None]).logits[0]
    return folders, logits


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_logits_equal_hugging_face_under_every_layout(ranks, converted):
    folders, expected = converted
    results = run_ranks(logits_of_rank, ranks, LAYOUTS[ranks], folders)
    for layout, (tp, *_) in LAYOUTS[ranks].items():
        worst = {}
        for name, logits in expected.items():
            shares = dict(r[layout, name] for r in results if (layout, name) in r)
            assert sorted(shares) == list(range(tp)), f"{layout}, {name}: no logits"
            together = torch.cat([shares[rank] for rank in range(tp)], dim=-1)
            assert together[:, 131:].abs().max() == 0  # the vocabulary's filling
            worst[name] = float((together[:, :131] - logits).abs().max())
        print(f"{layout}: {max(worst.values()):.1e}")
        assert max(worst.values()) <= 1e-5, f"{layout}: {worst}"


def test_the_logits_of_another_model_would_be_noticed(converted):
    _, expected = converted
    assert (expected["llama"] - expected["mistral"]).abs().max() > 0.1


def train_and_keep(arguments):
    """Run the real program; give this rank's place and its weights as they were last saved."""
    from megatron.core import mpu
    from megatron.training import training

    from megatron_anchor import pretrain_gpt
    from tests.distributed.test_hugging_face_parity import global_name

    kept, save = {}, training.save_checkpoint

    def keep(iteration, model, *args, **kwargs):
        kept.clear()
        for chunk in model:
            module = chunk.module
            while not hasattr(module, "decoder"):
                module = module.module
            for name, parameter in module.named_parameters():
                kept[global_name(module, name)] = parameter.detach().clone()
        return save(iteration, model, *args, **kwargs)

    training.save_checkpoint = keep
    sys.argv = ["pretrain_gpt", *arguments]
    pretrain_gpt.main()
    return mpu.get_tensor_model_parallel_rank(), kept


def write_equal_documents(prefix, *, count, seed):
    """Write a corpus of one document over and over; a sample of S slots holds it and its anchor."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = torch.Generator().manual_seed(seed)
    document = torch.randint(2, tiny_llama.VOCAB, (S - 1,), generator=generator)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(count):
        builder.add_document(document, [S - 1])
    builder.finalize(f"{prefix}.idx")
    return document


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps from a converted model, distributed optimizer, TP2 x PP2."""
    root = tmp_path_factory.mktemp("trained")
    model = tiny_llama.hugging_face_llama()
    model.save_pretrained(root / "hf")
    convert_to_megatron(root / "hf", root / "megatron", progress=False, positions=512)
    document = write_equal_documents(root / "corpus", count=16, seed=7)
    flags = (root / "megatron" / ARGS_FILE).read_text().split()
    common = (
        f"{TRAINING} --seq-length {S} --data-path {root / 'corpus'} --transformer-impl local "
        f"--data-cache-path {root / 'cache'} --save-interval 1 --calculate-per-token-loss"
    ).split()
    ranks = run_ranks(
        train_and_keep,
        4,
        [
            *flags,
            *common,
            *f"--load {root / 'megatron'} --save {root / 'run'} --train-iters 3".split(),
            *f"--tensor-model-parallel-size 2 --tensorboard-dir {root / 'board'}".split(),
            *["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"],
        ],
    )
    inputs = torch.cat((torch.tensor([1]), document))
    with torch.no_grad():
        logits = model(inputs[None]).logits[0, :-1]
    loss = float(torch.nn.functional.cross_entropy(logits, document))
    return root, ranks, loss, [*flags, *common]


def test_the_first_loss_is_hugging_faces(trained):
    root, _, loss, _ = trained
    assert abs(read_scalars(root / "board")["lm loss"][1] - loss) < 1e-4


def test_the_exported_model_is_the_one_in_memory_bit_for_bit(trained, tmp_path):
    root, ranks, _, _ = trained
    convert_to_hugging_face(root / "run", tmp_path / "out", like=root / "hf", progress=False)
    exported = tiny_llama.megatron_weights(weights_of(tmp_path / "out"))
    seen = set()
    for rank, weights in ranks:
        for name, weight in weights.items():
            share = tiny_llama.tensor_parallel_shard(name, exported[name], rank=rank, size=2)
            assert torch.equal(weight, share), name
            seen.add(name)
    assert seen == set(exported)
    before = weights_of(root / "hf")
    after = weights_of(tmp_path / "out")
    assert all(not torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 512


def test_iterations_of_a_run_can_be_chosen_and_averaged(trained, tmp_path):
    root, _, _, _ = trained
    for iteration in (2, 3):
        convert_to_hugging_face(
            root / "run", tmp_path / str(iteration), iteration=iteration, progress=False
        )
    convert_to_hugging_face(root / "run", tmp_path / "mean", average=[2, 3], progress=False)
    second, third, mean = (weights_of(tmp_path / name) for name in ("2", "3", "mean"))
    for name, tensor in mean.items():
        assert not torch.equal(second[name], third[name])
        assert torch.equal(tensor, ((second[name].double() + third[name].double()) / 2).float())


def test_a_pretrained_checkpoint_starts_a_new_run(trained, tmp_path):
    root, _, loss, arguments = trained
    (tmp_path / "new").mkdir()
    [(_, weights)] = run_ranks(
        train_and_keep,
        1,
        [
            *arguments,
            *f"--pretrained-checkpoint {root / 'megatron'} --load {tmp_path / 'new'}".split(),
            *f"--save {tmp_path / 'new'} --tensorboard-dir {tmp_path / 'board'}".split(),
            *["--train-iters", "1"],
        ],
    )
    assert abs(read_scalars(tmp_path / "board")["lm loss"][1] - loss) < 1e-4
    assert weights
