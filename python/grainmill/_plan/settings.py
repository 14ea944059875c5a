"""Process-wide settings, also absl flags named `grain_<setting>` once absl is imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class _Defaults:
    """The settings, with the value that each has at first."""

    tf_interleaved_shuffle: bool = False
    tf_interleaved_shuffle_block_size: int = 10
    tf_interleaved_shuffle_parallel_blocks: int = 10
    tf_lookup_batch_size: int = 100
    tf_lookup_num_parallel_calls: int = -1
    tf_lookup_fast_warmup: bool = False
    tf_optimized_sequential_read: bool = False
    tf_prefetch_buffer_size: int = -1
    py_debug_mode: bool = False
    py_dataset_visualization_output_dir: str | None = None
    py_relay_sigterm_to_main: bool = False
    py_traceback_filtering: str = "auto"
    stall_warning_s: float = 20.0
    stall_timeout_s: float = 0.0


_DEFAULTS = {name: getattr(_Defaults, name) for name in _Defaults.__annotations__}
_TRACEBACK_FILTERING = ["auto", "off", "tracebackhide", "quiet_remove_frames", "remove_frames"]
_DEFINE = {bool: "DEFINE_bool", int: "DEFINE_integer", float: "DEFINE_float"}

if TYPE_CHECKING:
    _Settings = _Defaults
else:
    _Settings = object


class Config(_Settings):
    """Process-wide settings, read as attributes and changed with `update`.

    In programs that import absl, before this package or after it, each is also a command-line flag,
    `--grain_<name>`, which takes effect once flags are parsed. Reading an unknown attribute raises
    a `ValueError`, and so does assigning to any attribute.

    Attributes:
        py_traceback_filtering: "off" keeps all frames in tracebacks; "auto", the default, and the
            other values leave out those of this package.
        py_debug_mode: Whether the execution summary of each iterator, a table of times per stage,
            is logged once a minute (logger "grainmill", level INFO), while it is used.
        py_dataset_visualization_output_dir: If empty, each iterator logs its pipeline as text at
            its first element, with the spec of an element after each stage; otherwise a directory,
            to which it is drawn as SVG and as an HTML page. `None`, the default, for neither.
        stall_warning_s: Seconds, 20 by default, without an element that the program waits for,
            after which a warning (logger "grainmill") names the thread or worker, the element, and
            the line of your code; again after twice the time, and so on. 0 never warns. It is the
            default of `stall_warning_s` in `ReadOptions` and `MultiprocessingOptions`, and holds
            for stages without such options, as they wait.
        stall_timeout_s: Seconds without an element after which an error is raised; 0, the default,
            waits without limit. It is the default of `timeout_s` in those options.
        py_relay_sigterm_to_main: Without effect.
        tf_interleaved_shuffle: Without effect.
        tf_interleaved_shuffle_block_size: Without effect.
        tf_interleaved_shuffle_parallel_blocks: Without effect.
        tf_lookup_batch_size: Without effect.
        tf_lookup_num_parallel_calls: Without effect.
        tf_lookup_fast_warmup: Without effect.
        tf_optimized_sequential_read: Without effect.
        tf_prefetch_buffer_size: Without effect.

    Example:
        >>> grain.config.update("py_traceback_filtering", "off")
        >>> grain.config.py_traceback_filtering
        'off'
        >>> grain.config.update("py_traceback_filtering", "auto")
    """

    _values: dict[str, Any]
    _flags: Any

    def __init__(self) -> None:
        self.__dict__["_values"] = dict(_DEFAULTS)
        self.__dict__["_flags"] = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in _DEFAULTS:
                raise ValueError(f"Unrecognized config option: {name}")
            flags = self._flags
            if flags is not None and flags.is_parsed():
                return flags[f"grain_{name}"].value
            return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError("Please use update().")

    def define_flags(self) -> None:
        """Defines the settings as absl flags once absl is imported; importing grainmill does so."""
        if "absl.flags" in sys.modules:
            self._define(sys.modules["absl.flags"])
        else:
            sys.meta_path.insert(0, _WhenImported("absl.flags", self._define))

    def _define(self, absl_flags: Any) -> None:
        self.__dict__["_flags"] = _define_flags(absl_flags)
        for name, value in self._values.items():
            if value != _DEFAULTS[name]:  # updated before
                self._flags[f"grain_{name}"].value = value

    def get_or_default(self, name: str) -> Any:
        """Returns the value of a setting.

        Args:
            name: The setting.

        Raises:
            ValueError: There is no such setting.
        """
        return getattr(self, name)

    def update(self, name: str, value: Any) -> None:
        """Sets a setting, and its flag if absl is imported.

        Args:
            name: The setting.
            value: Its new value.

        Raises:
            ValueError: There is no such setting.
        """
        if name not in _DEFAULTS:
            raise ValueError(f"Unrecognized config option: {name}")
        self._values[name] = value
        if self._flags is not None:
            self._flags[f"grain_{name}"].value = value


class _WhenImported:
    """Finds the module `name` as others do, and calls `then` with it when it has been imported.

    absl takes as long to import as this package.
    """

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._call_after(spec.loader)
                return spec
        return None

    def _call_after(self, loader: Any) -> None:
        """Makes `loader`, when it executes its next module, call `then` with that."""
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            self._then(module)

        loader.exec_module = exec_module


def _define_flags(absl_flags: Any) -> Any:
    redefinable = {"allow_override": True}  # Grain, if imported later, defines the same flags
    for name, default in _DEFAULTS.items():
        flag, help_text = f"grain_{name}", f"Setting `{name}` of grainmill."
        if flag in absl_flags.FLAGS:
            continue
        if name == "py_traceback_filtering":
            absl_flags.DEFINE_enum(flag, default, _TRACEBACK_FILTERING, help_text, **redefinable)
        else:
            define = getattr(absl_flags, _DEFINE.get(type(default), "DEFINE_string"))
            define(flag, default, help_text, **redefinable)
    return absl_flags.FLAGS


config: Config = Config()
