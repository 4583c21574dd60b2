"""Modules that are loaded early, so that a script that imports them later does not notice.

In: names of modules. Out: `Notes`, what each import did; `Stash`, which takes the modules out of sys.modules and is a
finder that gives each back when the script imports it, with everything else that its import does.

The waiting process (waiting.py) imports this file as a module of its own.
"""

from __future__ import annotations

import builtins
import os
import sys

# importlib itself may not be imported: each module that a script sees must come with the script's own import.
_bootstrap = sys.modules["_frozen_importlib"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

READ_ALL = b"*"


class Beneath:
    """Variables and actions on signals as C code sees them: a library may change them when it is loaded."""

    def __init__(self) -> None:
        # ctypes itself may not be imported either.
        import _ctypes
        import _signal  # type: ignore[import-not-found]

        text = type("Text", (_ctypes._SimpleCData,), {"_type_": "z"})
        address = type("Address", (_ctypes._SimpleCData,), {"_type_": "P"})
        texts: Any = type("Texts", (_ctypes._Pointer,), {"_type_": text})
        # Longer than any system's struct sigaction, which begins with the handler.
        action: Any = type("Action", (_ctypes.Array,), {"_type_": address, "_length_": 32})
        library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
        environ, self._sigaction = _ctypes.dlsym(library, "environ"), _ctypes.dlsym(library, "sigaction")
        self._call: Any = _ctypes.call_function
        self._texts: Any = texts.from_address(environ)
        self._action = action
        self._actions = {number: self._current(number) for number in _signal.valid_signals()}

    def _current(self, number: int) -> Any:
        action = self._action()
        self._call(self._sigaction, (number, None, action))
        return action

    def variables(self) -> dict[bytes, bytes]:
        """Return what getenv of C finds."""
        at = 0
        values: dict[bytes, bytes] = {}
        while self._texts and (entry := self._texts[at]) is not None:
            name, _, value = entry.partition(b"=")
            values.setdefault(name, value)
            at += 1
        return values

    def take_back(self, expected: dict[bytes, bytes]) -> list[tuple[Any, ...]]:
        """Undo what differs from variables as Python knows them, and from the first actions; returns it as events."""
        events: list[tuple[Any, ...]] = []
        variables = self.variables()
        if variables != expected:
            for name in dict.fromkeys((*variables, *expected.keys())):
                if variables.get(name) != expected.get(name):
                    events.append(("call", put, name, variables.get(name)))
                    put(name, expected.get(name))
        for number, first in self._actions.items():
            now = self._current(number)
            if now[0] != first[0]:
                events.append(("call", self.act, number, now))
                self.act(number, first)
        return events

    def act(self, number: int, action: Any) -> None:
        """Set the action on a signal."""
        self._call(self._sigaction, (number, action, None))


def put(name: bytes, value: bytes | None) -> None:
    """Set a variable for C code alone; None removes it."""
    if value is None:
        os.unsetenv(name)
    else:
        os.putenv(name, value)


class Environ(dict):  # type: ignore[type-arg]
    """The dictionary below os.environ while modules load: it records which modules read and write variables."""

    def __init__(self, data: dict[bytes, bytes], notes: Notes) -> None:
        super().__init__(data)
        self._notes = notes

    def __getitem__(self, key: bytes) -> Any:
        self._notes.read(key)
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        self._notes.read(READ_ALL)
        return super().__iter__()

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._notes.note("env", key, value)
        super().__setitem__(key, value)

    def __delitem__(self, key: bytes) -> None:
        self._notes.note("env", key, None)
        super().__delitem__(key)


class Notes:
    """Loads modules, and notes what each import does besides: a script that imports it later gets the same."""

    def __init__(self, output: tuple[str, str], known: set[str]) -> None:
        """`output`: the files that descriptors 1 and 2 write to; `known`: modules that each Python has at its start."""
        self.events: dict[str, list[tuple[Any, ...]]] = {}
        """By module, in order: what running its file has done."""
        self.reads: dict[bytes, set[str]] = {}
        """By variable, the packages that were being loaded when it was read."""
        self.failed: dict[str, str] = {}
        """By module, why it does not load: it may depend on something that is not installed."""
        self._running: list[str] = []
        self._files = output
        self._output: list[int] = []
        self._printed = [0, 0]
        self._active = False
        self._count = 0
        self._known: set[str] = set()
        self._base = known
        self._searched: set[str] = set()

    def packages(self) -> set[str]:
        """Return the top-level names of what is being loaded."""
        return {name.partition(".")[0] for name in self._running}

    def note(self, *event: Any) -> None:
        if self._active and self._running:
            self.events[self._running[-1]].append(event)

    def read(self, key: bytes) -> None:
        if self._active:
            self.reads.setdefault(key, set()).update(self.packages())

    def __enter__(self) -> Notes:
        self._searched = set(sys.path_importer_cache)
        import atexit
        import warnings

        self._real = {
            "load": _bootstrap._load_unlocked,
            "gcd": _bootstrap._gcd_import,
            "import": builtins.__import__,
            "atexit": atexit.register,
            "show": warnings._showwarnmsg,  # type: ignore[attr-defined]
            "environ": os.environ._data,  # type: ignore[attr-defined]
        }
        self._beneath = Beneath()
        self._output = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._files]
        self._always = ("always", None, Warning, None, 0)
        warnings.filters.insert(0, self._always)  # type: ignore[attr-defined]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        self._lists: dict[str, tuple[list[Any], list[Any]]] = {
            "path": (sys.path, list(sys.path)),
            "meta_path": (sys.meta_path, list(sys.meta_path)),
            "path_hooks": (sys.path_hooks, list(sys.path_hooks)),
            "filters": (warnings.filters, list(warnings.filters)),  # type: ignore[dict-item]
        }
        self._first = {name: list(before) for name, (_, before) in self._lists.items()}
        _bootstrap._load_unlocked = _as_importlib(self._load)  # type: ignore[attr-defined]
        _bootstrap._gcd_import = _as_importlib(self._gcd_import)  # type: ignore[attr-defined]
        builtins.__import__ = _as_importlib(self._import)
        atexit.register = self._at_exit  # type: ignore[assignment]
        warnings._showwarnmsg = self._warned  # type: ignore[attr-defined]
        os.environ._data = Environ(self._real["environ"], self)  # type: ignore[attr-defined]
        self._known = set(sys.modules)
        self._count = len(sys.modules)
        self._active = True
        return self

    def __exit__(self, *_: object) -> None:
        import atexit
        import warnings

        self._active = False
        _bootstrap._load_unlocked = self._real["load"]  # type: ignore[attr-defined]
        _bootstrap._gcd_import = self._real["gcd"]  # type: ignore[attr-defined]
        builtins.__import__ = self._real["import"]
        atexit.register = self._real["atexit"]
        warnings._showwarnmsg = self._real["show"]  # type: ignore[attr-defined]
        changed, os.environ._data = os.environ._data, self._real["environ"]  # type: ignore[attr-defined]
        for key in {key for key, _ in changed.items() ^ self._real["environ"].items()}:
            put(key, self._real["environ"].get(key))
        for entry in sys.path_importer_cache.keys() - self._searched:
            # Otherwise a script would search directories as they were at that time.
            del sys.path_importer_cache[entry]
        for name, before in self._first.items():
            self._lists[name][0][:] = before
        warnings.filters.remove(self._always)  # type: ignore[attr-defined]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        for descriptor in self._output:
            os.close(descriptor)

    # What runs while modules load

    def _load(self, spec: Any) -> Any:
        self._settle()
        name = spec.name
        self.note("import", name)
        self.events[name] = []
        self._running.append(name)
        self._known.add(name)
        self._count += 1
        try:
            return self._real["load"](spec)
        except BaseException as error:
            self.events.pop(name, None)
            self.failed[name] = f"{type(error).__name__}: {error}"
            raise
        finally:
            beneath = self._beneath.take_back(os.environ._data)  # type: ignore[attr-defined]
            if name in self.events:
                self._settle()
                self.events[name] += beneath
            self._running.pop()

    def _import(
        self,
        name: str,
        globals: Any = None,  # noqa: A002  the names of __import__
        locals: Any = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        module = self._real["import"](name, globals, locals, fromlist, level)
        if self._active and self._running:
            if level:
                name = _bootstrap._resolve_name(name, _bootstrap._calc___package__(globals), level)
            self._asked(name)
            for submodule in fromlist or ():
                self._asked(f"{name}.{submodule}")
        return module

    def _gcd_import(self, name: str, package: Any = None, level: int = 0) -> Any:
        module = self._real["gcd"](name, package, level)
        if self._active and self._running:
            self._asked(_bootstrap._resolve_name(name, package, level) if level else name)
        return module

    def _asked(self, name: str) -> None:
        if len(sys.modules) != self._count:
            self._settle()
        events = self.events[self._running[-1]]
        if name not in self._base and name in sys.modules and ("import", name) not in events:
            events.append(("import", name))

    def _at_exit(self, function: Any, *args: Any, **keywords: Any) -> Any:
        if not (self._active and self._running):
            return self._real["atexit"](function, *args, **keywords)
        self.note("atexit", function, args, keywords)
        return function

    def _warned(self, message: Any) -> None:
        if self._active and self._running:
            self.note("warning", message.message, message.category, message.filename, message.lineno, message.source)
        else:
            self._real["show"](message)

    def _settle(self) -> None:
        """Note what has changed since the last look as done by the module that is being loaded."""
        if len(sys.modules) != self._count:
            for name in [name for name in sys.modules if name not in self._known]:
                self._known.add(name)
                self.note("insert", name)
            self._count = len(sys.modules)
        for name, (current, before) in self._lists.items():
            if current != before:
                self.note("list", name, *_difference(before, current))
                before[:] = current
        for number, descriptor in enumerate(self._output):
            size = os.fstat(descriptor).st_size
            if size != self._printed[number]:
                self.note("output", number + 1, os.pread(descriptor, size, self._printed[number]))
                self._printed[number] = size


def _as_importlib(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose frame counts as one of importlib: tracebacks and warnings leave it out."""

    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    call.__code__ = call.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    inner = getattr(function, "__func__", None)
    if inner is not None:
        inner.__code__ = inner.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    return call


def _difference(before: list[Any], after: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return what was removed from a list, and what was added at its front and at its end."""
    removed = [item for item in before if item not in after]
    first_old = next((at for at, item in enumerate(after) if item in before), len(after))
    front = [item for item in after[:first_old] if item not in before]
    back = [item for item in after[first_old:] if item not in before]
    return removed, front, back


class Stash:
    """A finder of the modules that are loaded: each is given back when somebody imports it."""

    def __init__(self, notes: Notes, known: set[str]) -> None:
        """Take all modules but the `known` ones out of sys.modules."""
        self.after: dict[str, Callable[[], None]] = {}
        """By module, what to call once it has been given back."""
        self._events = notes.events
        self._imported = frozenset(notes.events)
        """Modules with a file of their own; others were put into sys.modules by a module that was imported."""
        self._modules = {name: module for name, module in sys.modules.items() if name not in known}
        self._shadowed: set[str] = set()
        """Modules whose package has another object of that name: it is not replaced."""
        for name in self._modules:
            del sys.modules[name]
        for name in self._events:
            self._unbind(name)
        sys.meta_path.insert(0, self)

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def names(self) -> set[str]:
        """The top-level names of all modules."""
        return {name.partition(".")[0] for name in self._modules}

    def files(self) -> list[str]:
        """Return the files of all modules."""
        paths = (getattr(module, "__file__", None) for module in self._modules.values())
        return sorted({path for path in paths if isinstance(path, str)})

    def get(self, name: str) -> Any:
        """Return a module, given back already or not; None when it is not loaded."""
        return self._modules.get(name, sys.modules.get(name))

    def _unbind(self, name: str) -> None:
        """Remove a module from its package, which gets it again with the import."""
        parent, _, child = name.rpartition(".")
        package = self.get(parent) if parent else None
        if package is None or name not in self._modules:
            return
        values = getattr(package, "__dict__", {})
        if values.get(child) is self._modules[name]:
            del values[child]
        else:
            self._shadowed.add(name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec whose loader gives the module back, or None."""
        module = self._modules.get(name)
        if module is None:
            return None
        real = getattr(module, "__spec__", None)
        loader = Kept(self, name, getattr(real, "loader", None))
        spec = _bootstrap.ModuleSpec(name, loader, origin=getattr(real, "origin", None))
        if real is not None:
            spec.submodule_search_locations = real.submodule_search_locations
            spec.has_location = real.has_location
            spec.cached = real.cached
        return spec

    def give_back(self, name: str) -> None:
        """Put a module into sys.modules and do what else its import does."""
        sys.modules[name] = self._modules.pop(name)
        for event in self._events.pop(name, ()):
            if event[0] == "import":
                self._import(event[1])
            else:
                self._repeat(*event)
        if not self._modules and self in sys.meta_path:
            sys.meta_path.remove(self)
        then = self.after.pop(name, None)
        if then is not None:
            try:
                then()
            except Exception:  # noqa: BLE001  the script must run, with or without this part
                return

    def _import(self, name: str) -> None:
        """Give back a module that another one imports, as importlib would."""
        if name not in self._modules:
            return
        parent, _, child = name.rpartition(".")
        self._import(parent)
        if name not in self._modules:
            return
        if name not in self._imported:
            # A module that was imported has put it there.
            sys.modules[name] = self._modules.pop(name)
            return
        package = sys.modules.get(parent)
        before = vars(package).get(child, self) if package is not None else self
        if sys.meta_path[0] is self:
            self.give_back(name)
            module = sys.modules[name] = sys.modules.pop(name)
            if package is not None:
                setattr(package, child, module)
        else:
            # A finder of the script is asked first.
            _bootstrap._gcd_import(name)
        if package is not None and name in self._shadowed:
            vars(package).pop(child, None)
            if before is not self:
                setattr(package, child, before)

    def _repeat(self, what: str, *args: Any) -> None:
        if what == "insert":
            (name,) = args
            if name in self._modules:
                sys.modules[name] = self._modules.pop(name)
        elif what == "env":
            key, value = (None if arg is None else os.fsdecode(arg) for arg in args)
            if value is None:
                os.environ.pop(str(key), None)
            else:
                os.environ[str(key)] = value
        elif what == "call":
            function, *rest = args
            function(*rest)
        elif what == "atexit":
            import atexit

            function, positional, keywords = args
            atexit.register(function, *positional, **keywords)
        elif what == "warning":
            import warnings

            message, category, filename, line, source = args
            warnings.warn_explicit(message, category, filename, line, registry={}, source=source)
        elif what == "output":
            number, text = args
            os.write(number, text)
        elif what == "list":
            _change(*args)


def _change(name: str, removed: list[Any], front: list[Any], back: list[Any]) -> None:
    if name == "filters":
        import warnings

        items: list[Any] = warnings.filters  # type: ignore[assignment]
        warnings._filters_mutated()  # type: ignore[attr-defined]
    else:
        items = getattr(sys, name)
    items[:] = [*front, *(item for item in items if item not in removed), *back]


class Kept:
    """A loader of a module that is loaded already; it looks like the module's own."""

    def __init__(self, stash: Stash, name: str, loader: Any) -> None:
        self._stash = stash
        self._name = name
        self._loader = loader

    def create_module(self, spec: Any) -> ModuleType | None:
        """Let importlib make a module that `exec_module` replaces: nothing is set in the real one."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._stash.give_back(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
