"""Conversations as files: written with what is cached of them, and brought back.

A file is one of two kinds. Without a place of the user's it goes to a private directory of the
package, which nobody else may write to, and is believed as the page store is. One with a place may
come from anyone: its pages are compared with what the model computes, in a sample, and then lent
(``cache/lending.py``). In both nothing is used that isn't exactly of this model's form.

The functions run on the engine thread, as an ``Errand`` (``errand.py``).
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache import bundle, export, lending, luggage
from mlx_jupyter.cache.bundle import SUFFIX, Bundle, Foreign, Piece
from mlx_jupyter.cache.packing import Unpackable
from mlx_jupyter.cache.store_file import Damaged, Stopped
from mlx_jupyter.cache.trie import common_prefix
from mlx_jupyter.conversation.saved import Malformed, dumped, parsed
from mlx_jupyter.engine import spot_check
from mlx_jupyter.engine.private import place, trusted
from mlx_jupyter.engine.request import Loading
from mlx_jupyter.errors import BadRequest, Interrupted, LLMError
from mlx_jupyter.latch import holding
from mlx_jupyter.models.sources import DEFAULT_MODEL
from mlx_jupyter.models.template import render
from mlx_jupyter.models.tensors import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from mlx_jupyter.cache.prefix_cache import PrefixCache
    from mlx_jupyter.conversation.answer import Message
    from mlx_jupyter.conversation.saved import Saved
    from mlx_jupyter.engine.errand import Errand
    from mlx_jupyter.engine.workshop import Workshop
    from mlx_jupyter.models.pool import LoadedModel

log = logging.getLogger(__name__)

MAX_PATH = 4_000_000
"""Ids of the longest conversation."""


# --- save ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was saved.

    Attributes:
        path: the file.
        turns: how many.
        tokens: so many leading tokens are in it with what is cached of them.
        nbytes: the file's size.
        why: why no pages are in it; empty when some are.
    """

    path: Path
    turns: int
    tokens: int
    nbytes: int
    why: str = ""


def save(errand: Errand, saved: Saved, messages: Sequence[Message], path: Path | None) -> Receipt:
    """Write a conversation, with what is cached along its last turn.

    Args:
        errand: whose work it is.
        saved: the conversation.
        messages: the same for the model's template.
        path: where; None: the private place.

    Raises:
        BadRequest: another kind of file is there, or it can't be written.
        Interrupted: cancelled; what was there before is there still.
    """
    shop, private = errand.shop, path is None
    path = place(saved.name, make=True) if path is None else path
    if what := bundle.foreign(path):
        raise BadRequest(f"{path} is there already and no saved conversation ({what}).")
    loaded = shop.find(saved.turns[-1].model) if saved.turns else None
    ids = np.asarray(saved.path, np.int32)
    if not len(ids) and loaded is not None:
        ids = _rendered(shop, loaded, messages)
        saved = replace(saved, path=tuple(ids.tolist()))
    told = errand.told(f"Saving @{saved.name}")
    while True:
        try:
            tokens, description, pieces, ids, why = _pages(shop, loaded, ids, saved.name, private)
            meta = {
                "conversation": dumped(saved),
                "model": loaded.info.name if loaded is not None else "",
                "identity": (loaded.identity or "") if loaded is not None else "",
                "pages": description,
            }
            data = np.ascontiguousarray(ids, "<i4")
            first = Piece((Entry("tokens", "I32", data.shape),), partial(list, [data]))
            nbytes = bundle.write(path, meta, [first, *pieces], told, errand.stopped)
            return Receipt(path, len(saved.turns), tokens, nbytes, why)
        except export.Vanished:
            log.debug("a page's file went while @%s was saved; once more", saved.name)
        except Stopped:
            raise Interrupted from None
        except (ValueError, Unpackable) as error:
            raise BadRequest(f"@{saved.name} can't be saved: {error}.") from None
        except OSError as error:
            raise BadRequest(f"{path} can't be written: {error.strerror or error}.") from None


def _rendered(shop: Workshop, loaded: LoadedModel, messages: Sequence[Message]) -> np.ndarray:
    """The conversation's ids where no turn knows them."""
    try:
        tokenizer = loaded.tokenizer
        found = holding(shop.tokenizing, lambda: render(tokenizer, messages, generation=False))
        return np.asarray(found.ids, np.int32)
    except LLMError:
        return np.zeros(0, np.int32)


def _pages(
    shop: Workshop, loaded: LoadedModel | None, ids: np.ndarray, name: str, private: bool
) -> tuple[int, str, list[Piece], np.ndarray, str]:
    """What is cached of a sequence: tokens, description, pieces, its ids; or why there is none."""
    if loaded is None:
        return 0, "", [], ids, "its model isn't loaded"
    if loaded.identity is None:
        return 0, "", [], ids, "its model has no identity: it was given as an object"
    if not len(ids):
        return 0, "", [], ids, "its tokens aren't known"
    cache = shop.cache_of(loaded)
    ids = _with_end(cache, ids, f"@{name}")
    cache.tiers.adopt(ids)
    if not cache.live.offset:
        spot_check.likeness(cache, loaded.model, ids)  # the cache learns its layers' order
    tokens, description, pieces = export.packed(cache, ids, own=private)
    return tokens, description, pieces, ids, "" if tokens else "nothing of it is cached"


def _with_end(cache: PrefixCache, ids: np.ndarray, owner: str) -> np.ndarray:
    """The ids with the end token that was computed after them, where the cache knows of it."""
    for node in cache.trie.nodes():
        if owner in node.owners:
            tip = np.concatenate([each.tokens for each in node.path()])[: node.owners[owner]]
            if common_prefix(tip, ids) == len(ids):
                return tip
    return ids


# --- restore ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """What came back.

    Attributes:
        name: the branch.
        path: the file.
        turns: how many.
        tokens: tokens of the conversation.
        cached: of which so many leading ones need not be computed again.
        lent: its pages came from outside and are for this conversation alone.
        why: why pages of the file weren't used; empty when they were.
    """

    name: str
    path: Path
    turns: int
    tokens: int
    cached: int = 0
    lent: bool = False
    why: str = ""


def restore(
    errand: Errand,
    name: str | None,
    path: Path | None,
    model: str | None,
    put: Callable[[Saved], None],
) -> Restored:
    """Bring a conversation back.

    Args:
        errand: whose work it is.
        name: the branch's name; None: the one in the file.
        path: the file; None: the private one of that name.
        model: loaded where the file has pages and no model is there; None for the default one.
        put: makes the branch.

    Raises:
        BadRequest: there is no such file, or it isn't a sound one of ours; nothing has changed.
        Interrupted: cancelled; nothing has changed.
    """
    private = path is None
    if path is None:
        path = place(name or "", make=False)
        if not path.exists():
            raise BadRequest(f"There is no saved conversation @{name}: give its file.")
    try:
        if private and (reason := trusted(path.parent)):
            raise BadRequest(f"{path} isn't used: {reason}.")
        with Bundle(path) as file:
            return _restore(errand, file, name, path, model, put, private)
    except Foreign as error:
        raise BadRequest(f"{path} is no saved conversation: {error}.") from None
    except (Damaged, Malformed) as error:
        raise BadRequest(f"{path} is damaged: {error}.") from None
    except Stopped:
        raise Interrupted from None
    except FileNotFoundError:
        raise BadRequest(f"There is no file {path}.") from None
    except OSError as error:
        raise BadRequest(f"{path} can't be read: {error.strerror or error}.") from None


def _restore(
    errand: Errand,
    file: Bundle,
    name: str | None,
    path: Path,
    model: str | None,
    put: Callable[[Saved], None],
    private: bool,
) -> Restored:
    shop = errand.shop
    what = f"@{name}" if name is not None else path.name
    file.verify(errand.told(f"Reading {what}"), errand.stopped)
    ids = path_ids(file)
    saved = parsed(file.meta.get("conversation", ""), tuple(ids.tolist()))
    saved = replace(saved, name=name or saved.name)
    identity, description = file.meta.get("identity", ""), file.meta.get("pages", "")
    loaded = _loaded(errand, identity, model) if identity else None
    alike = loaded is not None and loaded.identity == identity
    saved = _spelt(saved, loaded if loaded is not None else shop.find(None), alike=alike)
    owner = f"@{saved.name}"
    restored = Restored(saved.name, path, len(saved.turns), len(ids))
    things, why = None, _unusable(shop, file, loaded, alike)
    if loaded is not None and not why:
        cache = shop.cache_of(loaded)
        like = spot_check.likeness(cache, loaded.model, ids)
        things = luggage.unpacked(
            file,
            description,
            ids,
            like,
            cache,
            room=max(cache.budget - cache.live.nbytes(), 0),
            strict=not private,
            stopped=errand.pause,
        )
        if not private:
            why = _doubt(errand, cache, loaded, things)
    put(saved)
    if loaded is None or not alike:
        return replace(restored, why=why)
    shop.trails.note(owner, loaded.info.name, ids)
    cache = shop.cache_of(loaded)
    if things is None or why:
        cache.tiers.adopt(ids)
    else:
        luggage.put_in(cache, things, owner, None if private else owner)
    shop.publish(loaded)
    whole = np.append(ids, np.int32(0))  # the next prompt has a token more at least
    lent = lending.start(cache.path_to(ids)) is not None
    return replace(restored, cached=cache.plan(whole, owner).cached, lent=lent, why=why)


def path_ids(file: Bundle) -> np.ndarray:
    """The ids of a file's conversation, int32.

    Raises:
        Damaged: it has none, or what aren't ids.
    """
    entry = file.tensors.get("tokens")
    if entry is None or entry.dtype != "I32" or len(entry.shape) != 1 or entry.size > MAX_PATH:
        raise Damaged("it has no tokens, or too many")
    ids = np.asarray(file.read("tokens").data).view("<i4").astype(np.int32)
    if len(ids) and ids.min() < 0:
        raise Damaged("it has tokens that are none")
    return ids


def _loaded(errand: Errand, identity: str, model: str | None) -> LoadedModel | None:
    """The model that a file belongs to, else the current one; loaded when there is none at all.

    Never by a name from the file.
    """
    shop = errand.shop
    found = shop.find_alike(identity) or shop.find(None)
    if found is not None:
        return found
    try:
        return shop.load(
            model or DEFAULT_MODEL,
            lambda text, done, total: errand.ticket.emit(Loading(text, done, total)),
            errand.stopped,
        )
    except LLMError as error:
        log.debug("no model for a restored conversation: %s", error)
        return None


def _spelt(saved: Saved, loaded: LoadedModel | None, *, alike: bool) -> Saved:
    """The conversation with ids that the model has; another model goes by the text where not."""
    if loaded is not None and alike and saved.turns:
        was, name = saved.turns[-1].model, loaded.info.name  # the same model by another name
        same = (replace(t, model=name) if t.model == was else t for t in saved.turns)
        saved = replace(saved, turns=tuple(same))
    limit = loaded.vocabulary if loaded is not None else 0
    if not limit:
        return saved
    if alike and any(
        max(t, default=0) >= limit for t in (saved.path, *(x.ids for x in saved.turns))
    ):
        raise Damaged("it has tokens outside the vocabulary")
    turns = tuple(
        turn if max(turn.ids, default=0) < limit else replace(turn, ids=()) for turn in saved.turns
    )
    return replace(saved, turns=turns)


def _unusable(shop: Workshop, file: Bundle, loaded: LoadedModel | None, alike: bool) -> str:
    """Why a file's pages can't be used, or ""."""
    if not file.meta.get("pages") or not file.tensors["tokens"].size:
        return "the file has no pages"
    if loaded is None:
        return "its model isn't loaded"
    if not alike:
        return f"its pages are those of another model than {loaded.info.name}, as it is here"
    if not loaded.vocabulary:
        return f"the vocabulary of {loaded.info.name} isn't known"
    return "in exactness mode pages from files aren't used" if shop.exact else ""


def _doubt(errand: Errand, cache: PrefixCache, loaded: LoadedModel, things: luggage.Luggage) -> str:
    """Why pages from outside aren't believed, or ""."""
    if not luggage.finite(things):
        return "its pages hold what are no numbers"
    if not spot_check.stretches(cache, things):
        return "nothing in its pages can be compared with what the model computes"
    try:
        right = spot_check.agrees(
            cache,
            loaded.model,
            things,
            loaded.info.prefill_chunk,
            random.SystemRandom(),
            errand.pause,
        )
    except Interrupted:
        raise
    except Exception:  # the model's code may raise anything on what it isn't used to
        log.debug("a spot check failed", exc_info=True)
        right = False
    return "" if right else "a sample of its pages isn't what the model computes"


def chosen(path: str | PathLike[str]) -> Path:
    """The file that a user means: with the usual suffix unless it has one."""
    given = Path(path).expanduser().absolute()
    if given.name.endswith(".safetensors") or not given.name:
        return given
    return given.with_name(given.name + SUFFIX)
