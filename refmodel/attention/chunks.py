"""Rows a few at a time, so that memory is bounded whatever the length of a prompt.

>>> list(row_chunks(5, elements_a_row=100, chunk_elements=250))
[slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
"""

from __future__ import annotations

from collections.abc import Iterator


def row_chunks(num_rows: int, *, elements_a_row: int, chunk_elements: int) -> Iterator[slice]:
    """Slices that cover the rows in order, each of at most ``chunk_elements`` elements, and at least a row.

    Without rows there is one empty slice, so that the results of chunks can always be concatenated.
    """
    step = max(1, chunk_elements // max(1, elements_a_row))
    for start in range(0, max(1, num_rows), step):
        yield slice(start, min(start + step, num_rows))
