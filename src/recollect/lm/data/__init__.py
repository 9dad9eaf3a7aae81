"""Rows of tokens from documents, and batches whose memory starts anew where a document does.

A row has ``context`` tokens: documents one after the other, the last one cut where the row ends and
going on in the next row. A batch of rows that hold borders becomes one row of all their tokens with
``cu_seqlens``; a batch without any is passed on as it is. Both mean the same: every stretch of a
document alone, from an empty memory.
"""

from recollect.lm.data.rows import Row, Rows, RowStream, collate, pack, read_rows

__all__ = ["Row", "RowStream", "Rows", "collate", "pack", "read_rows"]
