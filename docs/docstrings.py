"""What mkdocstrings cannot know of our docstrings and classes."""

import copy
import inspect
import re

import griffe

from grainmill import _native


class Docstrings(griffe.Extension):
    """Adds what users see of a class or compiled name that is defined elsewhere.

    That is: the docstrings of compiled names; to a class the methods of its metaclass, which are
    called on it (`MapDataset.source`), and those of private bases (`describe`), which themselves
    are not named, nor are private defaults. `Example:` is read as the section of code that it is.
    """

    def on_object(self, *, obj, **_):
        if obj.path.startswith("grainmill._native."):
            compiled = _native
            for name in obj.path.split(".")[2:]:
                compiled = getattr(compiled, name, None)
            # The docstring of a value is that of `str`, and of a slot that of `object`.
            if not callable(compiled) or obj.name.startswith("__"):
                obj.docstring = None
            elif obj.docstring is None and compiled.__doc__:
                obj.docstring = griffe.Docstring(compiled.__doc__, parent=obj)
        for parameter in obj.parameters if obj.is_function else ():
            if re.match(r"_[a-zA-Z]", str(parameter.default)):
                parameter.default = "..."  # the docstring says what it is
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )

    def on_alias_instance(self, *, alias, **_):
        # Names that are imported for type checkers are there at run time, too, once they are used.
        alias.runtime = True

    def on_package(self, *, pkg, **_):
        self.on_object(obj=pkg)
        classes = [
            cls for module in _modules(pkg) for cls in module.classes.values() if not cls.is_alias
        ]
        public = _public_paths(pkg)
        for cls in classes:
            _add_methods(cls, pkg, public)
        shown = [list(_shown_bases(cls, pkg, public)) for cls in classes]
        for cls, bases in zip(classes, shown, strict=True):
            cls.bases = bases
            if "__new__" in cls.members:
                cls.members.setdefault("__init__", cls.members.pop("__new__"))
            if cls.module.name == "_native" and cls.path in public and "__init__" in cls.members:
                cls.members["__init__"].parameters = _parameters_of(getattr(_native, cls.name))
        for module in _modules(pkg):
            _show_objects(module, pkg)


def _parameters_of(compiled):
    """Those that a compiled class is made with."""
    return griffe.Parameters(
        *(
            griffe.Parameter(
                name,
                kind=griffe.ParameterKind(one.kind.description),
                default=None if one.default is one.empty else repr(one.default),
            )
            for name, one in inspect.signature(compiled).parameters.items()
        )
    )


def _modules(module):
    yield module
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _modules(inner)


def _public_paths(pkg):
    """Where the names of public modules are defined."""
    return {
        member.target_path if member.is_alias else member.path
        for module in _modules(pkg)
        if not any(part.startswith("_") for part in module.path.split("."))
        for name, member in module.members.items()
        if name in (module.exports or ())
    }


def _show_objects(module, pkg):
    """Shows an object that a module exports, such as `config`, as its class."""
    for name in module.exports or ():
        member = module.members[name]
        kind = getattr(member.is_attribute and member.annotation, "canonical_path", "")
        if kind.startswith(f"{pkg.path}.") and _of(kind, pkg).is_class:
            _of(kind, pkg).members.pop("__init__", None)  # there is one object only
            module.set_member(name, griffe.Alias(name, kind, parent=module))


def _add_methods(cls, pkg, public):
    """Adds to a class the public methods of its metaclass and of private bases of ours."""
    metaclass = cls.keywords.get("metaclass")
    owners = [(metaclass.canonical_path, "classmethod")] if hasattr(metaclass, "path") else []
    owners += [(path, "") for path in _private_bases(cls, pkg, public)]
    for path, label in owners:
        if not path.startswith(f"{pkg.path}."):
            continue
        for name, method in _of(path, pkg).members.items():
            is_method = method.is_function or "property" in method.labels
            is_shown = not name.startswith("_") or (name == "__init__" and not label)
            if is_method and is_shown and name not in cls.members:
                method = copy.copy(method)  # noqa: PLW2901
                method.labels = {*method.labels, *filter(None, [label])}
                cls.set_member(name, method)


def _private_bases(cls, pkg, public):
    """The paths of bases of ours that users do not see, however far up."""
    for base in getattr(cls, "bases", []):  # a value, as the base that a function made
        path = getattr(base, "canonical_path", "")
        if _is_private(path, pkg, public):
            yield path
            yield from _private_bases(_of(path, pkg), pkg, public)


def _shown_bases(cls, pkg, public):
    """The bases that users know; in place of a private one, those that it has."""
    for base in getattr(cls, "bases", []):
        path = getattr(base, "canonical_path", str(base))
        if _is_private(path, pkg, public):
            yield from _shown_bases(_of(path, pkg), pkg, public)
        elif path.rpartition(".")[2] not in {*_UNNAMED, cls.name}:
            yield base


def _is_private(path, pkg, public):
    return path.startswith(f"{pkg.path}.") and path not in public


def _of(path, pkg):
    return pkg[path.removeprefix(f"{pkg.path}.")]


# They say how a class is written, not what it is.
_UNNAMED = {"ABC", "Generic", "Protocol"}
