"""A program in the style of MaxText: packed text, a mixture, threads that index their streams."""

import functools
import json
import threading

import grain.python as grain
import numpy as np
from absl import app
from grain.experimental import BOSHandling, ConcatThenSplitIterDataset


class Tokenize(grain.MapTransform):
    """Its lock cannot be pickled, and is created where it is used."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary
        self.lock = threading.Lock()

    def __getstate__(self):
        return {**self.__dict__, "lock": None}

    def map(self, element):
        if self.lock is None:
            self.lock = threading.Lock()
        with self.lock:
            words = json.loads(element)["text"].split()
        return {"text": np.array([self.vocabulary[word] for word in words], np.int32)}


class Rekey(grain.MapTransform):
    """Changes the element that it is given."""

    def map(self, element):
        element["inputs"] = element.pop("text")
        element["targets"] = element["inputs"] + 1
        return element


class ThreadIndexed:
    """Each thread that reads has a stream of its own."""

    def __init__(self, num_threads):
        self.read = [0] * num_threads

    def __len__(self):
        return 24

    def __repr__(self):
        return "ThreadIndexed()"

    def __getitem__(self, index):
        number = int(threading.current_thread().name.split("_")[1])
        self.read[number] += 1
        return {"text": json.dumps({"text": "a b c"[: 1 + 2 * (int(index) % 3)]})}


class Text(grain.MapTransform):
    def map(self, element):
        return element["text"]


def saved(iterator):
    if isinstance(iterator, grain.DatasetIterator):
        return json.loads(json.dumps(iterator.get_state()))
    return json.loads(iterator.get_state().decode())


def listed(batch):
    return {name: array.tolist() for name, array in sorted(batch.items())}


def packed(texts, vocabulary, *, seed):
    ds = grain.MapDataset.source(texts).shuffle(seed=seed).repeat()[1::3]
    ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    ds = ds.map(Tokenize(vocabulary)).map(Rekey())
    return grain.experimental.FirstFitPackIterDataset(
        ds,
        length_struct={"inputs": 8, "targets": 8},
        num_packing_bins=4,
        max_sequences_per_bin=3,
    )


def main(argv):
    vocabulary = {chr(97 + i): i + 1 for i in range(20)}
    texts = [json.dumps({"text": " ".join("abcdefghij"[: 1 + i % 7])}) for i in range(23)]
    out = {"arguments": len(argv)}

    # Packed batches from worker processes, and a state in the middle.
    ds = packed(texts, vocabulary, seed=3)
    batch_and_pad = functools.partial(grain.experimental.batch_and_pad, batch_size=2)
    ds = ds.batch(2, batch_fn=batch_and_pad).mp_prefetch(grain.MultiprocessingOptions(2))
    iterator = ds.__iter__()
    out["packed"] = [listed(next(iterator)) for _ in range(3)]
    state = out["state"] = saved(iterator)
    after = [listed(next(iterator)) for _ in range(2)]
    restored = ds.__iter__()
    restored.set_state(state)
    assert [listed(next(restored)) for _ in range(2)] == after

    # A mixture by name, each part with a state of its own.
    parts = {
        "wiki": packed(texts, vocabulary, seed=1),
        "code": packed(texts[:9], vocabulary, seed=2),
    }
    mixture = iter(grain.IterDataset.mix(parts, {"wiki": 0.25, "code": 0.75}).batch(2))
    out["mixed"] = [listed(next(mixture)) for _ in range(3)]
    out["mixed_state"] = saved(mixture)

    # Rows that are full, with a first token of their own.
    rows = grain.MapDataset.source(texts).map(Tokenize(vocabulary)).to_iter_dataset()
    rows = ConcatThenSplitIterDataset(
        rows,
        length_struct={"text": 10},
        bos_handling=BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS,
        bos_features=["text"],
        bos_token_id=99,
    )
    out["rows"] = [listed(row) for row in rows]

    # Records by threads with numbers in their names.
    source = ThreadIndexed(num_threads=3)
    sampler = grain.IndexSampler(
        len(source), grain.NoSharding(), shuffle=True, num_epochs=1, seed=0
    )
    loader = grain.DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[Text(), Tokenize(vocabulary), grain.Batch(1)],
        worker_count=1,
        worker_buffer_size=2,
        read_options=grain.ReadOptions(num_threads=3, prefetch_buffer_size=6),
    )
    batches = iter(loader)
    out["loaded"] = [listed(next(batches)) for _ in range(4)]
    out["loaded_state"] = saved(batches)
    print(json.dumps(out))


if __name__ == "__main__":
    app.run(main)
