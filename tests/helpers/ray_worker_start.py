"""What a node starts in place of each worker: it asks `ray_forks` for a copy, and ends.

Without a copy, it becomes the worker. It imports only modules that are part of the interpreter: the
import of any other would take longer than the copy.
"""

import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import sys

ADDRESS = "FLATWEIGHTS_TESTS_FORKS"
"""The variable with the address of the process that `ray_forks` has started."""

NETWORK = "/proc/self/ns/net"

CONTEXT = "--serialized-runtime-env-context="


def main() -> None:
    (program,) = [k for k, text in enumerate(sys.argv) if text.endswith("default_worker.py")]
    ours = ("--language", CONTEXT)
    arguments = [text for text in sys.argv[program:] if not text.startswith(ours)]
    is_copied, variables = ask(arguments)
    if is_copied:
        return
    if variables is None:
        arguments = [sys.argv[program].replace("default_worker", "setup_worker"), *sys.argv[1:]]
    else:  # Ray's own setup does this for other workers, but imports all of Ray
        os.environ.update(variables)
    os.execv(sys.executable, [sys.executable, *arguments])


def ask(arguments: list[str]) -> tuple[bool, dict[str, str] | None]:
    """Ask for a copy that becomes the worker, with this environment and these outputs.

    Returns:
        Whether there is a copy; if there is none, the variables of the ``runtime_env``, or None if
        Ray itself must set up the worker.
    """
    contexts = [text[len(CONTEXT) :] for text in sys.argv if text.startswith(CONTEXT)]
    blocked = [int(number) for number in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])]
    network = os.readlink(NETWORK)  # noqa: PTH115
    message = marshal.dumps((arguments, contexts, dict(os.environ), blocked, network))
    files = b"".join(file.to_bytes(4, sys.byteorder) for file in (0, 1, 2))
    there = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        there.connect(os.environ[ADDRESS])
        there.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
        reply: tuple[bool, dict[str, str] | None] = marshal.loads(there.recv(1 << 20))
    except (KeyError, OSError, EOFError):
        return False, None
    return reply


if __name__ == "__main__":
    main()
