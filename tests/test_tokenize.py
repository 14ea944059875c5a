"""`Tokenize` gives the ids that the tokenizer gives for each text, from calls with blocks."""

import os
import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import grainmill as grain
from grainmill import MapDataset
from grainmill.transforms import Tokenize

WORDS = [f"w{number}" for number in range(300)]
TEXTS = [" ".join(WORDS[(i * 7 + k) % 300] for k in range(i % 9)) for i in range(200)]


def tokenizer():
    vocabulary = {"[UNK]": 0, "[BOS]": 1, **{word: at + 2 for at, word in enumerate(WORDS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    return made


class Counting:
    """A callable on lists of texts, as a user writes it."""

    def __init__(self):
        self.calls = []

    def __call__(self, texts):
        self.calls.append(len(texts))
        return [[int(word[1:]) for word in text.split()] for text in texts]


class Fast:
    """What a tokenizer of `transformers` looks like."""

    def __init__(self, made):
        self._tokenizer = made

    def convert_tokens_to_ids(self, tokens):
        raise NotImplementedError

    def __call__(self, texts, *, add_special_tokens=True, **more):
        assert more == {"return_attention_mask": False, "return_token_type_ids": False}
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encoded]}


@pytest.mark.parametrize("special", [None, True, False])
@pytest.mark.parametrize("wrap", [lambda made: made, Fast])
def test_ids_are_those_of_the_tokenizer(wrap, special):
    made = tokenizer()
    tokenize = Tokenize(wrap(made), add_special_tokens=special)
    expected = [made.encode(text, add_special_tokens=special is not False).ids for text in TEXTS]
    found = list(MapDataset.source(TEXTS).map(tokenize))
    assert [ids.tolist() for ids in found] == expected
    assert {ids.dtype for ids in found} == {np.dtype(np.int32)}
    assert [tokenize.map(text).tolist() for text in TEXTS[:20]] == expected[:20]


def test_callables_get_blocks():
    counting = Counting()
    for _ in range(20):  # blocks are short where other programs take the cores
        found = list(MapDataset.source(TEXTS).map(Tokenize(counting, dtype=np.uint16)).map(list))
        assert found == [[int(word[1:]) for word in text.split()] for text in TEXTS]
        if max(counting.calls) > 10:
            break
    assert max(counting.calls) > 10


@pytest.mark.parametrize(
    "answer",
    [
        lambda texts: {"input_ids": [[1]] * len(texts)},
        lambda texts: np.ones((len(texts), 1), np.int64),
        lambda texts: [np.array([1])] * len(texts),
    ],
)
def test_callables_may_return_arrays_and_dicts(answer):
    assert Tokenize(answer).map("x").tolist() == [1]


def test_fields_of_dicts():
    ds = MapDataset.source([{"text": text, "n": n} for n, text in enumerate(TEXTS)])
    replaced = list(ds.map(Tokenize(Counting(), field="text")))
    added = list(ds.map(Tokenize(Counting(), field="text", output="ids", max_length=3)))
    for n, text in enumerate(TEXTS):
        ids = [int(word[1:]) for word in text.split()]
        assert (replaced[n]["text"].tolist(), replaced[n]["n"]) == (ids, n)
        assert (added[n]["ids"].tolist(), added[n]["text"]) == (ids[:3], text)


def test_a_fixed_length_is_batched():
    made = tokenizer()
    made.enable_truncation(4)
    made.enable_padding(length=4)
    batch = next(iter(MapDataset.source(TEXTS).map(Tokenize(made)).batch(50)))
    assert batch.shape == (50, 4)
    assert batch[5].tolist() == made.encode(TEXTS[5]).ids


def test_a_text_that_is_none_fails_at_its_place():
    texts = [*TEXTS[:57], 5, *TEXTS]
    iterator = iter(MapDataset.source(texts).map(Tokenize(tokenizer())))
    for _ in range(57):
        next(iterator)
    with pytest.raises(TypeError, match="a text must be `str`, got a value of type int") as failed:
        next(iterator)
    assert "while computing element 57" in failed.value.__notes__[0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Tokenize(Counting(), dtype="float32"), "must be an integer dtype"),
        (lambda: Tokenize(Counting(), max_length=-1), "`max_length` must be"),
        (lambda: Tokenize(Counting(), output="x"), "needs `field`"),
        (lambda: Tokenize(Counting(), dtype="int8").map("w200"), "token id 200 does not fit"),
        (
            lambda: Tokenize(lambda _: []).map("x"),
            "must return a list with the ids of each of 1",
        ),
        (lambda: Tokenize(lambda _: ["a"]).map("x"), "must be a list of integers"),
        (lambda: Tokenize(lambda _: [[1.5]]).map("x"), "must be a list of integers"),
    ],
)
def test_what_cannot_be_is_refused(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()
    with pytest.raises(TypeError, match="must be a `tokenizers"):
        Tokenize(5)


def parallelism(texts):
    return [[len(os.environ["TOKENIZERS_PARALLELISM"])]] * len(texts)


def test_workers_use_no_threads_of_the_tokenizer_unless_asked(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    options = grain.ReadOptions(num_workers=1)
    for given, expected in ((None, "false"), ("true", "true")):
        if given is not None:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", given)
        ds = MapDataset.source(TEXTS[:4]).map(Tokenize(parallelism))
        assert [ids.tolist() for ids in ds.to_iter_dataset(options)] == [[len(expected)]] * 4


@pytest.mark.parametrize(
    "options", [grain.ReadOptions(num_workers=2), grain.ReadOptions(num_threads=4)]
)
def test_workers_and_threads_after_use_here(options, capfd):
    """Forks after the tokenizer's threads were started neither hang nor warn."""
    made = tokenizer()
    expected = [encoding.ids for encoding in made.encode_batch(TEXTS)]
    ds = MapDataset.source(TEXTS).map(Tokenize(made))
    assert [ids.tolist() for ids in ds.to_iter_dataset(options)] == expected
    assert [encoding.ids for encoding in made.encode_batch(TEXTS)] == expected
    assert "huggingface/tokenizers" not in capfd.readouterr().err


def test_it_is_pickled_and_shown():
    tokenize = Tokenize(tokenizer(), field="text", max_length=5)
    again = pickle.loads(pickle.dumps(tokenize))
    assert repr(again) == repr(tokenize)
    text = {"text": "w1 w2"}
    np.testing.assert_array_equal(again.map(text)["text"], tokenize.map(text)["text"])
