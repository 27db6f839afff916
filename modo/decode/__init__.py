"""Generation."""

from modo.decode.generate import generate

__all__ = ["generate"]
