"""A board that all ranks of a node can read: which collective each one is in, and what it waits for.

Messages find out that two ranks disagree only if they meet in one. Here every rank notes what it calls, and whoever
comes to the same call later sees what the others meant by it. When a wait reaches its limit, the board tells what each
rank was waiting for.
"""

import struct

ENTRY = struct.Struct("<q246sH")  # number of the call, claim, its length
KEY = struct.Struct("<q")
SLOTS = 64
WAIT = SLOTS * ENTRY.size  # where the text begins that says what the rank waits for
TEXT = struct.Struct("<H254s")
END = WAIT + TEXT.size  # 0, or the calls of a rank that has ended, plus 1
BYTES = END + KEY.size


class Board:
    """memories: {world rank: its BYTES of memory that all of the node's ranks see}."""

    def __init__(self, memories):
        self.memories = memories

    def post(self, rank, slot, key, claim):
        """Note that `rank` makes call number `key`, which is not 0."""
        text, memory, at = claim.encode()[:246], self.memories[rank], slot % SLOTS * ENTRY.size
        KEY.pack_into(memory, at, 0)  # readers pass over an entry that is being written
        ENTRY.pack_into(memory, at, 0, text, len(text))
        KEY.pack_into(memory, at, key)

    def calls(self, ranks, slot, key):
        """{rank: claim} of those who have come to call number `key`."""
        found = {}
        for rank in ranks:
            memory, at = self.memories.get(rank), slot % SLOTS * ENTRY.size
            if memory is not None and KEY.unpack_from(memory, at)[0] == key:
                _, text, length = ENTRY.unpack_from(memory, at)
                found[rank] = text[:length].decode(errors="replace")
        return found

    def end(self, rank, calls):
        """Note that `rank` has ended after so many calls."""
        KEY.pack_into(self.memories[rank], END, calls + 1)

    def ended(self):
        """{rank: its calls} of those that have ended."""
        counts = {rank: KEY.unpack_from(memory, END)[0] for rank, memory in sorted(self.memories.items())}
        return {rank: count - 1 for rank, count in counts.items() if count}

    def waits(self, rank, text):
        """Note what `rank` waits for; "" for nothing."""
        text = text.encode()[:254]
        TEXT.pack_into(self.memories[rank], WAIT, len(text), text)

    def waiting(self):
        """{rank: what it waits for} of all ranks of the node; "" for those that do not, or have just begun."""
        texts = {rank: TEXT.unpack_from(memory, WAIT) for rank, memory in sorted(self.memories.items())}
        return {rank: text[:length].decode(errors="replace") for rank, (length, text) in texts.items()}
