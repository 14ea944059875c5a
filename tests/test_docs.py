"""Every public name is documented, and the examples in docstrings are correct."""

import ast
import dataclasses
import doctest
import enum
import inspect
import pathlib

import numpy as np
import public_docs
import pytest

import grainmill as grain
from grainmill._plan import settings

pytestmark = pytest.mark.better_than_grain("these are our docs")

PACKAGE = pathlib.Path(inspect.getfile(grain)).parent
MODULES = public_docs.modules()
PUBLIC = {public.name: public for public in public_docs.documented(MODULES)}
# Names that examples may use without importing them.
NAMES = {
    "grain": grain,
    "np": np,
    "jpeg": (pathlib.Path(__file__).parent / "data/images/baseline_420.jpg").read_bytes(),
}

# Exceptions from the rules, and why.
NOT_RAISED = {
    ("MapDataset.to_iter_dataset", "ValueError"): "it makes options of defaults, which are valid",
}
WITHOUT_EXAMPLE = {
    "exceptions: nobody begins with one": ["GrainmillError", "WorkerError"],
    "given to the user, not made by them; shown where they come from": [
        "DataLoaderIterator",
        "Record",
        "RecordMetadata",
        "SharedMemoryArrayMetadata",
    ],
    "choices and descriptions: shown where they are an argument or a result": [
        "BOSHandling",
        "ExecutionTrackingMode",
        "ShapeDtypeStruct",
        "ShapeDtypeStructProtocol",
    ],
    "kept for programs that have them; the docs name what to use instead": [
        "BatchOperation",
        "FilterOperation",
        "IterDataset.prefetch",
        "MapOperation",
        "Operation",
        "PackAndBatchOperation",
        "RandomMapOperation",
        "TfRandomMap",
    ],
    "starts processes of Ray; shown on the page *Beam* and in `test_ray.py`": ["materialize"],
    "in use by other modules of the package": [
        "process_index_and_count",
    ],
    "shown in the example of `CheckpointHandler`": ["CheckpointRestore", "CheckpointSave"],
    "shown in the example of its class": [
        "IterDataset.__iter__",
        "IterDataset.parents",
        "MapDataset.__getitem__",
        "MapDataset.__len__",
    ],
}
EXCEPTED = {name for names in WITHOUT_EXAMPLE.values() for name in names}


def lacking(public):
    """The result of `public_docs.missing`, without the exceptions listed above."""
    lacks = public_docs.missing(public)
    not_raised = [f"`{error}`" for name, error in NOT_RAISED if name == public.name]
    return [lack for lack in lacks if not any(lack.endswith(error) for error in not_raised)]


def needs_example(public):
    if public.owner is None:
        return any(public.name in module.__all__ for module in MODULES)
    return public.name.partition(".")[0] in {"MapDataset", "IterDataset"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_documented(name):
    lacks = lacking(PUBLIC[name])
    assert not lacks, f"the docs of `{name}` are incomplete:\n- " + "\n- ".join(lacks)


@pytest.mark.parametrize("name", [name for name in PUBLIC if needs_example(PUBLIC[name])])
def test_what_users_begin_with_has_an_example(name):
    excepted = name in EXCEPTED
    has_one = "Example" in public_docs.sections(PUBLIC[name].doc)
    assert has_one is not excepted, (
        f"`{name}` has an example; take it from the list of those without"
        if excepted
        else f"the docs of `{name}` need an `Example:`, or a reason in `WITHOUT_EXAMPLE`"
    )


def test_exceptions_name_what_exists():
    excepted = {
        *(name for name, _ in NOT_RAISED),
        *EXCEPTED,
    }
    missing = excepted - PUBLIC.keys()
    assert missing <= {"process_index_and_count"}  # where JAX is not installed
    for name, error in NOT_RAISED:
        assert error in public_docs.raised(PUBLIC[name]), f"`{name}` needs no exception"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_module_describes_itself_and_its_values(module):
    assert inspect.getdoc(module), f"`{module.__name__}` has no docstring"
    described = {
        name
        for one in MODULES
        for name in public_docs.entries(
            public_docs.sections(inspect.getdoc(one)).get("Attributes", [])
        )
    }
    missing = sorted(set(public_docs.values_without_doc(module)) - described)
    assert not missing, f"no `Attributes:` of a module describes {missing}"


def test_the_page_of_sources_names_each():
    page = (pathlib.Path(__file__).parents[1] / "docs/sources.md").read_text()
    sources = {name for name in grain.sources.__all__ if name.endswith("DataSource")}
    # The interface of any.
    assert {name for name in sources if name not in page} == {"RandomAccessDataSource"}


def test_every_setting_is_described():
    said = public_docs.entries(public_docs.sections(inspect.getdoc(grain.config))["Attributes"])
    assert set(said) == set(settings._DEFAULTS)


def examples():
    parser = doctest.DocTestParser()
    docs = {name: public.doc for name, public in PUBLIC.items()}
    docs |= {module.__name__: inspect.getdoc(module) for module in MODULES}
    tests = [parser.get_doctest(doc, dict(NAMES), name, None, 0) for name, doc in docs.items()]
    return [test for test in tests if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_example_shows_what_happens(example, tmp_path, monkeypatch):
    if "jax" in example.docstring:
        pytest.importorskip("jax")
    monkeypatch.chdir(tmp_path)
    said = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)


def test_docstrings_are_literals():
    """`help`, type checkers and editors read the literal; no code may compute it."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for target in targets:
                name = getattr(target, "id", getattr(target, "attr", None))
                assert name != "__doc__", f"{path}:{target.lineno} computes a docstring"
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                assert not isinstance(body[0].value, ast.JoinedStr), f"{path}: an f-string"


class Unwritten:
    pass


class Halved:
    """Halves numbers.

    Args:
        divisor: What numbers are divided by, not 0.
    """

    def __init__(self, number: float, divisor: float = 2) -> None:
        self.number_given = number
        if not divisor:
            raise ZeroDivisionError(f"`divisor` must not be 0, got {divisor}")

    def half(self, times: int) -> float:
        """Divides the number.

        Args:
            time: How often.
        """
        return self.checked(times)

    def checked(self, times: int) -> float:
        """Returns a number.

        Args:
            times:
        """
        if times < 0:
            raise ValueError(f"`times` must not be negative, got {times}")
        return times

    @property
    def number(self) -> float:
        """the number"""

    @classmethod
    def of(cls, number) -> "Halved":
        """Makes one of `number`.

        Args:
            number: A number.

        Returns:
            A half.
        """
        return _made(cls, number)


def _made(kind, number):
    if number is None:
        raise TypeError("`number` must be a number, got None")
    return kind(number)


@dataclasses.dataclass
class Options:
    """Options with an undocumented field.

    Attributes:
        size: In bytes.
    """

    size: int
    depth: int = 0


class Choice(enum.Enum):
    """A choice.

    Attributes:
        LEFT: To the left.
    """

    LEFT = 1
    RIGHT = 2


def complete(size: int, *parts: int, **named: int) -> int:
    """Adds sizes.

    Args:
        size: In bytes, at least 1.
        *parts: More of them.
        **named: More of them
            by name.

    Returns:
        The sum, in bytes.

    Raises:
        ValueError: `size` is not positive.

    Example:
        >>> complete(1, 2)
        3
    """
    if size < 1:
        raise ValueError(f"`size` must be at least 1, got {size}")
    return size + sum(parts) + sum(named.values())


INCOMPLETE = {
    public_docs.Public("Unwritten", Unwritten): {"it has no docstring"},
    public_docs.Public("Halved", Halved): {
        "`Args:` does not describe `number`",
        "`Raises:` does not name `ZeroDivisionError`",
    },
    public_docs.Public("Halved.half", Halved.half, Halved): {
        "`Args:` does not describe `times`",
        "`Args:` describes `time`, which is not a parameter",
        "it returns `float`, and neither `Returns:` nor its first line describes it",
        "`Raises:` does not name `ValueError`",
    },
    public_docs.Public("Halved.checked", Halved.checked, Halved): {
        "`Args:` does not describe `times`",
        "`Raises:` does not name `ValueError`",
    },
    public_docs.Public("Halved.number", Halved.number, Halved): {
        "its first line is not a sentence: 'the number'"
    },
    public_docs.Public("Halved.of", vars(Halved)["of"], Halved): {
        "`number` has no type",
        "`Raises:` does not name `TypeError`",
    },
    public_docs.Public("Options", Options): {
        "`Args:` does not describe `depth`",
        "`Attributes:` does not describe `depth`",
    },
    public_docs.Public("Choice", Choice): {"`Attributes:` does not describe `RIGHT`"},
    public_docs.Public("complete", complete): set(),
}


@pytest.mark.parametrize("public", INCOMPLETE, ids=lambda public: public.name)
def test_what_a_docstring_lacks_is_found(public):
    assert set(public_docs.missing(public)) == INCOMPLETE[public]


def test_new_name_is_found(monkeypatch):
    """A class added to a public module is checked, with its methods, whatever its base."""

    class Derived(grain.MapDataset):
        def doubled(self, factor: int) -> int:
            return factor

    Derived.__module__ = "grainmill.sources"
    monkeypatch.setattr(grain.sources, "Derived", Derived, raising=False)
    monkeypatch.setattr(grain.sources, "LIMIT", 3, raising=False)
    monkeypatch.setattr(grain.sources, "__all__", [*grain.sources.__all__, "LIMIT"])
    found = {public.name: public for public in public_docs.documented([grain, grain.sources])}
    assert public_docs.missing(found["Derived"]) == ["it has no docstring"]
    assert public_docs.missing(found["Derived.doubled"]) == ["it has no docstring"]
    assert "Derived.batch" not in found
    assert public_docs.values_without_doc(grain.sources) == ["LIMIT"]
