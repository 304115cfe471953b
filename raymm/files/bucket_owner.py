"""One run at a time in a folder of a bucket, where nothing can be made on condition that it is not
there yet.

Fischer's algorithm: who finds no owner writes itself down, waits for longer than anybody may take
between these two, and owns the folder if it is still the one that is written down.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

from raymm.actors.storage.folder import StorageFolder
from raymm.files.run_owner import (
    GONE_AFTER_S,
    LOOK_S,
    OWNER,
    FolderOwner,
    Owner,
    RunOwnedError,
    owned,
)

# Seconds that a run waits after it has written itself down, and at most half of which it may have
# taken since it found nobody.
SETTLE_S = 2.0
# Seconds for which what was seen of the owner is not looked at again: steps may be short.
SEEN_S = 1.0


class BucketOwner(FolderOwner):
    """Owns a folder of a bucket. Its sign of life is a number that it counts up.

    Args:
        folder: of a bucket.
        say: as of :class:`raymm.files.run_owner.FolderOwner`.
    """

    def __init__(self, folder: StorageFolder, say: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(folder, "a bucket that can be read and written", say)
        self._folder = folder
        self._beats, self._seen_at = 0, float("-inf")

    def check(self) -> None:
        if time.monotonic() - self._seen_at < SEEN_S:
            return
        super().check()
        self._seen_at = time.monotonic()

    def _acquire(self) -> None:
        while True:
            looked = time.monotonic()
            before = self._text()
            owner = None
            if before is not None:
                if not self._is_gone(owner := _owner_of(before), before):
                    continue  # it has gone by itself, or is another one by now
                looked = time.monotonic()
                if self._text() != before:
                    continue
            self._give_sign()
            if time.monotonic() - looked > SETTLE_S / 2:
                time.sleep(SETTLE_S)
                continue  # too late: whoever looked meanwhile may have settled
            time.sleep(SETTLE_S)
            if self._owner() == self._me:
                if owner is not None and owner != self._me:
                    self._say(f"the run folder belonged to {owner}, which is gone")
                return

    def _is_gone(self, owner: Owner, text: bytes) -> bool:
        """Wait until it is known; False if the file is another one by then.

        Raises:
            RunOwnedError: it lives.
        """
        if owner == self._me:
            return True
        gone = owner.is_gone()
        if gone is None:
            self._say(
                f"the run folder belongs to {owner}; looking for a sign of life for at most "
                f"{GONE_AFTER_S:.0f} s"
            )
            gone = self._stays(text)
        if gone:
            return True
        after = self._text()
        if after is None or _owner_of(after) != owner:
            return False
        raise RunOwnedError(owned(self._folder, owner))

    def _stays(self, text: bytes) -> bool:
        """Whether the file is the same for as long as no owner that lives would leave it."""
        deadline = time.monotonic() + GONE_AFTER_S
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            if self._text() != text:
                return False
        return True

    def _text(self) -> bytes | None:
        try:
            return self._folder.read(OWNER)
        except FileNotFoundError:
            return None

    def _owner(self) -> Owner | None:
        text = self._text()
        return None if text is None else _owner_of(text)

    def _give_up(self) -> None:
        self._folder.unlink(OWNER)

    def _give_sign(self) -> None:
        self._beats += 1
        values = {"owner": asdict(self._me), "beats": self._beats}
        self._folder.replace(OWNER, json.dumps(values).encode())


def _owner_of(text: bytes) -> Owner:
    try:
        values = json.loads(text)
        inner = json.dumps(values["owner"]).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        inner = b""
    return Owner.from_bytes(inner, "in a bucket")
