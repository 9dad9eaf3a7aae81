"""Replacement of the attention of a pretrained decoder by memory layers."""
