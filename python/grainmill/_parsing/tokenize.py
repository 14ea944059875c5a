"""Texts to token ids, a whole block at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._plan.spec import ShapeDtypeStruct
from grainmill._plan.transforms import Map, OfEngine

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


class Tokenize(OfEngine, Map):
    """Turns texts into arrays of token ids, by the block.

    A block of texts is one call of the tokenizer. The `tokenizers` package releases the interpreter
    lock meanwhile and uses threads of its own, unless the environment variable
    `TOKENIZERS_PARALLELISM` is `false`, as it is in worker processes if it is not set before.

    Args:
        tokenizer: One of: a `tokenizers.Tokenizer`; a fast tokenizer of `transformers`, or any
            other callable that returns an object or dict with `input_ids` if it is called with a
            list of texts and `add_special_tokens`; a callable that takes a list of texts and
            returns the ids of each. It is pickled for worker processes.
        field: If given, elements are dicts, and the text is their value under this name.
        output: The name of the ids in the result, a copy of the dict; `field` if `None`, so that
            the ids replace the text. Only with `field`.
        dtype: An integer dtype of the ids.
        max_length: If given, further ids are cut off. A tokenizer that truncates by itself keeps
            its special tokens.
        add_special_tokens: Whether to add the tokenizer's special tokens; `None` to leave that to
            the tokenizer, which adds them.

    Raises:
        ValueError: An argument is impossible. From a pipeline: the tokenizer returned something
            else, or an id does not fit `dtype`.
        TypeError: `tokenizer` is not callable. From a pipeline: an element is no text.

    Example:
        >>> def split(texts):
        ...     return [[len(word) for word in text.split()] for text in texts]
        >>> ds = grain.MapDataset.source(["one three", "two"])
        >>> list(ds.map(grain.transforms.Tokenize(split)))
        [array([3, 5], dtype=int32), array([3], dtype=int32)]
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        field: str | None = None,
        output: str | None = None,
        dtype: DTypeLike = np.int32,
        max_length: int | None = None,
        add_special_tokens: bool | None = None,
    ) -> None:
        if np.dtype(dtype).kind not in "iu":
            raise ValueError(f"`dtype` must be an integer dtype, got {dtype!r}")
        if max_length is not None and (type(max_length) is not int or max_length < 0):
            raise ValueError(f"`max_length` must be an integer from 0 on, got {max_length!r}")
        if output is not None and field is None:
            raise ValueError("`output` names a value of a dict, so it needs `field`")
        self._tokenizer = tokenizer
        self._field = field
        self._output = field if output is None else output
        self._dtype = np.dtype(dtype)
        self._max_length = max_length
        self._add_special_tokens = add_special_tokens
        self._engine = self._new_engine()

    def _new_engine(self) -> Callable[[list[str]], Sequence[Any]]:
        return _encoder(self._tokenizer, add_special_tokens=self._add_special_tokens)

    def map(self, element: Any) -> Any:
        """Returns the ids of a text, or the dict with them.

        Args:
            element: A text, or a dict with one.
        """
        return self.map_block([element])[0]

    def map_block(self, elements: list[Any]) -> list[Any]:
        """Returns the ids of each text, or the dicts with them.

        Args:
            elements: Texts, or dicts with one each.
        """
        field = self._field
        texts = elements if field is None else [element[field] for element in elements]
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"a text must be `str`, got a value of type {type(text).__name__}")
        rows = self._engine(texts)
        if isinstance(rows, Mapping | str | bytes) or len(rows) != len(texts):
            found = (
                f"a {type(rows).__name__}"
                if isinstance(rows, Mapping | str | bytes)
                else (f"{len(rows)} of them")
            )
            raise ValueError(
                f"the tokenizer must return a list with the ids of each of {len(texts)} texts, "
                f"got {found}"
            )
        ids = [self._array(row) for row in rows]
        if field is None:
            return ids
        return [{**element, self._output: own} for element, own in zip(elements, ids, strict=True)]

    @property
    def _ignores_input_spec(self) -> bool:
        return self._field is None

    def output_spec(self, input_spec: Any) -> Any:
        """Returns the shape and dtype of the ids, or the dict with them; any number is `None`.

        Args:
            input_spec: Those of the elements; any object if they are texts.
        """
        ids = ShapeDtypeStruct((None,), self._dtype)
        return ids if self._field is None else {**input_spec, self._output: ids}

    def _array(self, row: Any) -> NDArray[Any]:
        ids = np.asarray(row)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"the ids of a text must be a list of integers, got dtype {ids.dtype} and shape "
                f"{ids.shape}"
            )
        if self._max_length is not None:
            ids = ids[: self._max_length]
        converted = ids.astype(self._dtype)
        if ids.size and ids.dtype != self._dtype and not np.array_equal(converted, ids):
            wrong = ids[converted != ids][0]
            raise ValueError(f"token id {wrong} does not fit dtype {self._dtype}")
        return converted

    def __repr__(self) -> str:
        name = type(self._tokenizer).__name__
        return (
            f"{type(self).__name__}({name}, field={self._field!r}, output={self._output!r}, "
            f"dtype={self._dtype.name!r}, max_length={self._max_length}, "
            f"add_special_tokens={self._add_special_tokens})"
        )


def _encoder(
    tokenizer: Any, *, add_special_tokens: bool | None
) -> Callable[[list[str]], Sequence[Any]]:
    """A function of texts that returns the ids of each."""
    options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
    # `encode_batch_fast`, which computes no offsets, is newer.
    encode = getattr(tokenizer, "encode_batch_fast", None) or getattr(
        tokenizer, "encode_batch", None
    )
    if encode is not None and not callable(tokenizer):
        return lambda texts: [encoding.ids for encoding in encode(texts, **options)]
    if not callable(tokenizer):
        raise TypeError(
            "`tokenizer` must be a `tokenizers.Tokenizer` or a callable, got a value of type "
            f"{type(tokenizer).__name__}"
        )
    if hasattr(tokenizer, "convert_tokens_to_ids"):  # of `transformers`
        return lambda texts: tokenizer(
            texts, return_attention_mask=False, return_token_type_ids=False, **options
        )["input_ids"]
    return lambda texts: _ids_of(tokenizer(texts, **options))


def _ids_of(answer: Any) -> Any:
    if isinstance(answer, Mapping):
        return answer.get("input_ids", answer)
    return getattr(answer, "input_ids", answer)
