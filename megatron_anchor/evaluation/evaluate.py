"""Evaluate checkpoints one after the other, each resumable."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_anchor.checkpoint.anchored_tokenizer import recorded_anchor
from megatron_anchor.errors import UserError
from megatron_anchor.evaluation import harness, perplexity
from megatron_anchor.evaluation.checkpoints import (
    Checkpoint,
    digest_of_model,
    hugging_face_folder,
)
from megatron_anchor.evaluation.generation import Generator
from megatron_anchor.evaluation.haystack import digest_of
from megatron_anchor.evaluation.material import Material
from megatron_anchor.evaluation.models import (
    Placement,
    check_positions,
    load_model,
    read_config,
)
from megatron_anchor.evaluation.published import QA_SCORE, has_questions
from megatron_anchor.evaluation.question_files import Question
from megatron_anchor.evaluation.records import Key, Records, key_of
from megatron_anchor.evaluation.tasks import TASKS, Sample, check_length, make_sample
from megatron_anchor.evaluation.tokens import PromptTokenizer
from megatron_anchor.evaluation.word_lists import LONG_LIST
from megatron_anchor.terminal import escaped, logger_of

SAMPLES = "samples"
"""Folder under the output with one file of results for each checkpoint."""

_CHECKED_UP_TO = 32768  # longer prompts have room for any task
_CHECKED_SAMPLES = 10  # of a task; their least lengths differ by a few tokens

logger = logger_of(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is asked."""

    output: Path
    tasks: Sequence[str]
    seq_lengths: Sequence[int]
    num_samples: int = 100
    """For each task and length."""
    seed: int = 42
    batch_size: int = 1
    engine: str = "hf"
    placement: Placement = field(default_factory=Placement)
    depths: Sequence[float] = ()
    """Of the asked needle, as shares; taken in turn."""
    essays: str = ""
    questions: Sequence[Question] = ()
    question_sets: Mapping[str, Sequence[Question]] = field(default_factory=dict)
    """Of `answering.QUESTION_SETS`."""
    texts: Sequence[perplexity.Text] = ()
    """For the perplexity by position; none: not measured."""
    tokenizer: str | None = None
    """Folder; None: each checkpoint's own."""
    first_tokens: Sequence[str] = ("auto",)
    """What prompts begin with; each checkpoint is asked with each of them."""
    like: str | None = None
    allow_longer: bool = False
    resume: bool = True
    progress: bool = True

    @property
    def task_names(self) -> list[str]:
        """Names that results have: the harness has its own."""
        return harness.harness_names(self.tasks) if self.engine == "lm-eval" else list(self.tasks)

    def settings(self) -> dict[str, Any]:
        """All that decides the results of a checkpoint, as JSON values."""
        return {
            "engine": self.engine,
            "tasks": self.task_names,
            "seq_lengths": list(self.seq_lengths),
            "num_samples": self.num_samples,
            "seed": self.seed,
            "depths": list(self.depths),
            "dtype": self.placement.dtype,
            "haystack": digest_of(self.essays),
            "questions": digest_of(repr(self.questions)) if self.questions else None,
            **{name: digest_of(repr(found)) for name, found in self.question_sets.items()},
            "texts": [text.digest for text in self.texts],
            "qa_score": QA_SCORE
            if self.engine == "lm-eval" and has_questions(self.task_names)
            else None,
        }


@dataclass(frozen=True)
class Evaluated:
    """One checkpoint's results."""

    checkpoint: Checkpoint
    settings: Mapping[str, Any]
    records: Mapping[Key, Mapping[str, Any]]


def evaluate(asked: Evaluation, checkpoints: Sequence[Checkpoint]) -> list[Evaluated]:
    """Evaluate all; what was finished before is not done again.

    Raises:
        UserError: for settings that cannot be served, before the first model is loaded where
            that can be known.
    """
    if asked.engine == "lm-eval":
        harness.check_harness(asked.seq_lengths, num_samples=asked.num_samples)
    ready = [_Ready(asked, c, first) for c in checkpoints for first in asked.first_tokens]
    checked: set[str] = set()
    for one in ready:
        one.check(checked)
    return [one.run() for one in ready]


class _Ready:
    """A checkpoint as a Hugging Face folder with its tokenizer."""

    def __init__(self, asked: Evaluation, checkpoint: Checkpoint, first_token: str) -> None:
        self.asked = asked
        several = len(asked.first_tokens) > 1
        self.checkpoint = checkpoint.behind(first_token) if several else checkpoint
        self.folder = hugging_face_folder(
            checkpoint, asked.output, like=asked.like, progress=asked.progress
        )
        self.tokenizer_folder = Path(asked.tokenizer or self.folder)
        self.tokenizer = PromptTokenizer(
            self.tokenizer_folder,
            first_token=first_token,
            recorded=recorded_anchor(read_config(self.folder)),
        )
        self.material = Material(self.tokenizer, asked.essays, asked.questions, asked.question_sets)
        self.settings = {
            **asked.settings(),
            "model": digest_of_model(self.folder),
            "tokenizer": self.tokenizer.digest,
            "first_token": self.tokenizer.first,
        }

    def check(self, checked: set[str]) -> None:
        """Check texts, and lengths once for each tokenizer."""
        asked = self.asked
        assert self.windows or not asked.texts
        note = check_positions(self.folder, asked.seq_lengths, allow_longer=asked.allow_longer)
        for told in filter(None, (note, self.tokenizer.note)):
            logger.warning(told)
        if self.tokenizer.digest in checked:
            return
        checked.add(self.tokenizer.digest)
        if asked.engine == "lm-eval":
            self.tokenizer.require_same_in_transformers()
            return
        samples = min(asked.num_samples, _CHECKED_SAMPLES)
        longer = [length for length in asked.seq_lengths if length >= LONG_LIST]
        for name in asked.tasks:
            for length in {min(asked.seq_lengths), min(longer, default=0)} - {0}:
                if length <= _CHECKED_UP_TO:
                    check_length(
                        self.material, name, length=length, samples=samples, seed=asked.seed
                    )

    def run(self) -> Evaluated:
        """Do what is not done yet."""
        path = self.asked.output / SAMPLES / f"{self.checkpoint.name}.jsonl"
        with Records(path, self.settings, resume=self.asked.resume) as records:
            keys = [
                ("sample", task, length, index)
                for task in self.asked.task_names
                for length in self.asked.seq_lengths
                for index in range(self.asked.num_samples)
            ]
            done = {key_of(record) for record in records.found.values()}
            todo = [key for key in keys if key not in done]
            unread = [w for w in self.windows if ("window", w.text, w.number) not in done]
            with tqdm(
                total=len(keys) + len(self.windows),
                initial=len(keys) - len(todo) + len(self.windows) - len(unread),
                desc=escaped(self.checkpoint.name),
                unit="sample",
                disable=not self.asked.progress,
            ) as bar:
                if todo or unread:
                    for finished in self._work(todo, unread):
                        records.add(finished)
                        bar.update(len(finished))
            return Evaluated(self.checkpoint, self.settings, dict(records.found))

    @functools.cached_property
    def windows(self) -> list[perplexity.Window]:
        """What is predicted."""
        found = perplexity.windows(
            self.asked.texts,
            self.tokenizer,
            length=max(self.asked.seq_lengths),
            most=self.asked.num_samples,
        )
        return list(found)

    def _work(
        self, todo: Sequence[Key], unread: Sequence[perplexity.Window]
    ) -> Iterator[list[dict[str, Any]]]:
        placement = self.asked.placement
        if self.asked.engine == "lm-eval":
            yield from self._harness(todo)
            if not unread:
                return
        model = load_model(self.folder, placement)
        if self.asked.engine == "hf":
            yield from self._generate(model, todo)
        for window in unread:
            losses = perplexity.token_losses(model, window.ids)
            nats, tokens = perplexity.bucket_sums(losses)
            record = {"text": window.text, "window": window.number, "nats": nats, "tokens": tokens}
            yield [{"kind": "window", **record}]

    def _generate(self, model: Any, todo: Sequence[Key]) -> Iterator[list[dict[str, Any]]]:
        generator = Generator(model, self.tokenizer)
        groups: dict[tuple[str, int], list[int]] = {}
        for _, task, length, index in todo:
            groups.setdefault((task, length), []).append(index)
        for (task, length), indices in groups.items():
            for start in range(0, len(indices), self.asked.batch_size):
                batch = indices[start : start + self.asked.batch_size]
                samples = [self._sample(task, length, index) for index in batch]
                answers = generator.answers(samples)
                yield [_record(s, a) for s, a in zip(samples, answers, strict=True)]

    def _sample(self, task: str, length: int, index: int) -> Sample:
        asked = self.asked
        return make_sample(
            self.material, task, length=length, index=index, seed=asked.seed, depths=asked.depths
        )

    def _harness(self, todo: Sequence[Key]) -> Iterator[list[dict[str, Any]]]:
        with harness.tokenizer_with(self.tokenizer_folder, self.tokenizer.first) as folder:
            yield from self._asked_by_harness(todo, folder)

    def _asked_by_harness(
        self, todo: Sequence[Key], tokenizer: Path
    ) -> Iterator[list[dict[str, Any]]]:
        asked = self.asked
        job = harness.HarnessJob(
            folder=self.folder,
            tokenizer=tokenizer,
            first_token=self.tokenizer.first,
            lengths=asked.seq_lengths,
            num_samples=asked.num_samples,
            seed=asked.seed,
            batch_size=asked.batch_size,
            placement=asked.placement,
        )
        tasks = list(dict.fromkeys(key[1] for key in todo))
        if not tasks:
            return
        model = harness.load_harness_model(job)
        wanted = set(todo)
        for task in tasks:
            found = [r for r in harness.run_harness(model, job, task) if key_of(r) in wanted]
            missing = sum(key[1] == task for key in todo) - len(found)
            if missing:
                raise UserError(f"lm-eval's task {task} gave {missing} results too few")
            yield found


def _record(sample: Sample, answer: str) -> dict[str, Any]:
    return {
        "kind": "sample",
        "task": sample.task,
        "length": sample.length,
        "index": sample.index,
        "depth": sample.depth,
        "tokens": sample.total_tokens,
        "answers": sample.answers,
        "prediction": answer,
        "score": TASKS[sample.task].score(answer, sample.answers),
    }
