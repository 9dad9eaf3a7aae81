"""Converters between published layouts of saved models and ours.

A layout is a value of type `Layout` in `layout.py`, and the layouts of a library are a tuple in one
module, such as `FLA_LAYOUTS`. `convert.LAYOUTS` lists all. To add one, write three functions:

1. from the options of the published ``config.json`` to our configuration,
2. from our configuration to these options; `convert` then checks that function 1 returns the
   configuration, so this function reads fields and refuses nothing,
3. from both to the pieces: parts of published tensors, parts of ours, and the transforms between.
"""
