"""A process that is forked ends with its parent, and keeps none of its sockets open."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys

import pytest

PARENT = """
import os, signal, socket, stat, time
from workers.forked import bound_children

def say(*words):  # in one write: the processes share the pipe
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

listening = socket.create_server(("127.0.0.1", 0))
waker, wakened = socket.socketpair()
wakened.setblocking(False)
signal.set_wakeup_fd(wakened.fileno())
with bound_children(lambda: say("settled")):
    child = os.fork()
kept = stat.S_ISSOCK(os.fstat(listening.fileno()).st_mode)
if child == 0:
    say("child", os.getpid(), kept, signal.getsignal(signal.SIGTERM).name)
    time.sleep(600)
ordinary = os.fork()  # outside of the scope
if ordinary == 0:
    say("ordinary", stat.S_ISSOCK(os.fstat(listening.fileno()).st_mode))
    os._exit(0)
os.waitpid(ordinary, 0)
say("port", listening.getsockname()[1])
time.sleep(600)
"""


def test_a_bound_child_dies_with_its_parent_and_holds_no_socket_of_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        said = {words[0]: words[1:] for words in (parent.stdout.readline().split() for _ in range(4))}
        assert said.keys() == {"settled", "child", "ordinary", "port"}
        assert said["ordinary"] == ["True"]
        assert said["child"][1:] == ["False", "SIG_DFL"]
        pidfd = os.pidfd_open(int(said["child"][0]))
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert not poll.poll(0)
        parent.send_signal(signal.SIGKILL)
        assert poll.poll(10_000), "the child outlived its parent"
        os.close(pidfd)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(said["port"][0])), timeout=5)
