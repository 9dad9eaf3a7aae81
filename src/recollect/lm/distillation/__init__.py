"""Replacement of attention by memory layers that recover the loss of the original model."""
