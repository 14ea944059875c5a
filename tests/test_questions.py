"""The page of messages: each is one of ours, and each of ours that says what to do is there."""

import ast
import functools
import re

import pages

ROOT = pages.DOCS.parent
# A message on the page; `...` stands for what varies.
LISTED = re.compile(r"^\*\*(`+) ?(.+?) ?\1\*\*$", re.MULTILINE)
PAGE = (pages.DOCS / "questions.md").read_text("utf-8")
ON_PAGE = [found[2] for found in LISTED.finditer(PAGE)]
# What comes after a problem and says what to do.
ADVICE = re.compile(
    r"[;,.] (?:or |please |and |so )?(?:add|append|batch|bring|call|catch|check|convert|correct"
    r"|copy|define|delete|drop|enlarge|give|go on|increase|leave|mix|name|omit|pass|provide|put"
    r"|raise|read|remove|repeat|restore|run|search|select|set|split|take|use|wrap|write)\b"
    r"|pip install|\bplease\b|see `|with `ds\.seed",
    re.IGNORECASE,
)
# Of the command line, in its help, or said where the option is chosen.
ELSEWHERE = {
    "_tools": "texts of the command line, which docs/command_line.md shows",
    "_src": "names of Grain",
}


def literals(tree):
    """The texts in a module, without docstrings; `...` stands for what is formatted in."""
    seen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in seen:
            continue
        text = text_of(node)
        if text is not None:
            seen.update(map(id, ast.walk(node)))
            yield text


def text_of(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "..." for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is right is None else f"{left or '...'}{right or '...'}"
    return None


def of_python():
    for path in sorted((ROOT / "python/grainmill").rglob("*.py")):
        if path.relative_to(ROOT / "python/grainmill").parts[0] not in ELSEWHERE:
            for text in literals(ast.parse(path.read_text("utf-8"))):
                yield re.sub(r"%[sd]", "...", text)


def of_rust():
    for path in sorted((ROOT / "rust").rglob("src/**/*.rs")):
        code = re.sub(r"^\s*//.*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
        code = code.partition("#[cfg(test)]")[0]
        for found in re.finditer(r'"((?:[^"\\]|\\.)*)"', code, re.DOTALL):
            text = re.sub(r"\\\n\s*", "", found[1]).replace('\\"', '"')
            yield re.sub(r"\{[^{}]*\}", "...", text)


def pattern_of(message):
    return re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)


@functools.cache
def messages():
    return [text for text in (*of_python(), *of_rust()) if " " in text]


def says_what_to_do(text):
    return ADVICE.search(text) and "def " not in text


def test_each_message_of_the_page_is_one_of_ours():
    texts = messages()
    gone = [one for one in ON_PAGE if not any(map(pattern_of(one).search, texts))]
    assert not gone
    assert len(ON_PAGE) > 60


def test_each_message_that_says_what_to_do_is_on_the_page():
    listed = [pattern_of(one) for one in ON_PAGE]
    missing = [
        text
        for text in messages()
        if says_what_to_do(text) and not any(pattern.search(text) for pattern in listed)
    ]
    assert not missing, f"{len(missing)} are not on the page:\n" + "\n".join(missing)


def test_a_message_without_its_text_is_found():
    tree = ast.parse('def f(x):\n    """Doc; use it."""\n    raise E(f"{x} is wrong; " + "use it")')
    (text,) = literals(tree)
    assert text == "... is wrong; use it"
    assert says_what_to_do("the file is wrong ......; use another")
    assert pattern_of("... is wrong; use it").search(text)
    assert not pattern_of("... is wrong; drop it").search(text)
