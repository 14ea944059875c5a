"""What workers can run of the main script, and what is said of the rest."""

import json
import subprocess
import sys
import textwrap

import pytest

HEAD = """
import contextvars, functools, threading
import grainmill as grain

def in_worker(function, reads=2):
    ds = grain.MapDataset.range(1, 4).map(function)
    if reads:
        return list(ds.to_iter_dataset(grain.ReadOptions(num_workers=reads)))
    options = grain.MultiprocessingOptions(num_workers=1)
    return list(ds.to_iter_dataset().mp_prefetch(options))
"""

# Definitions in the main script, of which `run(x)` is the function that workers call.
SENT = {
    "a cached function without parameters": """
        @functools.cache
        def tokenizer():
            return {"offset": 10}
        def run(x):
            return tokenizer()["offset"] + x
    """,
    "its parameters": """
        @functools.lru_cache(maxsize=7, typed=True)
        def tokenizer(name):
            return {"a": 10}[name]
        def run(x):
            parameters = tokenizer.cache_parameters()
            assert parameters == {"maxsize": 7, "typed": True}, parameters
            assert tokenizer.__name__ == "tokenizer"
            tokenizer("a")
            tokenizer("a")
            assert tokenizer.cache_info().hits
            return tokenizer("a") + x
    """,
    "a cached function that calls itself": """
        @functools.lru_cache
        def add(n, x):
            return x if n == 0 else 1 + add(n - 1, x)
        def run(x):
            return add(10, x)
    """,
    "cached functions that call each other": """
        @functools.cache
        def even(n):
            return n == 0 or odd(n - 1)
        @functools.cache
        def odd(n):
            return n != 0 and even(n - 1)
        def run(x):
            return 10 + x if even(6) and odd(7) else 0
    """,
    "a cached function of a function": """
        def make():
            @functools.cache
            def inner(x):
                return x + 10
            return inner
        run = make()
    """,
    "cached methods and properties": """
        class Tokenizer:
            @functools.cached_property
            def offset(self):
                return 4
            @functools.lru_cache
            def add(self, x):
                return self.offset + x
            @staticmethod
            @functools.cache
            def more():
                return 6
        tokenizer = Tokenizer()
        def run(x):
            return tokenizer.add(x) + Tokenizer.more() + Tokenizer().offset - 4
    """,
    "the cached function itself": """
        @functools.cache
        def run(x):
            return x + 10
    """,
    "a partial of it": """
        @functools.cache
        def add(y, x):
            return x + y
        run = functools.partial(add, 10)
    """,
    "functions by type": """
        @functools.singledispatch
        def offset(x):
            return 0
        @offset.register
        def _(x: int):
            return 10
        class By:
            @functools.singledispatchmethod
            def offset(self, x):
                return 0
            @offset.register
            def _(self, x: int):
                return 10
        def run(x):
            assert By().offset(3) == 10 and By().offset("") == 0 and offset("") == 0
            return offset(3) + x
    """,
}


def run(tmp_path, body):
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """What workers return for each of `SENT`, by name; one script, as pools take long to start."""
    checks = "sent[{!r}] = [[int(x) for x in in_worker(run, reads)] for reads in (2, 0)]\n"
    bodies = [textwrap.dedent(body) + checks.format(name) for name, body in SENT.items()]
    body = "import json\nsent = {}\n" + "".join(bodies) + "print(json.dumps(sent))\n"
    done = run(tmp_path_factory.mktemp("sent"), body)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", SENT)
def test_workers_have_functions_of_the_main_script(name, sent):
    assert sent[name] == [[11, 12, 13], [11, 12, 13]]


# Definitions of `run`, and what the error must say.
NAMED = {
    "a lock": (
        """
        LOCK = threading.Lock()
        def run(x):
            with LOCK:
                return x
        """,
        ["global `LOCK` of `run` at script.py:", "`_thread.lock`", "in the worker"],
    ),
    "a lock in an object, in a function that is called": (
        """
        class Counter:
            def __init__(self):
                self.guard = threading.RLock()
        counter = Counter()
        def helper(x):
            with counter.guard:
                return x
        def run(x):
            return [helper(y) for y in [x]]
        """,
        ["global `helper` of `run`", "global `counter` of `helper`", "`guard` of `Counter`"],
    ),
    "threading.local": (
        """
        LOCAL = threading.local()
        def run(x):
            return getattr(LOCAL, "x", x)
        """,
        ["global `LOCAL` of `run`", "_thread._local"],
    ),
    "a context variable": (
        """
        LEVEL = contextvars.ContextVar("level")
        def run(x):
            return LEVEL.get(x)
        """,
        ["global `LEVEL` of `run`"],
    ),
    "flags": (
        """
        from absl import flags
        flags.DEFINE_integer("size", 3, "")
        FLAGS = flags.FLAGS
        FLAGS(["script"])
        def run(x):
            return FLAGS.size + x
        """,
        ["global `FLAGS` of `run`", "read the flag before, and use its value"],
    ),
    "a lock in a closure": (
        """
        def make():
            lock = threading.Lock()
            def run(x):
                with lock:
                    return x
            return run
        run = make()
        """,
        ["variable `lock` of `make.<locals>.run`"],
    ),
    "an attribute of a method's object": (
        """
        class Reader:
            def __init__(self):
                self.ready = threading.Condition()
            def run(self, x):
                return x
        run = Reader().run
        """,
        ["`self` of `Reader.run`", "`ready` of `Reader`", "threading.Condition"],
    ),
    "a generator": (
        """
        numbers = (i for i in range(3))
        def run(x):
            return next(numbers)
        """,
        ["global `numbers` of `run`", "use a list"],
    ),
    "the module of the script": (
        """
        import __main__
        def run(x):
            return __main__.run
        """,
        ["global `__main__` of `run`", "the module of the main script"],
    ),
    "an object that is sent by name": (
        """
        class Named:
            def __init__(self):
                self.__qualname__ = "named"
            def __reduce__(self):
                return "named"
        named = Named()
        def run(x):
            return named
        """,
        ["global `named` of `run`", "cannot pickle `named` of the main script"],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_workers_cannot_have_is_named_in_this_process(name, tmp_path):
    if name == "flags":
        pytest.importorskip("absl")
    body, parts = NAMED[name]
    done = run(tmp_path, textwrap.dedent(body) + "in_worker(run)")
    assert done.returncode == 1
    for part in parts:
        assert part in done.stderr
    assert "in worker" not in done.stderr.replace("make it in the worker", "")
    assert "Dataset: MapMapDataset(" in done.stderr


def test_errors_of_workers_have_the_file_of_the_function(tmp_path):
    body = """
        def run(x):
            raise LookupError("here")
        in_worker(run)
    """
    done = run(tmp_path, body)
    assert "<dynamic-code>" not in done.stderr
    script = tmp_path / "script.py"
    line = 1 + script.read_text().splitlines().index('    raise LookupError("here")')
    assert f'File "{script}", line {line}, in run' in done.stderr
    assert f"script.py:{line - 1})" in done.stderr
