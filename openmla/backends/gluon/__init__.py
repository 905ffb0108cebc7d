"""Kernels in Gluon, for the shapes of released models: SM80's matrix instructions, and SM90's own.

They build on the portable kernels' host code: rows decoded once, runs merged.
"""
