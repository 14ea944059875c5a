"""A Python that has imported JAX, Flax and Orbax, which programs of many tests take longest for.

Another one has imported Beam, whose runner starts processes that import it, too.

`warm_python.py SERVER MODULE...` imports such modules, then forks a process for each program that
it is asked for. Who asks is a command that stands for the interpreter, made by `started`: it passes
its arguments, its environment, folder and standard files on, and ends as the program does. The
tested package is not among what is imported; only the command `grainmill`, of which a page starts
dozens, has a server that has imported it. In `make test-long`, programs are started as users do.
"""

import contextlib
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

from effort import LONG

MODULES = ["jax.numpy", "flax.nnx", "optax", "orbax.checkpoint"]
BEAM = "apache_beam.runners"
BEAM_WORKER = f"{BEAM}.worker.sdk_worker_main"
COMMAND = """#!{python} -IS
import marshal, os, resource, signal, socket, sys
{program}
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
request = marshal.dumps((command, arguments, os.getcwd(), dict(os.environ), limit))
with socket.socket(socket.AF_UNIX) as server:
    server.connect({server!r})
    socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
    server.sendall(request)
    status = int(server.recv(100))
if status < 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
# Programs without JAX, or without Beam, get the interpreter itself.
PYTHON = f"""
def imports_it(path):
    try:
        with open(path, encoding="utf-8") as file:
            return "import {{name}}" in file.read()
    except (OSError, ValueError):
        return False

command, arguments = __file__, sys.argv[1:]
is_program = arguments and arguments[0].endswith(".py") and any(map(imports_it, arguments))
if not is_program and arguments != ["-m", {BEAM_WORKER!r}]:
    os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
"""
SCRIPT = str(Path(sysconfig.get_path("scripts"), "grainmill"))
GRAINMILL = f"""
command, arguments = {sys.executable!r}, [{SCRIPT!r}, *sys.argv[1:]]
"""


@contextlib.contextmanager
def started(folder):
    """A command in place of `sys.executable`, and what its environment has to have besides."""
    # The programs of a page, or of an example, compile much the same.
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if LONG:
        yield sys.executable, environment
        return
    tested = {"PYTHONPATH": os.pathsep.join(sys.path)}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        serving(folder / "grainmill", GRAINMILL, ["grainmill._tools.main"], inherited | tested),
        serving(folder / "python", PYTHON.format(name="jax"), MODULES, inherited | environment),
    ):
        yield str(folder / "python"), environment


@contextlib.contextmanager
def beam_started(folder):
    """A command in place of `sys.executable` for programs with Beam, and for its workers."""
    if LONG:
        yield sys.executable
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    modules = [f"{BEAM}.portability.fn_api_runner.fn_runner", BEAM_WORKER]
    command = folder / "python"
    with serving(command, PYTHON.format(name="apache_beam"), modules, environment):
        yield str(command)


@contextlib.contextmanager
def serving(command, program, modules, environment):
    """A command that asks a server, which has imported modules."""
    server = f"warm {command} of {os.getpid()}"
    asks = COMMAND.format(python=sys.executable, program=program, server=f"\0{server}")
    command.write_text(asks, "utf-8")
    command.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, __file__, server, *modules],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        yield
        process.stdin.close()


def serve(name, modules):
    """Forks a process for each request, until standard input ends; returns in programs only."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                return asked(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    sys.exit()


def asked(connection):
    """Forks the program, in which it returns the request, and says how that ended."""
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as rest:
        request = marshal.loads(rest.read(int.from_bytes(size, "little")))
    program = os.fork()
    if program == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return request
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(program, signal.SIGKILL)  # as who asked has been
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(b"%d" % status)
    os._exit(0)


def run(request, site):
    """Runs a program as the interpreter does."""
    import resource  # noqa: PLC0415 - other systems have none

    command, arguments, cwd, environment, limit = request
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = command
    in_environment = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.orig_argv = [command, *arguments]
    if arguments == ["-m", BEAM_WORKER]:
        sys.argv = [BEAM_WORKER]
        sys.path = [cwd, *in_environment, *site]
        runpy.run_module(BEAM_WORKER, run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    program = Path(arguments[0]).absolute()
    sys.path = [str(program.parent), *in_environment, *site]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(program)
    exec(compile(program.read_bytes(), main.__file__, "exec"), vars(main))


if __name__ == "__main__":
    run(serve(sys.argv[1], sys.argv[2:]), site=sys.path[1:])
