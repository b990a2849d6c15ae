"""RULER by lm-evaluation-harness: its own tasks and prompts, and its scores but for `qa`.

Its tasks make their prompts themselves. Those with essays or questions download these, which needs
a network; `niah_single_1`, `niah_multikey_2`, `niah_multikey_3`, `vt` and `fwe` do not.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_anchor.checkpoint import anchored_tokenizer, tokenizer_files
from megatron_anchor.checkpoint.model_folder import own_code
from megatron_anchor.checkpoint.pretrained import check_weights
from megatron_anchor.errors import UserError
from megatron_anchor.evaluation import scoring
from megatron_anchor.evaluation.models import Placement
from megatron_anchor.terminal import logger_of

INSTALL = 'pip install "lm-eval[hf,ruler]"'
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Those that the harness' tasks have a metric for."""

PROMPTS = 500
"""Samples that a task makes for each length; their numbers run on from length to length."""

NAMES: dict[str, tuple[str, ...]] = {
    "vt": ("ruler_vt",),
    "cwe": ("ruler_cwe",),
    "fwe": ("ruler_fwe",),
    "qa": ("ruler_qa_squad", "ruler_qa_hotpot"),
    "qa_squad": ("ruler_qa_squad",),
    "qa_hotpot": ("ruler_qa_hotpot",),
}
"""Our names to the harness' where they differ."""

DOWNLOADS = (
    *("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"),
    *("ruler_qa_squad", "ruler_qa_hotpot"),
)
"""The harness' tasks that need a network."""


@dataclass(frozen=True)
class HarnessJob:
    """What is asked of the harness for one checkpoint."""

    folder: Path
    tokenizer: Path
    lengths: Sequence[int]
    num_samples: int
    seed: int
    batch_size: int
    placement: Placement
    """A resolved one."""
    first_token: Sequence[int] = ()
    """What prompts begin with: the tokenizer puts it there if it is told to add special tokens."""

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of the harness' ``HFLM``."""
        return {
            "pretrained": str(self.folder),
            "tokenizer": str(self.tokenizer),
            "dtype": self.placement.dtype,
            "attn_implementation": self.placement.attention,
            "add_bos_token": bool(self.first_token),
            "trust_remote_code": False,
            "max_length": max(self.lengths),
            "batch_size": self.batch_size,
            "device": self.placement.device,
        }

    def task_arguments(self, task: str) -> dict[str, Any]:
        """Arguments of ``simple_evaluate`` for one of the harness' tasks."""
        numbers = [
            place * PROMPTS + index
            for place in range(len(self.lengths))
            for index in range(self.num_samples)
        ]
        seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        return {
            "tasks": [task],
            "samples": {task: numbers},
            "metadata": {
                "pretrained": str(self.folder),
                "tokenizer": str(self.tokenizer),
                "max_seq_lengths": list(self.lengths),
            },
            "batch_size": self.batch_size,
            "device": self.placement.device,
            "log_samples": True,
            "bootstrap_iters": 0,
            **dict.fromkeys(seeds, self.seed),
        }


def harness_names(tasks: Sequence[str]) -> list[str]:
    """Give the harness' names of our tasks."""
    return list(dict.fromkeys(name for task in tasks for name in NAMES.get(task, (task,))))


def check_harness(lengths: Sequence[int], *, num_samples: int) -> None:
    """Check that the harness is there and can do what is asked.

    Raises:
        UserError: saying what to install or to change.
    """
    others = [length for length in lengths if length not in LENGTHS]
    if others:
        raise UserError(
            f"--seq-lengths {others[0]}: the harness' ruler tasks have scores for "
            f"{', '.join(map(str, LENGTHS))} alone; --engine hf takes any length"
        )
    if num_samples > PROMPTS:
        raise UserError(
            f"--num-samples {num_samples}: the harness' ruler tasks have {PROMPTS} for each length"
        )
    try:
        import accelerate  # noqa: F401
        import lm_eval  # noqa: F401
        import nltk  # noqa: F401
        import wonderwords  # noqa: F401
    except ImportError as error:
        raise UserError(f"--engine lm-eval: {error}; {INSTALL}") from error


@contextlib.contextmanager
def tokenizer_with(folder: Path, first: Sequence[int]) -> Iterator[Path]:
    """Give a tokenizer's folder that puts the first token in front of prompts, for the harness.

    The harness can only tell a tokenizer whether to add its special tokens, not which. So it gets a
    copy that adds the wanted one.

    Args:
        folder: of the tokenizer, left as it is.
        first: the wanted token; empty: none, for which no copy is needed.

    Raises:
        UserError: if the tokenizer cannot be made to do so.
    """
    if not first:
        yield folder
        return
    if len(first) > 1:
        raise UserError(
            f"--engine lm-eval: the tokenizer of {folder} puts {list(first)} first, and the "
            "harness can be given one token; name one with --first-token"
        )
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as made:
        copied = Path(made)
        tokenizer_files.copy_tokenizer(folder, copied)
        if (folder / "config.json").is_file():  # names the tokenizer's class
            shutil.copyfile(folder / "config.json", copied / "config.json")
        try:
            anchored_tokenizer.add_anchor(copied, first[0], chats=False)
        except UserError as error:
            raise UserError(
                f"--engine lm-eval, --first-token {first[0]}: {error.__cause__ or error}; take "
                "--engine hf or --first-token none"
            ) from error
        yield copied


def check_code(job: HarnessJob) -> None:
    """Check that no folder asks for code of its own: the harness' RULER tasks would run it.

    Raises:
        UserError: naming the file.
    """
    for folder in (job.tokenizer, job.folder):
        if name := own_code(folder):
            raise UserError(
                f"{folder / name} has an auto_map: lm-eval's RULER tasks would run the folder's "
                "own Python code; remove it from a copy, or use --engine hf, which never runs it"
            )


def load_harness_model(job: HarnessJob) -> Any:
    """Load the model as the harness does.

    Raises:
        UserError: if it does not load, or lm-eval would run code of its folder.
        UserError: if its weights are damaged or hold code.
    """
    check_code(job)
    check_weights(job.folder)
    from lm_eval.models.huggingface import HFLM

    try:
        return HFLM(**job.model_arguments())
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"{job.folder} does not load in lm-eval: {error}") from error


def run_harness(model: Any, job: HarnessJob, task: str) -> Iterator[dict[str, Any]]:
    """Run one of the harness' tasks at all lengths; yield a record for each sample.

    Raises:
        UserError: if the task fails, as without a network.
    """
    from lm_eval import simple_evaluate

    try:
        results = simple_evaluate(model=model, **job.task_arguments(task))
    except Exception as error:  # of the harness, of datasets, of urllib ...
        logger_of(__name__).debug("lm-eval", exc_info=True)
        hint = " (it downloads its texts, which needs a network)" if task in DOWNLOADS else ""
        raise UserError(
            f"lm-eval's task {task} failed{hint}: {type(error).__name__}: {error}"
        ) from error
    assert results is not None
    for found in results["samples"][task]:
        length = int(found["doc"]["max_length"])
        answers, answer = list(found["doc"]["outputs"]), str(found["filtered_resps"][0])
        theirs = float(found[str(length)])
        # its part match divides by the number of references, where RULER takes the best of them
        is_question = task.startswith("ruler_qa_")
        yield {
            "kind": "sample",
            "task": task,
            "length": length,
            "index": int(found["doc_id"]) % PROMPTS,
            "depth": None,
            "answers": answers,
            "prediction": answer,
            "score": scoring.any_found(answer, answers) if is_question else theirs,
            "harness_score": theirs,
        }
