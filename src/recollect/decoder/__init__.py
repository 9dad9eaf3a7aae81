"""Decoding token by token, with decisions and memory layouts that are made once."""

from recollect.decoder.static import StaticDecoder

__all__ = ["StaticDecoder"]
