"""Trains a small language model, saves a checkpoint halfway, and resumes it in a new process.

The text is available on every machine: the docstrings, comments and functions of the Python
standard library. It is written as JSON records to ArrayRecord files, tokenized, shuffled,
packed into rows of 128 tokens and fed to a transformer. Halfway, the model and the position
in the data are saved; at the end a second process restores them and verifies that it gets the
same batches, bit for bit, and the same losses.

    python examples/text_pipeline.py --steps 200 --dir .cache/text_pipeline

To train on your own records, replace `standard_library` and start from `pipeline`.
"""

import argparse
import ast
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter

SEQUENCE_LEN = 128
NUM_SHARD_FILES = 4
RESUMED_STEPS = 20


# --- Text: from Python files to ArrayRecord -------------------------------------------------


def standard_library(max_files: int | None = None) -> Iterator[dict[str, str]]:
    """The texts of the installed standard library, each with a title."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    files = [p for p in sorted(root.rglob("*.py")) if not excluded & set(p.parts)]
    for path in files[:max_files]:
        try:
            source = path.read_text("utf-8")
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # Templates, and files with intentional errors.
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        yield from texts_of_module(module, tree, source.splitlines())


def texts_of_module(module: str, tree: ast.Module, lines: list[str]) -> Iterator[dict[str, str]]:
    """The docstrings, functions and comment paragraphs of one module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            title = f"{module}.{getattr(node, 'name', '__doc__')}"
            if docstring := ast.get_docstring(node):
                yield {"title": title, "text": docstring}
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                yield {"title": f"{title} (source)", "text": text}
    comment: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        if line.lstrip().startswith("#"):
            comment.append(line.strip("# \t"))
        elif comment:
            yield {"title": f"{module}:{number - len(comment)}", "text": " ".join(comment)}
            comment = []


def write_records(texts: list[dict[str, str]], directory: Path) -> list[str]:
    """Writes the texts as JSON to several ArrayRecord files; returns their paths."""
    names = [f"text-{i:05}-of-{NUM_SHARD_FILES:05}.array_record" for i in range(NUM_SHARD_FILES)]
    paths = [str(directory / name) for name in names]
    for i, path in enumerate(paths):
        writer = ArrayRecordWriter(path, "group_size:1")
        for text in texts[i::NUM_SHARD_FILES]:
            writer.write(json.dumps(text).encode())
        writer.close()
    return paths


def trained_tokenizer(texts: list[dict[str, str]], vocab_size: int) -> Tokenizer:
    """A WordPiece tokenizer trained on every fourth text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=["[PAD]", "[UNK]", "[BOS]"], show_progress=False
    )
    tokenizer.train_from_iterator((text["text"] for text in texts[::4]), trainer)
    return tokenizer


# --- Data: from ArrayRecord to batches on the device ----------------------------------------


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Converts a text to token ids, starting with a beginning-of-sequence token."""

    tokenizer: Tokenizer

    def __call__(self, element: dict[str, str]) -> dict[str, np.ndarray]:
        ids = self.tokenizer.encode(element["text"]).ids
        return {"text": np.asarray([self.tokenizer.token_to_id("[BOS]"), *ids], np.int32)}


def trim(element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Truncates a text to the length of one row."""
    return {"text": element["text"][:SEQUENCE_LEN]}


def pipeline(paths: list[str], tokenizer: Tokenizer, batch_size: int) -> grain.IterDataset:
    """Endless batches for this process: {"text", "text_segment_ids", "text_positions"}."""
    source = grain.sources.ArrayRecordDataSource(paths)
    texts = grain.MapDataset.source(source).map(json.loads).map(Tokenize(tokenizer))
    shard = texts.shuffle(seed=42).repeat()[jax.process_index() :: jax.process_count()]
    rows = grain.experimental.FirstFitPackIterDataset(
        shard.map(trim).to_iter_dataset(),
        length_struct={"text": SEQUENCE_LEN},
        num_packing_bins=30,
    )
    batches = rows.batch(batch_size, drop_remainder=True)
    return grain.experimental.device_put(batches, jax.local_devices()[0])


def digest(batch: dict[str, jax.Array]) -> str:
    """A hash of the arrays of a batch."""
    sha256 = hashlib.sha256()
    for name in sorted(batch):
        sha256.update(name.encode() + np.asarray(batch[name]).tobytes())
    return sha256.hexdigest()


# --- Model: a decoder that attends within segments only -------------------------------------


class Block(nnx.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, num_heads: int, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nnx.Module):
    """Logits of the next token, from the previous tokens of the same segment."""

    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs) -> None:
        width, num_heads, num_blocks = 128, 4, 2
        self.tokens = nnx.Embed(vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(SEQUENCE_LEN, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, num_heads, rngs=rngs) for _ in range(num_blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        segment_ids = batch["text_segment_ids"]
        same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = jnp.tril(same_segment)[:, None]  # [row, head, query, key]
        x = self.tokens(batch["text"]) + self.positions(batch["text_positions"])
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


@functools.partial(nnx.jit, static_argnums=0)
def new_model(vocab_size: int) -> tuple[LanguageModel, nnx.Optimizer]:
    """An untrained model and its optimizer."""
    model = LanguageModel(vocab_size, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)


def loss_of(model: LanguageModel, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of all tokens except the first of each segment."""
    segment_ids = batch["text_segment_ids"]
    mask = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch)[:, :-1], batch["text"][:, 1:]
    )
    return jnp.sum(losses * mask) / jnp.sum(mask)


@nnx.jit
def train_step(
    model: LanguageModel, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]
) -> jax.Array:
    """Updates the model with one batch and returns the loss before the update."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


# --- Training: steps, statistics, saving and resuming ----------------------------------------


@dataclasses.dataclass
class Training:
    """The contents of a checkpoint: a model, its optimizer and its position in the data."""

    model: LanguageModel
    optimizer: nnx.Optimizer
    batches: grain.DatasetIterator

    @classmethod
    def start(cls, paths: list[str], tokenizer: Tokenizer, batch_size: int) -> "Training":
        training = cls(
            *new_model(tokenizer.get_vocab_size()),
            iter(pipeline(paths, tokenizer, batch_size)),
        )
        training.place(jax.tree.leaves(training.state()))
        return training

    def state(self) -> nnx.State:
        return nnx.state((self.model, self.optimizer))

    def place(self, leaves: list[np.ndarray | jax.Array]) -> None:
        """Sets the arrays, placed on the device, as a compiled step depends on placement."""
        leaves = jax.device_put(leaves, jax.local_devices()[0])
        state = jax.tree.unflatten(jax.tree.structure(self.state()), leaves)
        nnx.update((self.model, self.optimizer), state)

    def save(self, directory: Path) -> None:
        np.savez(directory / "model.npz", *jax.tree.leaves(self.state()))
        (directory / "data.json").write_text(json.dumps(self.batches.get_state(), indent=1))

    def restore(self, directory: Path) -> None:
        with np.load(directory / "model.npz") as saved:
            self.place([saved[name] for name in saved])
        self.batches.set_state(json.loads((directory / "data.json").read_text()))


@dataclasses.dataclass
class Figures:
    """Measurements of the loop; timings exclude the first step, which compiles."""

    steps: list[dict[str, str | float]] = dataclasses.field(default_factory=list)
    waiting_s: float = 0.0
    total_s: float = 0.0
    num_examples: int = 0
    num_tokens: int = 0
    num_slots: int = 0

    def add(self, batch: dict[str, jax.Array], loss: float, waiting_s: float, total_s: float):
        segment_ids = np.asarray(batch["text_segment_ids"])
        self.num_slots += segment_ids.size
        self.num_tokens += np.count_nonzero(segment_ids)
        if self.steps:
            self.waiting_s += waiting_s
            self.total_s += total_s
            self.num_examples += int(segment_ids.max(axis=1).sum())
        self.steps.append({"batch": digest(batch), "loss": loss})

    def __str__(self) -> str:
        if not self.total_s:
            return "compiling"
        return (
            f"loss {self.steps[-1]['loss']:.3f}, {self.num_examples / self.total_s:,.0f} "
            f"examples/s, waiting {self.waiting_s / self.total_s:.1%}, "
            f"padding {1 - self.num_tokens / self.num_slots:.1%}"
        )


def run(training: Training, num_steps: int, figures: Figures, label: str) -> None:
    """Trains for `num_steps` steps and shows progress."""
    figures_column = TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(10), figures_column)
    with Progress(*columns) as progress:
        bar = progress.add_task(label, total=num_steps, figures="compiling")
        for _ in range(num_steps):
            start = time.perf_counter()
            batch = next(training.batches)
            got_batch = time.perf_counter()
            loss = float(train_step(training.model, training.optimizer, batch))
            figures.add(batch, loss, got_batch - start, time.perf_counter() - start)
            progress.update(bar, advance=1, figures=str(figures))


def train(directory: Path, num_steps: int, batch_size: int, max_files: int | None) -> Figures:
    """Writes the data, trains, and saves a checkpoint halfway."""
    directory.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    texts = list(standard_library(max_files))
    print(f"{len(texts):,} texts of Python {sys.version.split()[0]}: {elapsed(start)}")
    start = time.perf_counter()
    paths = write_records(texts, directory)
    num_bytes = sum(Path(path).stat().st_size for path in paths)
    print(f"{len(paths)} ArrayRecord files, {num_bytes / 1e6:.1f} MB: {elapsed(start)}")
    start = time.perf_counter()
    tokenizer = trained_tokenizer(texts, vocab_size=4096)
    tokenizer.save(str(directory / "tokenizer.json"))
    print(f"a vocabulary of {tokenizer.get_vocab_size():,} word pieces: {elapsed(start)}")

    training = Training.start(paths, tokenizer, batch_size)
    figures = Figures()
    middle = num_steps // 2
    run(training, middle, figures, "first half ")
    training.save(directory)
    run(training, num_steps - middle, figures, "second half")
    training.batches.close()
    print(f"after {num_steps} steps: {figures} (loss was {figures.steps[0]['loss']:.3f})")
    return figures


def resume(directory: Path, num_steps: int, batch_size: int) -> Figures:
    """Continues from the checkpoint; writes hashes of batches and losses to `resumed.json`."""
    paths = sorted(str(path) for path in directory.glob("*.array_record"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    training = Training.start(paths, tokenizer, batch_size)
    training.restore(directory)
    figures = Figures()
    run(training, num_steps, figures, "resumed    ")
    training.batches.close()
    (directory / "resumed.json").write_text(json.dumps(figures.steps))
    return figures


def compare_with_fresh_process(directory: Path, figures: Figures, batch_size: int) -> None:
    """Resumes in a new process and compares its batches and losses with this one's."""
    middle = len(figures.steps) // 2
    expected = figures.steps[middle : middle + RESUMED_STEPS]
    command = [sys.executable, __file__, "--resume", "--dir", str(directory)]
    command += ["--steps", str(len(expected)), "--batch-size", str(batch_size)]
    subprocess.run(command, check=True)
    found = json.loads((directory / "resumed.json").read_text())
    for name in ("batch", "loss"):
        for step, (a, b) in enumerate(zip(expected, found, strict=True), start=middle):
            if a[name] != b[name]:
                sys.exit(f"step {step}: {name} is {b[name]} after resuming, was {a[name]}")
    print(
        f"a new process resumed at step {middle}: its {len(found)} batches are bit-identical "
        f"(first {found[0]['batch'][:12]}, last {found[-1]['batch'][:12]}), and so are its losses "
        f"(last {found[-1]['loss']:.6f})"
    )


def elapsed(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--dir", type=Path, default=Path(".cache/text_pipeline"))
    parser.add_argument("--batch-size", type=int, default=8, help="packed rows per batch")
    parser.add_argument("--quick", action="store_true", help="40 files, 12 steps: for tests")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --dir")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Avoids its warnings after a fork.
    if options.resume:
        resume(options.dir, options.steps, options.batch_size)
        return
    num_steps, max_files = (12, 40) if options.quick else (options.steps, None)
    start = time.perf_counter()
    figures = train(options.dir, num_steps, options.batch_size, max_files)
    compare_with_fresh_process(options.dir, figures, options.batch_size)
    print(f"done in {elapsed(start)}")


if __name__ == "__main__":
    main()
