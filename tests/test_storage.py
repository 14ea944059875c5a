"""Records in memory are read where they are needed, slow ones ahead of that."""

import time

import numpy as np

from grainmill._evaluate.leaves import FilesLeaf


class Files:
    """Stands in for the engine's files: each record read takes a nap if storage is slow."""

    mean_byte_len = 1000.0

    def __init__(self, *, slow):
        self.slow = slow
        self.started = 0

    def read(self, index):
        for _ in index:
            if self.slow:
                time.sleep(1e-4)
        return [b"%d" % i for i in index]

    def start(self, index):
        self.started += 1
        files = self

        class Pending:
            def finish(self):
                return files.read(index)

        return Pending()


def blocks_started(files, num_blocks):
    leaf = FilesLeaf(files)
    index = np.arange(100)
    for _ in range(num_blocks):
        made = leaf.finish(leaf.start(index))
        assert made.failure is None
        assert made.elements == [b"%d" % i for i in range(100)]
    return files.started


def test_records_in_memory_need_no_other_thread():
    assert blocks_started(Files(slow=False), 50) == 0


def test_slow_records_are_read_ahead_but_for_a_look_now_and_then():
    assert blocks_started(Files(slow=True), 65) == 62


def test_storage_that_became_fast_is_noticed():
    files = Files(slow=True)
    leaf = FilesLeaf(files)
    index = np.arange(100)
    leaf.finish(leaf.start(index))
    files.slow = False
    for _ in range(40):
        leaf.finish(leaf.start(index))
    started = files.started
    assert started == 31
    leaf.finish(leaf.start(index))
    assert files.started == started
