"""Pages of the key-value cache on the host: which are free, who holds them.

Owns: counting. Refuses to know: what is in a page. Always holds: a page that several sequences share is freed when the
last of them lets it go; the pages held never exceed those there are.
"""

from collections.abc import Sequence


class Pages:
    """Numbered pages.

    Args:
        count: how many there are.
        size: tokens of a page.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def num_free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Take pages; there must be as many free."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]
