"""Rows of tokens from documents, and batches whose memory starts anew where a document does."""

from recollect.lm.data.rows import Row, Rows, RowStream, collate, pack, read_rows

__all__ = ["Row", "RowStream", "Rows", "collate", "pack", "read_rows"]
