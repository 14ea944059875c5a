"""Trains a small language model, saves a checkpoint halfway, and resumes it in a new process.

The text is available on every machine: the docstrings, comments and functions of the Python
standard library. It is written as JSON records to ArrayRecord files, tokenized, shuffled,
packed into rows of 128 tokens and fed to a transformer. Halfway, the model and the position
in the data are saved; at the end a second process restores them and verifies that it gets the
same batches, bit for bit, and the same losses. JAX and NumPy are all it needs.

    python examples/text_pipeline.py --steps 200 --dir .cache/text_pipeline

To train on your own records, replace `standard_library` and start from `pipeline`.
"""

import argparse
import ast
import collections
import dataclasses
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter

SEQUENCE_LEN = 128
NUM_SHARD_FILES = 4
RESUMED_STEPS = 20
WIDTH, NUM_HEADS, NUM_BLOCKS = 128, 4, 2
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 1e-4

NEXT = """
Next: this program is examples/text_pipeline.py; start from its `pipeline` for your own records.
docs/index.md is the first page of the documentation, docs/switching.md is for programs of Grain."""

Params = Any  # nested dicts of arrays


class Progress:
    """One line that says how far a task is: rewritten in a terminal, else repeated now and then."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.start = self.shown = time.perf_counter()

    def show(self, text: str) -> None:
        """Shows `text`, unless something was shown just before."""
        now = time.perf_counter()
        if now - self.shown > (0.1 if sys.stdout.isatty() else 3):
            self.shown = now
            self._print(text, "")

    def done(self, text: str) -> None:
        """Shows `text`, and how long the task took."""
        self._print(f"{text}: {time.perf_counter() - self.start:.1f} s", "\n")

    def _print(self, text: str, end: str) -> None:
        if sys.stdout.isatty():
            print(f"\r\x1b[K{self.task}: {text}", end=end, flush=True)
        else:
            print(f"{self.task}: {text}", flush=True)


# --- Text: from Python files to ArrayRecord -------------------------------------------------


def standard_library(max_files: int | None = None) -> Iterator[dict[str, str]]:
    """The texts of the installed standard library, each with a title."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - excluded  # these are not visited
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted(files)[:max_files]
    progress = Progress("reading")
    for number, path in enumerate(files):
        progress.show(f"{number} of {len(files)} files of Python's standard library")
        try:
            source = path.read_text("utf-8")
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # Templates, and files with intentional errors.
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        yield from texts_of_module(module, tree, source.splitlines())
    progress.done(f"{len(files)} files of the standard library of Python {sys.version.split()[0]}")


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


# --- Tokens: the most common words, as numbers -----------------------------------------------


class Tokenizer:
    """Splits a text into words and signs; the rare ones are one token, `[UNK]`.

    Any function from a text to token ids does as well, such as `Tokenizer.encode` of Hugging Face's
    `tokenizers`: see `docs/parsing.md`.
    """

    PAD, UNKNOWN, BEGIN = range(3)
    WORDS = re.compile(r"\w+|[^\w\s]")

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.ids = {word: i for i, word in enumerate(words)}

    @classmethod
    def trained(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        counts = collections.Counter(word for text in texts for word in cls.WORDS.findall(text))
        special = ["[PAD]", "[UNK]", "[BOS]"]
        return cls(special + [word for word, _ in counts.most_common(vocab_size - len(special))])

    def encode(self, text: str) -> np.ndarray:
        """The ids of the words, after one for the beginning of a text."""
        ids = [self.ids.get(word, self.UNKNOWN) for word in self.WORDS.findall(text)]
        return np.asarray([self.BEGIN, *ids], np.int32)


# --- Data: from ArrayRecord to batches on the device ----------------------------------------


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Converts a text to the token ids of at most one row."""

    tokenizer: Tokenizer

    def __call__(self, element: dict[str, str]) -> dict[str, np.ndarray]:
        return {"text": self.tokenizer.encode(element["text"])[:SEQUENCE_LEN]}


def pipeline(paths: list[str], tokenizer: Tokenizer, batch_size: int) -> grain.IterDataset:
    """Endless batches for this process: {"text", "text_segment_ids", "text_positions"}."""
    source = grain.sources.ArrayRecordDataSource(paths)
    texts = grain.MapDataset.source(source).map(json.loads).map(Tokenize(tokenizer))
    shard = texts.shuffle(seed=42).repeat()[jax.process_index() :: jax.process_count()]
    rows = grain.experimental.FirstFitPackIterDataset(
        shard.to_iter_dataset(),
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


def new_params(vocab_size: int) -> Params:
    """An untrained model."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * NUM_BLOCKS))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / np.sqrt(rows)

    def block() -> Params:
        return {
            "norm": jnp.ones(WIDTH),
            "query_key_value": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "mlp_norm": jnp.ones(WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }

    return {
        "tokens": matrix(vocab_size, WIDTH) * np.sqrt(vocab_size) * 0.02,
        "positions": matrix(SEQUENCE_LEN, WIDTH) * np.sqrt(SEQUENCE_LEN) * 0.02,
        "blocks": [block() for _ in range(NUM_BLOCKS)],
        "norm": jnp.ones(WIDTH),
    }


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def attention(params: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], NUM_HEADS, WIDTH // NUM_HEADS)
    parts = jnp.split(x @ params["query_key_value"], 3, axis=-1)
    query, key, value = (part.reshape(heads) for part in parts)
    attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
    return attended.reshape(x.shape) @ params["out"]


def logits_of(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """Logits of the next token, from the previous tokens of the same segment."""
    segment_ids = batch["text_segment_ids"]
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    mask = jnp.tril(same_segment)[:, None]  # [row, head, query, key]
    x = params["tokens"][batch["text"]] + params["positions"][batch["text_positions"]]
    for block in params["blocks"]:
        x = x + attention(block, normalized(x, block["norm"]), mask)
        x = x + jax.nn.gelu(normalized(x, block["mlp_norm"]) @ block["up"]) @ block["down"]
    return normalized(x, params["norm"]) @ params["tokens"].T


def loss_of(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy of all tokens except the first of each segment."""
    segment_ids = batch["text_segment_ids"]
    mask = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    log_probs = jax.nn.log_softmax(logits_of(params, batch)[:, :-1])
    losses = -jnp.take_along_axis(log_probs, batch["text"][:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(losses * mask) / jnp.sum(mask)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(model: Params, batch: dict[str, jax.Array]) -> tuple[Params, jax.Array]:
    """The model after one step of AdamW, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(model["params"], batch)
    step = model["step"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, model["mean"], gradients)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, model["square"], gradients)

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        direction = m / (1 - 0.9**step) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)
        return p - LEARNING_RATE * (direction + WEIGHT_DECAY * p)

    params = jax.tree.map(updated, model["params"], mean, square)
    return {"params": params, "mean": mean, "square": square, "step": step}, loss


@functools.partial(jax.jit, static_argnums=0)
def new_model(vocab_size: int) -> Params:
    """An untrained model and the state of its optimizer."""
    params = new_params(vocab_size)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros, "step": jnp.float32(0)}


# --- Training: steps, statistics, saving and resuming ----------------------------------------


@dataclasses.dataclass
class Training:
    """The contents of a checkpoint: a model, with its optimizer, and its position in the data."""

    model: Params
    batches: grain.DatasetIterator

    @classmethod
    def start(cls, paths: list[str], tokenizer: Tokenizer, batch_size: int) -> "Training":
        batches = iter(pipeline(paths, tokenizer, batch_size))
        return cls(jax.device_put(new_model(len(tokenizer.words)), jax.local_devices()[0]), batches)

    def step(self, batch: dict[str, jax.Array]) -> float:
        """Updates the model with a batch; returns the loss before."""
        self.model, loss = train_step(self.model, batch)
        return float(loss)

    def save(self, directory: Path) -> None:
        np.savez(directory / "model.npz", *jax.tree.leaves(self.model))
        (directory / "data.json").write_text(json.dumps(self.batches.get_state(), indent=1))

    def restore(self, directory: Path) -> None:
        with np.load(directory / "model.npz") as saved:
            model = jax.tree.unflatten(jax.tree.structure(self.model), list(saved.values()))
        self.model = jax.device_put(model, jax.local_devices()[0])
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
    progress = Progress(label)
    print(f"{label}: {num_steps} steps", flush=True)
    for number in range(1, num_steps + 1):
        start = time.perf_counter()
        batch = next(training.batches)
        got_batch = time.perf_counter()
        loss = training.step(batch)
        figures.add(batch, loss, got_batch - start, time.perf_counter() - start)
        progress.show(f"step {number} of {num_steps}, {figures}")
    progress.done(f"{num_steps} steps, {figures}")


def train(directory: Path, num_steps: int, batch_size: int, max_files: int | None) -> Figures:
    """Writes the data, trains, and saves a checkpoint halfway."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = list(standard_library(max_files))
    progress = Progress("writing")
    paths = write_records(texts, directory)
    num_bytes = sum(Path(path).stat().st_size for path in paths)
    progress.done(
        f"{len(texts):,} texts in {len(paths)} ArrayRecord files, {num_bytes / 1e6:.1f} MB"
    )
    progress = Progress("vocabulary")
    tokenizer = Tokenizer.trained((text["text"] for text in texts[::4]), vocab_size=4096)
    (directory / "vocabulary.json").write_text(json.dumps(tokenizer.words))
    progress.done(f"the {len(tokenizer.words):,} most common words")

    print(pipeline(paths, tokenizer, batch_size).describe(), flush=True)
    training = Training.start(paths, tokenizer, batch_size)
    figures = Figures()
    middle = num_steps // 2
    run(training, middle, figures, "training, first half")
    training.save(directory)
    run(training, num_steps - middle, figures, "training, second half")
    training.batches.close()
    print(f"after {num_steps} steps: {figures} (loss was {figures.steps[0]['loss']:.3f})")
    return figures


def resume(directory: Path, num_steps: int, batch_size: int) -> Figures:
    """Continues from the checkpoint; writes hashes of batches and losses to `resumed.json`."""
    paths = sorted(str(path) for path in directory.glob("*.array_record"))
    tokenizer = Tokenizer(json.loads((directory / "vocabulary.json").read_text()))
    training = Training.start(paths, tokenizer, batch_size)
    training.restore(directory)
    figures = Figures()
    run(training, num_steps, figures, "resumed in a new process")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--dir", type=Path, default=Path(".cache/text_pipeline"))
    parser.add_argument("--batch-size", type=int, default=8, help="packed rows per batch")
    parser.add_argument("--quick", action="store_true", help="15 files, 12 steps: for tests")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --dir")
    options = parser.parse_args()
    if options.resume:
        resume(options.dir, options.steps, options.batch_size)
        return
    num_steps, max_files = (12, 15) if options.quick else (options.steps, None)
    figures = train(options.dir, num_steps, options.batch_size, max_files)
    compare_with_fresh_process(options.dir, figures, options.batch_size)
    print(NEXT)


if __name__ == "__main__":
    main()
