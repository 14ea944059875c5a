"""The names of Grain: what the page of names says, and what is behind some of them."""

import contextlib
import importlib.util
import inspect
import pathlib

import pytest
from under_test import experimental, grain

PAGE = pathlib.Path(__file__).parents[1] / "docs/names.py"


@pytest.mark.better_than_grain("about grainmill")
def test_page_of_names_is_up_to_date():
    spec = importlib.util.spec_from_file_location("names", PAGE)
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    current = PAGE.with_suffix(".md").read_text("utf-8")
    assert names.page() == current, "run `python docs/names.py`"
    assert "another object" not in current
    assert "has other" not in current
    assert "lacks" not in current


def test_spec_of_an_array_is_of_the_protocol():
    spec = experimental.ShapeDtypeStruct((2, None), "int64")
    assert isinstance(spec, experimental.ShapeDtypeStructProtocol)
    assert experimental.ShapeDtypeStructProtocol in experimental.ShapeDtypeStruct.__mro__
    assert (spec.shape, spec.dtype) == ((2, None), "int64")
    assert spec == experimental.ShapeDtypeStruct(shape=(2, None), dtype="int64")
    assert hash(spec) == hash(experimental.ShapeDtypeStruct((2, None), "int64"))
    assert repr(spec) == "ShapeDtypeStruct(shape=(2, None), dtype='int64')"
    with pytest.raises(AttributeError):
        spec.shape = ()
    with pytest.raises(TypeError, match="not a generic class"):
        experimental.ShapeDtypeStruct[int]


@pytest.mark.better_than_grain("takes the property of the protocol for a default")
def test_spec_of_an_array_needs_both_values():
    with pytest.raises(TypeError, match="dtype"):
        experimental.ShapeDtypeStruct((2,))


def test_record_key_of_a_source_has_a_name():
    class Letters(grain.sources.RandomAccessDataSource):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return "abc"[index]

    signature = inspect.signature(grain.sources.RandomAccessDataSource.__getitem__)
    assert signature.bind(None, index=1).arguments["index"] == 1
    assert Letters().__getitem__(index=1) == "b"
    assert list(grain.MapDataset.source(Letters())) == ["a", "b", "c"]


def test_setting_or_its_default():
    before = grain.config.get_or_default("py_traceback_filtering")
    assert before == "auto"
    with pytest.raises(ValueError, match="Unrecognized config option: nothing"):
        grain.config.get_or_default("nothing")


@pytest.mark.better_than_grain("gives the default until flags are parsed")
def test_setting_that_was_changed():
    grain.config.update("py_debug_mode", value=True)
    try:
        assert grain.config.get_or_default("py_debug_mode") is True
    finally:
        grain.config.update("py_debug_mode", value=False)
    assert grain.config.get_or_default("py_debug_mode") is False


class Timed(grain.MapDataset):
    _MUTATES_ELEMENT_SPEC = False

    def __len__(self):
        return len(self._parent)

    def __getitem__(self, index):
        with self._stats.record_self_time():
            index = len(self) - 1 - index
        return self._stats.record_output_spec(self._parent[index])


class TimedIter(grain.IterDataset):
    def __iter__(self):
        return TimedIterator(self._parent.__iter__())


class TimedIterator(grain.DatasetIterator):
    def __next__(self):
        element = next(self._parent)
        with contextlib.suppress(KeyError), self._stats.record_self_time(num_elements=1):
            self._stats.record_bytes_consumed(element)
            raise KeyError
        self._stats.record_bytes_produced(element)
        return self._stats.record_output_spec(element)

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


def test_users_classes_report_times():
    ds = Timed(grain.MapDataset.range(4))
    assert [ds[i] for i in range(4)] == [3, 2, 1, 0]
    assert list(TimedIter(ds.to_iter_dataset())) == [3, 2, 1, 0]


def test_classes_have_no_names_that_grain_does_not_know():
    assert not hasattr(experimental.ThreadPrefetchDatasetIterator, "over")
    assert not hasattr(grain.samplers.IndexSampler, "block")
    assert not hasattr(grain.samplers.SequentialSampler, "block")
