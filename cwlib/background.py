"""Threads that wait for work: a model's forward pass runs on one of them, beside the consumer of its layers."""

import os
import queue
import threading
from collections.abc import Callable
from typing import ClassVar

import torch


class Worker:
    """A thread that outlives a capture and waits for the next one.

    A new thread starts OpenMP threads of its own, which takes up to a tenth of a forward pass.
    """

    idle: ClassVar[list["Worker"]] = []

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Callable[[], None], int, threading.Event]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="cwlib-forward", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            task, cores, done = self.tasks.get()
            if torch.get_num_threads() != cores:  # torch keeps this number for each thread
                torch.set_num_threads(cores)
            task()
            del task  # and with it the model
            self.idle.append(self)
            done.set()

    def start(self, task: Callable[[], None]) -> threading.Event:
        """Run a task that raises nothing; the event is set when it has ended."""
        done = threading.Event()
        self.tasks.put((task, torch.get_num_threads(), done))
        return done


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Worker.idle.clear)  # threads do not follow into a forked process


def worker() -> Worker:
    """A thread that waits, or a new one; it is the caller's until its task has ended."""
    try:
        return Worker.idle.pop()
    except IndexError:
        return Worker()
