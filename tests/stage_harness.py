"""One check that every sequential stage passes, and the list stage that feeds it."""

import copy
import json
import random
import time

from grainmill._iterators.base.stage import Block, Stage


class Boom(Exception):  # noqa: N818
    """What a failing element raises."""


class ListStage(Stage):
    """Elements of a list; those at `failing` raise the first time they are requested."""

    def __init__(self, elements, *, pull_size=1, failing=()):
        super().__init__()
        self.elements = elements
        self.failing = set(failing)
        self.pulled = 0
        self.furthest = 0
        self.closed = 0
        self.prefetching = 0
        self._position = 0
        self._pull_size = pull_size

    @property
    def pull_size(self):
        return self._pull_size

    def pull(self, limit):
        begin = self._position
        end = min(begin + limit, len(self.elements))
        bad = [at for at in self.failing if begin <= at < end]
        if bad:
            end = min(bad)
            if end == begin:
                self.failing.discard(begin)
                raise Boom(begin)
        self._position = end
        self.pulled += end - begin
        self.furthest = max(self.furthest, end)
        return Block(self.elements[begin:end], lambda k: {"next_index": begin + k})

    def state(self):
        return {"next_index": self._position}

    def restore(self, state):
        self._position = state["next_index"]

    def next_index(self):
        return self._position

    def seek(self, index):
        self._position = index

    def start_prefetch(self):
        self.prefetching += 1

    def close(self):
        self.closed += 1


def source(elements, **_):
    """A list stage that never fails."""
    return ListStage(list(elements))


def plain(element):
    """`element` with arrays as lists, to compare it."""
    if isinstance(element, tuple):
        return tuple(plain(part) for part in element)
    if isinstance(element, dict):
        return {name: plain(part) for name, part in element.items()}
    return element.tolist() if hasattr(element, "tolist") else element


def drain(stage, limits=lambda: 1):
    """The remaining elements of `stage`, and functions that return the state at each position."""
    elements, states = [], [stage.state]
    while True:
        try:
            block = stage.pull(limits())
        except Boom:
            continue
        if elements == [] and block.elements:
            states = []
        if not block.elements:
            return elements, states
        first = 0 if not states else 1
        states += [
            (lambda after=block.state_after, k=k: after(k))
            for k in range(first, len(block.elements) + 1)
        ]
        elements += [plain(element) for element in block.elements]


def check_stage(make, expected, *, same_states=True):
    """Checks a stage against the contract of `Stage`.

    Args:
        make: Builds the stage, given a function that makes list stages.
        expected: Its elements.
        same_states: Whether a used stage has the states of a fresh one after a restore.
    """
    stage = make(source)
    states = [stage.state()]
    for element in expected:
        block = stage.pull(1)
        assert [plain(e) for e in block.elements] == [element]
        assert block.state_after(0) == states[-1]
        assert block.state_after(1) == stage.state()
        states.append(stage.state())
    for _ in range(2):
        end = stage.pull(3)
        assert end.elements == []
        assert end.state_after(0) == stage.state()
    end_state = stage.state()
    assert len(json.dumps(states)) > 0
    assert_same_in_blocks(make, expected, states)
    assert_survives_failures(make, expected, states)
    used = make(source)
    for k, state in [*enumerate(states), (len(expected), end_state)]:
        saved = json.loads(json.dumps(state))
        kept = copy.deepcopy(saved)
        fresh = make(source)
        for again in range(2):
            fresh.restore(saved)
            assert saved == kept
            if same_states or not again:
                assert fresh.state() == state
            elements, after = drain(fresh)
            assert elements == expected[k:], f"restored at {k}"
        used.restore(saved)
        if same_states and elements:
            assert [one() for one in after] == states[k:]
        elements, after = drain(used, lambda: 3)
        assert elements == expected[k:], f"restored at {k} in a used stage"
        if same_states and elements:
            assert [one() for one in after] == states[k:]


def assert_same_in_blocks(make, expected, states):
    """Blocks of any size have the same elements and states, however late these are requested."""
    dice = random.Random(1)
    for pull_size in (1, 2, 5):
        for largest in (2, 4, 50):
            stage = make(
                lambda elements, pull_size=pull_size, **_: ListStage(
                    list(elements), pull_size=pull_size
                )
            )
            elements, after = drain(stage, lambda largest=largest: dice.randint(1, largest))
            assert elements == expected
            if expected:
                found = [one() for one in after]
                assert found == states
                spoil(after[0]())
                assert after[0]() == states[0]


def spoil(state):
    """Changes everything that can be changed in a state."""
    for value in list(state.values()) if isinstance(state, dict) else list(state):
        if isinstance(value, dict | list):
            spoil(value)
    state.clear()


def assert_survives_failures(make, expected, states):
    """An element that fails once is computed again: nothing is lost, repeated or reordered."""
    dice = random.Random(2)
    for largest in (1, 2, 6):
        for _ in range(6):
            failures = []

            def failing(elements, failures=failures, **_):
                elements = list(elements)
                failing = [at for at in range(len(elements)) if dice.random() < 0.3]
                failures.append(failing)
                return ListStage(elements, failing=failing)

            stage = make(failing)
            elements, after = drain(stage, lambda largest=largest: dice.randint(1, largest))
            assert elements == expected
            if expected:
                assert [one() for one in after] == states


def found(ds):
    """Each element with the state after it, and the first two failures with their notes."""
    seen = []
    failures = 0
    with iter(ds) as iterator:
        while failures < 2:
            try:
                element = next(iterator, None)
            except ValueError as failure:
                failures += 1
                element = [str(failure), *getattr(failure, "__notes__", ())]
            if element is None:
                return seen
            seen.append((repr(element), json.dumps(iterator.get_state())))
    return seen


def count_at_rest(calls):
    """The length of `calls` once it no longer grows."""
    count = -1
    while count != len(calls):
        count = len(calls)
        time.sleep(0.1)
    return count
