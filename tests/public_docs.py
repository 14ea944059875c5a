"""Checks the documentation of public names against their signatures and code."""

import abc
import ast
import builtins
import dataclasses
import enum
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
import types
import typing

import grainmill

# Checks for types that the signature already excludes; `Raises:` need not repeat these.
GUARDS = {"node_of", "random_access", "open_node"}
OURS = [
    f"grainmill.{name}"
    for name in ("_plan", "_iterators", "_dataset", "_stages", "_loader", "_files")
]
_HAS_JAX = importlib.util.find_spec("jax") is not None
_OF_JAX = {"device_put"}
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Note):$")
_ENTRY = re.compile(r" {4}`?(\*{0,2}[\w.]+)`?:(?: (.*))?$")
_RESULT_CLEAR_FROM_TYPE = re.compile(
    r"(grainmill\.[\w.]*)?(None|Self|NoReturn|((Planned)?(Map|Iter)Dataset|Elements)\b.*|DataLoader\b.*)$"
)


@dataclasses.dataclass(frozen=True)
class Public:
    """A public class, function, property or value, and the name by which users refer to it."""

    name: str
    value: typing.Any
    owner: type | None = None

    @property
    def function(self):
        """The function of a method or property; other values unchanged."""
        raw = self.value
        if isinstance(raw, property):
            raw = raw.fget
        if isinstance(raw, functools.cached_property):
            raw = raw.func
        if isinstance(raw, classmethod | staticmethod):
            raw = raw.__func__
        return inspect.unwrap(raw) if isinstance(raw, types.FunctionType) else raw

    @property
    def doc(self):
        """Its documentation, or that of the method it overrides."""
        if self.is_class:
            return inspect.cleandoc(vars(self.value).get("__doc__") or "")
        own = inspect.getdoc(self.function if self.owner is not None else self.value)
        if own is None and self.owner is not None:
            own = inspect.getdoc(getattr(self.owner, self.name.rpartition(".")[2], None))
        return own or ""

    @property
    def is_class(self):
        return isinstance(self.value, type)

    @property
    def is_property(self):
        return isinstance(self.value, property | functools.cached_property)


def modules(package=grainmill):
    """The public modules; `grainmill.jax` only if JAX is installed."""
    found = [package]
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        parts = info.name.split(".")
        if any(part.startswith("_") for part in parts):
            continue
        if info.name == "grainmill.jax" and not _HAS_JAX:
            continue
        found.append(importlib.import_module(info.name))
    return found


def names_of(module):
    """Public names: those in `__all__`, and others defined in the module."""
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        if isinstance(value, type | types.FunctionType)
    }
    names = {*module.__all__, *own}
    return sorted(names if _HAS_JAX else names - _OF_JAX)


def documented(module_list):
    """All names and members of classes with their own docstring, each once."""
    seen = {}
    for module in module_list:
        for name in names_of(module):
            value = getattr(module, name)
            if inspect.ismodule(value) or not _has_own_doc(value):
                continue
            seen.setdefault(id(value), Public(name, value))
    top = list(seen.values())
    classes = {public.value for public in top if public.is_class}
    found = {id(public.function): public for public in top}
    for public in top:
        for member in _members(public, classes):
            found.setdefault(id(member.function), member)
    return list({public.name: public for public in reversed(found.values())}.values())[::-1]


def values_without_doc(module):
    """Constants and type aliases, which the module's `Attributes:` describes."""
    return [
        name
        for name in names_of(module)
        if not inspect.ismodule(getattr(module, name)) and not _has_own_doc(getattr(module, name))
    ]


def _has_own_doc(value):
    if isinstance(value, type) or callable(value):
        return not isinstance(value, types.GenericAlias | typing._GenericAlias)
    return type(value).__module__.startswith("grainmill")


def _members(public, classes):
    kind = public.value if public.is_class else type(public.value)
    if kind.__module__.partition(".")[0] != "grainmill":
        return
    bases = [base for base in kind.__mro__ if base is kind or base not in classes]
    bases += [base for base in type(kind).__mro__ if base not in classes]
    for base in bases:
        if base.__module__.partition(".")[0] != "grainmill":
            continue
        for name, value in vars(base).items():
            member = Public(f"{public.name}.{name}", value, kind)
            if not callable(member.function) or isinstance(value, type | enum.Enum):
                continue
            if isinstance(value, types.MethodDescriptorType):
                if not name.startswith("_"):
                    yield member
            elif not name.startswith("_") or _is_contract(kind, name, value):
                yield member


def _is_contract(kind, name, value):
    """Whether users define this dunder method in their own classes."""
    if getattr(value, "__isabstractmethod__", False):
        return True
    protocol = getattr(kind, "_is_protocol", False)
    return protocol and name in {"__len__", "__getitem__", "__call__"}


def sections(doc):
    """The text of each section of a docstring in Google's convention; the rest under ""."""
    found, current = {"": []}, ""
    for line in doc.splitlines():
        if match := _SECTION.match(line):
            current = match[1]
            found[current] = []
        elif line and not line.startswith(" "):
            current = ""
            found[""].append(line)
        else:
            found[current].append(line)
    return found


def entries(lines):
    """The names that a section describes, each with its description."""
    found, name = {}, None
    for line in lines:
        if match := _ENTRY.match(line):
            name = match[1]
            found[name] = match[2] or ""
        elif name is not None:
            found[name] += line.strip()
    return found


def missing(public):
    """What the docs of `public` lack, as sentences; empty if they are complete."""
    doc = public.doc
    if not doc.strip():
        return ["it has no docstring"]
    parts = sections(doc)
    first = doc.partition("\n\n")[0]
    lacks = []
    if not re.match(r"[A-Z`\"]", first) or not first.rstrip().endswith((".", "?")):
        lacks.append(f"its first line is not a sentence: {first!r}")
    lacks += _missing_arguments(public, parts)
    lacks += _missing_result(public, parts, first)
    described = set(entries(parts.get("Raises", [])))
    lacks += [f"`Raises:` does not name `{error}`" for error in sorted(raised(public) - described)]
    for title in ("Args", "Attributes", "Raises", "Returns", "Yields"):
        if title in parts and not "".join(parts[title]).strip():
            lacks.append(f"`{title}:` is empty")
    return lacks


def _missing_arguments(public, parts):
    texts = entries(parts.get("Args", [])) | entries(parts.get("Attributes", []))
    parameters = _parameters(public)
    lacks = [f"`Args:` does not describe `{name}`" for name in parameters if not texts.get(name)]
    lacks += [
        f"`{name}` has no type"
        for name, parameter in parameters.items()
        if parameter.annotation is inspect.Parameter.empty
        and not isinstance(public.function, types.BuiltinFunctionType | types.MethodDescriptorType)
        and getattr(public.value, "__module__", None) != "grainmill._native"
    ]
    lacks += [f"`Attributes:` does not describe `{name}`" for name in _fields(public) - set(texts)]
    surplus = set(entries(parts.get("Args", []))) - set(parameters)
    lacks += [f"`Args:` describes `{name}`, which is not a parameter" for name in sorted(surplus)]
    return lacks


def _parameters(public):
    """The parameters that a caller passes, by name as in `Args:` (`*args`, `**kwargs`)."""
    if public.is_property or (not callable(public.value) and public.owner is None):
        return {}
    called = _constructor(public.value) if public.is_class else public.function
    if called is None:
        return {}
    parameters = list(inspect.signature(called).parameters.values())
    is_static = isinstance(public.value, staticmethod)
    bound = public.is_class or (public.owner is not None and not is_static)
    if bound and parameters and parameters[0].name in {"self", "cls", "_cls"}:
        parameters = parameters[1:]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return {
        stars.get(p.kind, "") + p.name: p
        for p in parameters
        if not (p.name.startswith("_") and p.kind is inspect.Parameter.VAR_KEYWORD)
    }


def _constructor(kind):
    """The callable with the parameters of `kind(...)`; `None` if `kind` defines none."""
    if issubclass(kind, enum.Enum | BaseException) or getattr(kind, "_is_protocol", False):
        return None
    for base in kind.__mro__:
        if base in {object, typing.Generic, abc.ABC}:
            return None
        if base.__module__ == "grainmill._native":
            return kind
        for name in ("__init__", "__new__"):
            if isinstance(vars(base).get(name), types.FunctionType | staticmethod):
                return inspect.unwrap(getattr(base, name))
    return None


def _fields(public):
    """Public attributes that a class declares: annotations, and members of an enumeration."""
    if not public.is_class:
        return set()
    if issubclass(public.value, enum.Enum):
        return set(public.value.__members__)
    return {
        name
        for name, annotation in inspect.get_annotations(public.value).items()
        if not name.startswith("_")
        and "ClassVar" not in str(annotation)
        and "KW_ONLY" not in str(annotation)
    }


def _missing_result(public, parts, first):
    if public.is_class or public.is_property or (not callable(public.value) and not public.owner):
        return []
    if first.startswith(("Returns ", "Yields ")) or {"Returns", "Yields"} & set(parts):
        return []
    try:
        annotation = inspect.signature(public.function).return_annotation
    except ValueError:
        return []
    if annotation is inspect.Signature.empty:
        return []  # compiled; the stub has the type
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if annotation is None or _RESULT_CLEAR_FROM_TYPE.match(text):
        return []
    return [f"it returns `{text}`, and neither `Returns:` nor its first line describes it"]


def raised(public):
    """Names of the exceptions raised for arguments, by `public` and the plan node it builds."""
    if public.is_class:
        kind = public.value
        making = ("__init__", "__new__", "__post_init__")
        base = next(base for base in kind.__mro__ if {*making} & vars(base).keys())
        starts = [inspect.getattr_static(base, name) for name in making if name in vars(base)]
        starts = [getattr(start, "__func__", start) for start in starts]
        ours = [start for start in starts if isinstance(start, types.FunctionType)]
        return set().union(*(_raised_by(start, kind, frozenset()) for start in ours))
    if isinstance(public.function, types.FunctionType):
        return _raised_by(public.function, public.owner, frozenset())
    return set()


def _raised_by(function, owner, seen):
    function = inspect.unwrap(function)
    if function in seen or function.__name__ in GUARDS or not _is_ours(function):
        return set()
    seen |= {function}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()  # generated, as the `__init__` of a dataclass
    found = set()
    body = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else [tree]
    for node in [node for statement in body for node in ast.walk(statement)]:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func)
            kind = getattr(builtins, name, None) or function.__globals__.get(name)
            if isinstance(kind, type) and issubclass(kind, Exception):
                if kind is not AssertionError and not name.startswith("_"):
                    found.add(name)
                continue
        for called, its_owner in _reached(node, function, owner):
            found |= _raised_by(called, its_owner, seen)
    return found


def _reached(node, function, owner):
    """Functions of the package that a name or attribute in the code of `function` refers to."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        kind = _resolved(node.func, function, owner)
        if isinstance(kind, type) and _is_ours(kind):
            for name in ("__init__", "__post_init__"):
                if isinstance(vars(kind).get(name), types.FunctionType):
                    yield vars(kind)[name], kind
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        value = _resolved(node, function, owner)
        if isinstance(value, types.MethodType) and _is_ours(value.__func__):
            yield value.__func__, value.__self__
        elif isinstance(value, types.FunctionType) and _is_ours(value):
            private = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            yield value, owner if private else None


def _is_ours(value):
    return value.__module__.startswith((*OURS, "test_docs")) or re.fullmatch(
        r"grainmill\.[a-z]\w*", value.__module__
    )


def _resolved(node, function, owner):
    if isinstance(node, ast.Name):
        return function.__globals__.get(node.id)
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
            return inspect.getattr_static(owner, node.attr, None) if owner else None
        base = _resolved(node.value, function, owner)
        if isinstance(base, types.ModuleType) and not base.__name__.startswith("grainmill"):
            return None
        return getattr(base, node.attr, None) if isinstance(base, types.ModuleType | type) else None
    return None
