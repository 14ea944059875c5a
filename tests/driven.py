"""Stages as their consumers see them: finished elements, with a state after each."""

from grainmill._iterators.base.cursor import END, Cursor
from grainmill._iterators.base.stage import Block


class Driven:
    """A stage and a cursor on it."""

    def __init__(self, stage):
        self.stage = stage
        self.cursor = Cursor(stage)

    def __getattr__(self, name):
        return getattr(self.stage, name)

    def pull(self, limit):
        """A block of finished elements: the next one, or several if `limit` is above 1."""
        cursor = self.cursor
        points = [cursor.position()]
        elements = []
        if limit == 1:
            elements = [element for element in [cursor.next()] if element is not END]
            points += [cursor.position()]
        else:
            for element in cursor.peek(limit)[:limit]:
                cursor.advance(1)
                elements.append(element)
                points.append(cursor.position())
        if not elements:
            points = [cursor.position()]

        def state_after(count):
            after, position = points[count]
            return after(position)

        return Block(elements, state_after)

    def state(self):
        return self.cursor.state()

    def restore(self, state):
        self.cursor.restore(state)

    def next_index(self):
        return self.cursor.next_index()

    def seek(self, index):
        self.cursor.seek(index)


def bare(stage):
    """The stage itself."""
    return stage.stage if isinstance(stage, Driven) else stage
