"""A list as the parent stage of the stages under test."""

from __future__ import annotations

from grainmill._iterators.base.stage import Block, Stage


class ListStage(Stage):
    """Yields `elements`, an exception among them by raising it, `block` at a time."""

    def __init__(self, elements, block=5):
        super().__init__()
        self.elements = elements
        self.block = block
        self.next = 0

    def pull(self, limit):
        first = self.next
        taken = []
        for element in self.elements[first : first + min(limit, self.block)]:
            if isinstance(element, Exception):
                if not taken:
                    raise element
                break
            taken.append(element)
        self.next += len(taken)
        return Block(taken, lambda count: {"next_index": first + count})

    def state(self):
        return {"next_index": self.next}

    def restore(self, state):
        self.next = state["next_index"]


def drain(stage, limit=3):
    """All elements that are left."""
    elements = []
    while block := stage.pull(limit).elements:
        elements += block
    return elements
