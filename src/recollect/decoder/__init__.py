"""Decoding token after token with what a token needs decided once."""

from recollect.decoder.static import StaticDecoder

__all__ = ["StaticDecoder"]
