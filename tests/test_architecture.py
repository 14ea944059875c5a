"""The map of the code, decisions and steps for contributors: short, and all they name exists."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.better_than_grain("these are our docs")

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs/decisions"
MAP = ROOT / "ARCHITECTURE.md"
INDEX = DECISIONS / "README.md"
PAGES = sorted(DECISIONS.glob("[0-9]*.md"))
TEXTS = [MAP, ROOT / "CONTRIBUTING.md", INDEX, *PAGES]
MAX_WORDS = {MAP: 2500, **dict.fromkeys(PAGES, 400)}
# What a page says, in this order; it was measured or considered, or both.
PARTS = ["Question", "Measured|Considered|Found", "Decided", "Look again"]
SOURCES = [
    *("python/**/*.py*", "rust/**/*.rs", "rust/**/*.toml", "tests/**/*.py", "benches/*.py"),
    *("docs/*.py", ".ci/*", ".github/**/*.yml", "Makefile", "*.toml"),
]
# Names that are of others, or of nobody yet.
ELSEWHERE = {
    # Crates and functions that were not taken.
    *("sonic-rs", "get_many", "simd-json", "jiter", "bitvec", "lexical-parse-float"),
    *("libjpeg-turbo-rs", "turbojpeg", "mozjpeg-sys", "kamadak-exif", "memmap2", "quick_cache"),
    # Of the shell, and of a page's text.
    *("cd", "area"),
}
_FENCED = re.compile(r"^```.*?^```$", flags=re.MULTILINE | re.DOTALL)
_ENDS = (".py", ".pyi", ".rs", ".md", ".toml", ".json", ".yml", ".txt")


def read(path):
    return path.read_text("utf-8")


def paths_in_repository():
    """All files and folders that are, or hold, what git would show."""
    left_out = {".git", ".venv", "target", "__pycache__", "dist"}
    found = [ROOT]
    for folder in found:
        found += [path for path in folder.iterdir() if path.is_dir() and path.name not in left_out]
    files = [path for folder in found for path in folder.iterdir() if path.name not in left_out]
    return "".join(f"/{path.relative_to(ROOT).as_posix()}\n" for path in files)


PATHS = paths_in_repository()
WORDS = {
    path: frozenset(re.findall(r"\w+", path.read_text("utf-8", errors="replace")))
    for pattern in SOURCES
    for path in ROOT.glob(pattern)
    if path.is_file() and path != Path(__file__)
}


def is_path(name):
    return bool(re.fullmatch(r"[\w.<>*{},/-]+", name)) and ("/" in name or name.endswith(_ENDS))


def path_exists(name):
    """Whether a file or folder has it at its end; `<name>` and `*` are any, `{a,b}` both."""
    braces = re.search(r"\{(.*?)\}", name)
    if braces:
        begin, end = name[: braces.start()], name[braces.end() :]
        return all(path_exists(begin + one + end) for one in braces[1].split(","))
    pattern = re.sub(r"<\w+>|\\\*", r"[^/\\n]*", re.escape(name.strip("/")))
    return re.search(f"/{pattern}$", PATHS, flags=re.MULTILINE) is not None


def is_known(name):
    """Whether one source has all words of a dotted name."""
    words = set(re.findall(r"[^\W\d]\w*", name))
    return any(words <= found for found in WORDS.values())


def missing(text):
    """What is named in `text`, by backticks, and does not exist."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", _FENCED.sub("", text)):
        if is_path(code):
            found += [] if path_exists(code) else [code]
            continue
        names = re.findall(r"[^\W\d][\w-]*(?:(?:\.|::)[^\W\d]\w*)*", code)
        found += [name for name in names if name not in ELSEWHERE and not is_known(name)]
    return found


def headings(text):
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.*)$", _FENCED.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(text, folder):
    """The links of a page in `folder` that lead nowhere in the repository."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        path = folder / name
        leads = path.exists()
        if leads and anchor:
            leads = anchor in headings(read(path) if name else text)
        broken += [] if leads else [link]
    return broken


@pytest.mark.parametrize("path", MAX_WORDS, ids=lambda path: path.name)
def test_a_page_is_short(path):
    assert len(read(path).split()) <= MAX_WORDS[path]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_what_a_page_names_exists(path):
    assert not missing(read(path))


def test_files_and_methods_in_the_walk_exist():
    (walk,) = re.findall(r"```text\n(_dataset.*?)```", read(MAP), flags=re.DOTALL)
    for name in re.findall(r"[\w/]+\.py", walk):
        assert path_exists(name), name
    for name in re.findall(r"[A-Z]\w+\.\w+", walk):
        assert is_known(name), name


@pytest.mark.parametrize(
    "path",
    [*TEXTS, ROOT / "README.md", ROOT / "SECURITY.md"],
    ids=lambda path: path.name,
)
def test_links_lead_somewhere(path):
    assert not broken_links(read(path), path.parent)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_decision_has_its_parts(path):
    text = read(path)
    assert text.startswith(f"# {int(path.name[:3])}. ")
    assert re.search(r".*\n\n".join(rf"\*\*(?:{part})\b" for part in PARTS), text, re.DOTALL)


def test_each_decision_is_listed_once_by_its_title():
    listed = re.findall(r"^- \[(\d+)\]\(([\w-]+\.md)\) (.*)$", read(INDEX), flags=re.MULTILINE)
    pages = [
        (str(int(path.name[:3])), path.name, read(path).split("\n")[0].split(". ", 1)[1])
        for path in PAGES
    ]
    assert sorted(listed, key=lambda page: page[1]) == pages
    assert len({number for number, *_ in listed}) == len(listed)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see `_evaluate/gone.py`", ["_evaluate/gone.py"]),
        ("see `program.py` and `rust/core/src/order/`", []),
        ("see `_stages/<name>.py`, `rust/{core,image}/src/lib.rs`, `tests/parity/test_*.py`", []),
        ("`rust/{core,gone}/tests`, `gone_*.py`", ["rust/{core,gone}/tests", "gone_*.py"]),
        ("`Program.run` and `Executor.take_gone(...)`", ["Executor.take_gone"]),
        ("`rayon_gone::scope`", ["rayon_gone::scope"]),
        ("`ds[g + i :: c]`, `make develop`", []),
        ("```sh\ngone --now\n```", []),
    ],
)
def test_what_is_gone_is_found(text, found):
    assert missing(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](CONTRIBUTING.md), [b](https://example.org/x)", []),
        ("[a](docs/gone.md)", ["docs/gone.md"]),
        ("[a](CONTRIBUTING.md#releasing) [b](CONTRIBUTING.md#gone)", ["CONTRIBUTING.md#gone"]),
        ("# Two words\n[a](#two-words) [b](#one)", ["#one"]),
    ],
)
def test_links_that_lead_nowhere_are_found(text, found):
    assert broken_links(text, ROOT) == found
