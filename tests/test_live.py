"""Live documents: patches, numbers, who is sent what."""

import json
import threading

from hypothesis import given
from hypothesis import strategies as st

from mlx_jupyter.widgets.live import Feed, difference

VALUES = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


def merged(value, patch):
    """RFC 7386, as the browser's half does it."""
    if not isinstance(patch, dict):
        return patch
    made = dict(value) if isinstance(value, dict) else {}
    for key, change in patch.items():
        if change is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), change)
    return made


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_makes_the_new_of_the_old(old, new):
    patch = difference(old, new)
    assert merged(old, json.loads(json.dumps(patch))) == new
    assert bool(patch) == (old != new)
    assert difference(new, new) == {}


class World:
    """A document and its feed; the feed's thread sends at once, and each send can be awaited."""

    def __init__(self, **options):
        self.document = {"a": 1}
        self.reads = 0
        self.sent = []
        self.watchers = []
        self.now = 0.0
        self._came = threading.Condition()
        self.feed = Feed(
            self.read, self.send, self.watch, interval=0, clock=lambda: self.now, **options
        )

    def read(self):
        with self._came:
            self.reads += 1
            self._came.notify_all()
            return dict(self.document)

    def send(self, message):
        with self._came:
            self.sent.append(message)
            self._came.notify_all()

    def watch(self, told):
        with self._came:
            self.watchers.append(told)
            self._came.notify_all()

        def stop():
            with self._came:
                self.watchers.remove(told)
                self._came.notify_all()

        return stop

    def until(self, true):
        with self._came:
            assert self._came.wait_for(true, 60), self.sent

    def change(self, **values):
        self.document |= values
        for told in self.watchers:
            told()


def test_nothing_is_read_or_sent_while_no_view_is_open():
    world = World()
    world.feed.changed()
    assert (world.sent, world.reads, world.watchers) == ([], 0, [])
    assert world.feed.whole() == {"number": 1, "document": {"a": 1}}
    world.document["a"] = 2
    assert world.feed.whole() == {"number": 2, "document": {"a": 2}}
    assert world.feed.whole()["number"] == 2
    assert world.sent == []


def test_changes_are_numbered_patches_until_the_last_view_closes():
    world = World()
    number = world.feed.whole()["number"]
    world.feed.open("one", number)
    world.feed.open("two", number)
    world.until(lambda: world.watchers)
    world.change(a=2)
    world.until(lambda: len(world.sent) == 1)
    world.feed.close("one")
    world.change(b=3)
    world.until(lambda: len(world.sent) == 2)
    assert world.sent == [
        {"type": "patch", "number": number + 1, "patch": {"a": 2}},
        {"type": "patch", "number": number + 2, "patch": {"b": 3}},
    ]
    world.feed.close("two")
    world.feed.close("two")
    world.until(lambda: not world.watchers)
    world.document["a"] = 9
    world.feed.changed()
    assert len(world.sent) == 2


def test_what_changed_while_nobody_looked_is_sent_when_a_view_opens():
    world = World()
    number = world.feed.whole()["number"]
    world.document["a"] = 2
    world.feed.open("one", number)
    world.until(lambda: world.sent)
    assert world.sent == [{"type": "patch", "number": number + 1, "patch": {"a": 2}}]
    world.feed.close("one")
    world.until(lambda: not world.watchers)
    world.feed.open("again", number + 1)
    world.change(a=3)
    world.until(lambda: len(world.sent) == 2)


def test_a_view_with_another_number_gets_the_whole():
    world = World()
    world.feed.whole()
    world.feed.open("one", 7)
    assert world.sent[0] == {"type": "whole", "number": 1, "document": {"a": 1}}
    world.feed.resend()
    assert world.sent[-1]["type"] == "whole"


def test_a_second_front_end_gets_what_the_first_one_has():
    world = World()
    number = world.feed.whole()["number"]
    world.feed.open("one", number)
    world.until(lambda: world.reads == 2)  # what changed while nobody looked
    world.document["a"] = 5  # not told yet
    assert world.feed.whole()["document"] == {"a": 1}
    world.feed.flush()
    assert world.sent[-1]["number"] == world.feed.whole()["number"]
    assert world.feed.whole()["document"] == {"a": 5}


def test_a_view_that_isnt_heard_of_any_more_is_closed():
    world = World(lease=10.0)
    number = world.feed.whole()["number"]
    world.feed.open("closed with its page", number)
    world.feed.open("still there", number)
    world.until(lambda: world.watchers)
    world.now = 9.0
    world.feed.open("still there", number)
    world.now = 11.0
    world.change(a=2)
    world.until(lambda: world.sent)
    assert world.feed.views == 1
    world.now = 20.0
    world.feed.changed()
    world.until(lambda: not world.watchers)
    assert world.feed.views == 0


def test_a_document_that_cant_be_read_stays_as_it_is(caplog):
    world = World()
    number = world.feed.whole()["number"]
    world.document = None
    assert world.feed.whole() == {"number": number, "document": {"a": 1}}
    assert "up to date" in caplog.text
